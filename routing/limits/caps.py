"""How much one request may ask for: its parameters against a pool's or task group's caps.

Engines read parameters generously (``"16"`` and ``16.0`` are numbers to vLLM), so what is capped must be a whole number
here or is refused: nothing may count as more there than it did here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from routing.prompt.bodies import ChatBody, CompletionBody, EmbeddingBody, Message, ParsedBody, ResponsesBody
from routing.schema import Caps
from routing.types import BodyError

COMPLETION_TOKENS: Final = 16  # that /v1/completions generates where max_tokens is left out

_CHOICES: Final = ("n", "best_of")
_LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LENGTHS_READ: Final[dict[type[ParsedBody], tuple[str, ...]]] = {  # by engines; another endpoint's name says nothing
    ChatBody: ("max_tokens", "max_completion_tokens"),
    CompletionBody: ("max_tokens",),
    EmbeddingBody: (),
    ResponsesBody: ("max_output_tokens",),
}
PROMPTS_IN: Final[dict[type[ParsedBody], tuple[str, ...]]] = {
    CompletionBody: ("prompt", "prompt_embeds"),
    EmbeddingBody: ("input",),
}
_MEDIA_IN: Final = ("messages", "input", "previous_input_messages")
_LOGPROBS: Final = ("logprobs", "top_logprobs", "prompt_logprobs")
_remote: Final = re.compile(r"https?://([a-z0-9.-]+)(?::[0-9]{1,5})?(?:[/?#][!-\[\]-~]*)?", re.IGNORECASE).fullmatch


def check_caps(body: ParsedBody, caps: Caps) -> None:
    """BodyError, naming the field and its cap, for the first parameter that asks for too much."""
    for cap, fields in ((caps.n, _CHOICES), (caps.max_tokens, _LENGTHS), (caps.logprobs, _LOGPROBS)):
        if cap is not None:
            for field in fields:
                if (value := getattr(body, field)) is not None:
                    _check_number(field, value, cap)
    if caps.prompts is not None:
        _check_prompts(body, caps.prompts)
    if caps.media_hosts is not None:
        for url in media_urls(body):
            _check_media(url, caps.media_hosts)


def may_exceed_defaults(body: ParsedBody) -> bool:
    """Whether a body names any of ``_CHOICES``, all that ``Caps()`` bounds; one by one, because every body is asked."""
    return body.n is not None or body.best_of is not None


def length_to_add(body: ParsedBody, cap: int) -> tuple[str, int] | None:
    """The member that bounds what is generated, where the body says nothing, null or 0, which means: to the context."""
    names = _LENGTHS_READ[type(body)]
    if not names or any(getattr(body, name) for name in names):
        return None
    if isinstance(body, CompletionBody):
        return None if body.max_tokens == 0 else (names[0], min(cap, COMPLETION_TOKENS))
    return names[0], cap


def _check_number(field: str, value: Any, cap: int) -> None:
    if not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise BodyError(field, f"expected a whole number, at most {cap} here")
    if not 0 <= value <= cap:  # a negative one stands for all there are
        raise BodyError(field, f"at most {cap} here")


def _check_prompts(body: ParsedBody, cap: int) -> None:
    """Prompts count together, whatever they are given as; a body that gives none where they stand has one elsewhere."""
    fields = PROMPTS_IN.get(type(body), ())
    count = max(1, sum(prompts_in(getattr(body, field)) for field in fields))
    if fields and count > cap:
        raise BodyError(fields[0], f"{count} prompts in one request, at most {cap} here")


def prompts_in(given: Any) -> int:
    """A text or token ids are one, and so is what is neither; a list of these is as many."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return len(given)
    return 0 if given is None else 1


def _check_media(url: Any, hosts: tuple[str, ...]) -> None:
    if isinstance(url, str) and url[:5].lower() == "data:":
        return
    remote = _remote(url) if isinstance(url, str) else None
    if remote is None or remote[1].lower().rstrip(".") not in hosts:
        allowed = f"data: or a host of {', '.join(hosts)}" if hosts else "data:"
        raise BodyError("messages", f"media is loaded from {allowed} only")


def media_urls(body: ParsedBody) -> Iterator[Any]:
    """Every URL in what a body gives the engine to look at, under whatever kind of part."""
    for field in _MEDIA_IN:
        if isinstance(messages := getattr(body, field, None), list):
            for message in messages:
                yield from _urls(message.content if isinstance(message, Message) else message)


def _urls(value: Any) -> Iterator[Any]:
    """What stands under ``url`` or a name that ends so, in whatever lists; nested as deeply as anybody likes."""
    found: list[tuple[Any, bool]] = [(value, False)]
    while found:
        it, is_url = found.pop()
        if isinstance(it, dict):
            found += [(inner, name == "url" or name.endswith("_url")) for name, inner in it.items()]
        elif isinstance(it, list):
            found += [(inner, is_url) for inner in it]
        elif is_url and it is not None:
            yield it
