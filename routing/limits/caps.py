"""Caps: rejects requests whose parameters ask for more than their pool or task group allows.

Engines accept several spellings of a number (vLLM reads ``"16"`` and ``16.0`` as numbers), so a capped parameter must
be a whole number here or is rejected: no value may count as more at the engine than it does here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from routing.prompt.bodies import ChatBody, CompletionBody, EmbeddingBody, Message, ParsedBody, ResponsesBody
from routing.schema import Caps
from routing.types import BodyError

COMPLETION_TOKENS: Final = 16  # the default of max_tokens at /v1/completions

_CHOICES: Final = ("n", "best_of")
_LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_LENGTHS_READ: Final[dict[type[ParsedBody], tuple[str, ...]]] = {  # the names that engines read at each endpoint
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
    """Raise BodyError for the first parameter that exceeds its cap; it names the field and the cap."""
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
    """Whether a body names a parameter that ``Caps()`` bounds: one of ``_CHOICES``, unrolled for the request path."""
    return body.n is not None or body.best_of is not None


def length_to_add(body: ParsedBody, cap: int) -> tuple[str, int] | None:
    """The parameter and value that bound a response's length, where the body has none, null or 0 (no limit)."""
    names = _LENGTHS_READ[type(body)]
    if not names or any(getattr(body, name) for name in names):
        return None
    if isinstance(body, CompletionBody):
        return None if body.max_tokens == 0 else (names[0], min(cap, COMPLETION_TOKENS))
    return names[0], cap


def _check_number(field: str, value: Any, cap: int) -> None:
    if not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise BodyError(field, f"expected a whole number, at most {cap} here")
    if not 0 <= value <= cap:  # a negative number means no limit
        raise BodyError(field, f"at most {cap} here")


def _check_prompts(body: ParsedBody, cap: int) -> None:
    """Check the sum over all fields with prompts; a body with none of them has one prompt elsewhere."""
    fields = PROMPTS_IN.get(type(body), ())
    count = max(1, sum(count_prompts(getattr(body, field)) for field in fields))
    if fields and count > cap:
        raise BodyError(fields[0], f"{count} prompts in one request, at most {cap} here")


def count_prompts(value: Any) -> int:
    """Number of prompts in a field: the length of a list of texts or of token id lists, otherwise one; 0 for None."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return len(value)
    return 0 if value is None else 1


def _check_media(url: Any, hosts: tuple[str, ...]) -> None:
    if isinstance(url, str) and url[:5].lower() == "data:":
        return
    remote = _remote(url) if isinstance(url, str) else None
    if remote is None or remote[1].lower().rstrip(".") not in hosts:
        allowed = f"data: or a host of {', '.join(hosts)}" if hosts else "data:"
        raise BodyError("messages", f"media is loaded from {allowed} only")


def media_urls(body: ParsedBody) -> Iterator[Any]:
    """Every URL in a body's messages that the engine may load, whatever the kind of part."""
    for field in _MEDIA_IN:
        if isinstance(messages := getattr(body, field, None), list):
            for message in messages:
                yield from _urls(message.content if isinstance(message, Message) else message)


def _urls(value: Any) -> Iterator[Any]:
    """The values of keys named ``url`` or ending in ``_url``, at any depth."""
    pending: list[tuple[Any, bool]] = [(value, False)]
    while pending:
        item, is_url = pending.pop()
        if isinstance(item, dict):
            pending += [(inner, name == "url" or name.endswith("_url")) for name, inner in item.items()]
        elif isinstance(item, list):
            pending += [(inner, is_url) for inner in item]
        elif is_url and item is not None:
            yield item
