"""The most that one request may ask for. It holds for everybody, with keys or without."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from routing.schema.base import Frozen

Host = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Amount = Annotated[int, Meta(ge=0, le=1 << 31)]


class Caps(Frozen, frozen=True):
    """The most that one request may ask for. None: whatever the engine allows."""

    n: Annotated[Amount | None, Meta(description="Choices a prompt, best_of included.", extra={"unit": "choices"})] = (
        128  # OpenAI's own limit, where vLLM would take 16,384
    )
    max_tokens: Annotated[
        Amount | None,
        Meta(
            description="Generated a choice, under every name that says so; put in where a request says none.",
            extra={"unit": "tokens"},
        ),
    ] = None
    logprobs: Annotated[
        Amount | None,
        Meta(
            description="Alternatives a token: logprobs, top_logprobs, prompt_logprobs.", extra={"unit": "alternatives"}
        ),
    ] = None
    prompts: Annotated[
        Amount | None, Meta(description="In one completion or embedding.", extra={"unit": "prompts"})
    ] = None
    media_hosts: Annotated[
        tuple[Host, ...] | None,
        Meta(description="Hosts that the engine may load media from; none of them: data URLs alone."),
    ] = None
