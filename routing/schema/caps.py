"""The most that one request may ask for. It holds for everybody, with keys or without."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from routing.schema.base import Frozen, of_form

Host = Annotated[str, of_form(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")]
Amount = Annotated[int, Meta(ge=0, le=1 << 31)]

Choices = Annotated[Amount | None, Meta(description="Choices a prompt, best_of included.", extra={"unit": "choices"})]
Length = Annotated[
    Amount | None,
    Meta(
        description="Generated a choice, under every name that says so; put in where a request says none.",
        extra={"unit": "tokens"},
    ),
]
Alternatives = Annotated[
    Amount | None,
    Meta(description="Alternatives a token: logprobs, top_logprobs, prompt_logprobs.", extra={"unit": "alternatives"}),
]
Prompts = Annotated[Amount | None, Meta(description="In one completion or embedding.", extra={"unit": "prompts"})]
MediaHosts = Annotated[
    tuple[Host, ...] | None,
    Meta(description="Hosts that the engine may load media from; none of them: data URLs alone."),
]


class Caps(Frozen, frozen=True):
    """The most that one request may ask for. None: whatever the engine allows."""

    n: Choices = 128  # OpenAI's own limit, where vLLM would take 16,384
    max_tokens: Length = None
    logprobs: Alternatives = None
    prompts: Prompts = None
    media_hosts: MediaHosts = None


class GroupCaps(Frozen, frozen=True):
    """A task group's own caps, be they less or more than its pool's. None: what the pool says."""

    n: Choices = None
    max_tokens: Length = None
    logprobs: Alternatives = None
    prompts: Prompts = None
    media_hosts: MediaHosts = None

    def over(self, pool: Caps) -> Caps:
        """What holds for the group's requests: each cap its own where it has one, else the pool's."""
        own = {name: cap for name in self.__struct_fields__ if (cap := getattr(self, name)) is not None}
        return msgspec.structs.replace(pool, **own)
