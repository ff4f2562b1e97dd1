"""A request as placement and limits see it, and the parsed body that it is made of.

``reduce_body`` shrinks a body that another process parsed: texts and lists become small values for which
``limits/caps.py`` gives the same result. The prompt itself is passed on as canonical bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from routing.limits.caps import PROMPTS_IN, count_prompts, media_urls
from routing.prompt.bodies import Message, ParsedBody
from routing.prompt.canonical import CanonicalPrompt, canonical_prompt
from routing.prompt.parsing import parse_body, session_key
from routing.prompt.rewrite import Layout, omits_usage


class PlacementRequest:
    """A request to be placed."""

    __slots__ = ("group", "is_plain", "key", "key_groups", "model", "prompt", "session_key", "tenant")

    def __init__(
        self,
        model: str | None,
        group: str | None,
        session_key: str | None,
        prompt: CanonicalPrompt,
        tenant: str = "",
        key: str | None = None,
        key_groups: tuple[str, ...] | None = None,
        *,
        is_plain: bool = False,
    ) -> None:
        self.model = model
        self.group = group  # the task group that the client named
        self.session_key = session_key
        self.prompt = prompt
        self.tenant = tenant  # the salt of its API key's tenant; "" without one
        self.key = key  # the name of its API key
        self.is_plain = is_plain  # not streamed, or without tokens: its first byte does not come with the first token
        self.key_groups = key_groups  # the task groups that the key is limited to; None: all


# Parameters that ``caps.py`` reads as numbers.
_NUMBERS: Final = (
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
)
_MAX_URL_CHARS: Final = 8192  # a longer URL is rejected wherever media hosts are limited
_DENIED_URL: Final = ""  # no media host matches it
_NOT_A_NUMBER: Final = "odd"


class BodyReading:
    """What was read of one request body."""

    __slots__ = ("body", "is_plain", "layout", "omits_usage", "prompt", "session_key")

    def __init__(
        self, body: ParsedBody, prompt: CanonicalPrompt, session: str | None, *, is_plain: bool, omits_usage: bool
    ) -> None:
        self.body = body  # for caps; reduced if another process parsed it
        self.prompt = prompt
        self.session_key = session
        self.is_plain = is_plain  # not streamed
        self.omits_usage = omits_usage  # a stream without usage, which the router may request
        self.layout: Layout | None = None  # set if another process parsed it


def read_body(path: str, data: bytes) -> BodyReading:
    """Parse the body of a POST to ``path``; BodyError names the field."""
    body = parse_body(path, data)
    prompt = canonical_prompt(body)
    return BodyReading(body, prompt, session_key(body), is_plain=body.stream is not True, omits_usage=omits_usage(body))


def reduce_body(body: ParsedBody) -> ParsedBody:
    """A body of the same endpoint with the same result of caps; at most a few hundred bytes without media."""
    small = type(body)(model=body.model, **{name: _reduce_number(getattr(body, name)) for name in _NUMBERS})
    for field in PROMPTS_IN.get(type(body), ()):
        if count := count_prompts(getattr(body, field)):
            setattr(small, field, [""] * count)
    if urls := list(_distinct(media_urls(body))):
        messages: Any = [Message(content=[{"url": url} for url in urls])]
        setattr(small, "messages" if hasattr(small, "messages") else "input", messages)
    return small


def _reduce_number(value: Any) -> Any:
    if value is None or isinstance(value, bool | float):
        return value
    return value if isinstance(value, int) and value.bit_length() <= 64 else _NOT_A_NUMBER


def _distinct(urls: Iterator[Any]) -> Iterator[str]:
    """Each URL once; data URLs are left out, and all that can only be denied become one."""
    seen: set[str] = set()
    for url in urls:
        if isinstance(url, str) and url[:5].lower() == "data:":
            continue
        reduced = url if isinstance(url, str) and len(url) <= _MAX_URL_CHARS else _DENIED_URL
        if reduced not in seen:
            seen.add(reduced)
            yield reduced
