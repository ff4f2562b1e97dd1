"""What placing a request needs to know of it.

A body, read: what placing and limiting its request need, and nothing else of it.

``reduced`` makes a body small that another process has read: texts and lists give way to what ``limits/caps.py`` gets
the same verdict from. The prompt itself goes on as canonical bytes.
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
        self.is_plain = is_plain  # no byte of its response will come with the first token: not streamed, or no tokens
        self.key_groups = key_groups  # the task groups that the key is good for; None: all


# What ``caps.py`` looks at as numbers, and nothing larger than this many characters of a text.
_KEPT: Final = (
    "n",
    "best_of",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
)
_LONGEST_URL: Final = 8192  # characters; a longer one is refused wherever hosts are named
_NO_URL: Final = ""  # which no host allows
_ODD: Final = "odd"  # which is no number


class BodyReading:
    """What was read of one body."""

    __slots__ = ("body", "is_plain", "layout", "omits_usage", "prompt", "session_key")

    def __init__(
        self, body: ParsedBody, prompt: CanonicalPrompt, session: str | None, *, is_plain: bool, omits_usage: bool
    ) -> None:
        self.body = body  # for caps; reduced where another process read it
        self.prompt = prompt
        self.session_key = session  # that the body names
        self.is_plain = is_plain  # asks for no stream
        self.omits_usage = omits_usage  # of a stream, and may be asked for it
        self.layout: Layout | None = None  # where another process read it


def read_body(path: str, data: bytes) -> BodyReading:
    """Read the body of a POST to ``path``; BodyError names the field."""
    body = parse_body(path, data)
    prompt = canonical_prompt(body)
    return BodyReading(body, prompt, session_key(body), is_plain=body.stream is not True, omits_usage=omits_usage(body))


def reduced(body: ParsedBody) -> ParsedBody:
    """A body of the same endpoint that meets caps as this one does; of at most a few hundred bytes without media."""
    small = type(body)(model=body.model, **{name: _number(getattr(body, name)) for name in _KEPT})
    for field in PROMPTS_IN.get(type(body), ()):
        if count := count_prompts(getattr(body, field)):
            setattr(small, field, [""] * count)
    if urls := list(_distinct(media_urls(body))):
        given: Any = [Message(content=[{"url": url} for url in urls])]
        setattr(small, "messages" if hasattr(small, "messages") else "input", given)
    return small


def _number(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | float) or _is_small(value) else _ODD


def _is_small(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() <= 64


def _distinct(urls: Iterator[Any]) -> Iterator[str]:
    """Each URL once; those that are data are not looked at, and all that can only be refused are one."""
    seen: set[str] = set()
    for url in urls:
        is_text = isinstance(url, str) and len(url) <= _LONGEST_URL
        if isinstance(url, str) and url[:5].lower() == "data:":
            continue
        if (kept := url if is_text else _NO_URL) not in seen:
            seen.add(kept)
            yield kept
