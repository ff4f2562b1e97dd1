"""Sets members of a request body, a JSON object, without encoding the rest of it again.

An engine should receive the bytes that its client sent. If a body does not have the member, the member is appended. If
it does, however often and however spelled, the body is joined from the raw text of its members, each once, the last of
several with the same name (RFC 8259 leaves the choice open; engines take the last).

Looking for a member takes as long as decoding, which is too long for the event loop if the body is large. The process
that parses large bodies therefore returns the positions of the members that may be replaced (``Layout``), so that
setting them costs one copy.

``with_usage_requested`` asks an engine for the token usage of a stream whose client did not ask. A client asks with
``stream_options.include_usage``; a missing value, null and false mean that it does not. Its other options are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from routing.prompt.bodies import ChatBody, CompletionBody, ParsedBody
from routing.prompt.parsing import not_json_error
from routing.types import BodyError

Value = str | int | msgspec.Raw
REPLACEABLE: Final = frozenset(
    {"cache_salt", "max_completion_tokens", "max_output_tokens", "max_tokens", "model", "stream_options"}
)
_BLANKS: Final = b" \t\n\r"
_OPENING: Final = ord("{")
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_json: Final = msgspec.json.Encoder().encode
_name: Final = re.compile(rb'[{,][ \t\n\r]*"(?:[^"\\]|\\.)*"[ \t\n\r]*:[ \t\n\r]*', re.DOTALL).match
_blanks: Final = re.compile(rb"[ \t\n\r]*").match


class Layout:
    """Byte offsets of the replaceable members in a JSON object."""

    __slots__ = ("end", "spans")

    def __init__(self, spans: dict[str, tuple[int, int]], end: int) -> None:
        self.spans = spans  # start and end of each value
        self.end = end  # where a member is appended: after the last one, or after the opening brace


def with_member(body: bytes, name: str, value: Value) -> bytes:
    """``body``, a JSON object, with the member ``name``, of letters and underscores, set to ``value``.

    Raises BodyError if the name of a member is not valid UTF-8, because parsing the body skipped it.
    """
    if may_have_member(body, name):
        members = _decoded(body)
        if name in members:
            return _json(members | {name: msgspec.Raw(_json(value))})
    end = body.rindex(b"}")
    start: bytes | memoryview = memoryview(body)[:end]  # a body may be large: it is copied once
    if body[end - 1] in _BLANKS:
        start = body[:end].rstrip(_BLANKS)
    comma = b"" if start[-1] == _OPENING else b","  # a brace is there only in an empty object
    return b"".join((start, comma, _json(name), b":", _json(value), b"}"))


def layout_of(body: bytes) -> Layout:
    """The layout of a JSON object; BodyError if two members have the same name, or as for ``with_member``.

    The decoder returns members in the order of the text. If a name occurs twice, the decoder returns fewer members than
    the text has, and either a value or the end of the object is not where it is expected.
    """
    spans, at = dict[str, tuple[int, int]](), _after_blanks(body, 0)
    end = at + 1
    for name, value in _decoded(body).items():
        match, data = _name(body, at), bytes(value)
        if match is None or not body.startswith(data, match.end()):
            break
        end = match.end() + len(data)
        if name in REPLACEABLE:
            spans[name] = (match.end(), end)
        at = _after_blanks(body, end)
    rest = body[_after_blanks(body, end) :]
    if rest[:1] != b"}" or rest[1:].strip(_BLANKS):
        raise BodyError(None, "two members of the object have the same name")
    return Layout(spans, end)


def with_members(body: bytes, values: Mapping[str, Value], layout: Layout) -> tuple[bytes, Layout]:
    """``body``, a JSON object of this layout, with these ``REPLACEABLE`` members set, and its new layout."""
    missing = {name: _json(value) for name, value in values.items()}
    view, at, size = memoryview(body), 0, 0
    pieces: list[bytes | memoryview] = []
    spans: dict[str, tuple[int, int]] = {}
    for name, (start, end) in layout.spans.items():
        value = missing.pop(name, view[start:end])
        size += start - at
        pieces += (view[at:start], value)
        spans[name] = (size, size + len(value))
        size += len(value)
        at = end
    pieces.append(view[at : layout.end])
    size += layout.end - at
    comma = b"" if body[layout.end - 1] == _OPENING else b","  # a brace is there only in an empty object
    for name, data in missing.items():
        key = b"%b%b:" % (comma, _json(name))
        pieces += (key, data)
        spans[name] = (size + len(key), size + len(key) + len(data))
        size += len(key) + len(data)
        comma = b","
    pieces.append(view[layout.end :])
    return b"".join(pieces), Layout(spans, size)


def member(body: bytes, name: str) -> msgspec.Raw | None:
    """The raw member ``name`` of a JSON object, the last of several; None without one. Raises as ``with_member``."""
    return _decoded(body).get(name) if may_have_member(body, name) else None


def may_have_member(body: bytes, name: str) -> bool:
    """False if a JSON object cannot have the member ``name``, however it is spelled."""
    return name.encode() in body or (b"\\" in body and b"\\u00" in body)  # the only escape of a letter


def _after_blanks(body: bytes, at: int) -> int:
    match = _blanks(body, at)
    return match.end() if match else at


def _decoded(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json_error(error) from None


_OPTIONS: Final = "stream_options"
_MAX_OPTIONS_BYTES: Final = 4096
_INCLUDE_USAGE: Final = msgspec.Raw(b'{"include_usage":true}')


def omits_usage(body: ParsedBody) -> bool:
    """Whether a body asks for a stream without usage, and the router may request the usage for itself.

    It may not with ``continuous_usage_stats``: every chunk would then have usage that the client does not expect.
    """
    if body.stream is not True or not isinstance(body, ChatBody | CompletionBody):
        return False
    options = body.stream_options
    if options is None:
        return True
    if type(options) is not dict or options.get("continuous_usage_stats"):
        return False
    include_usage = options.get("include_usage")
    return include_usage is None or include_usage is False


def with_usage_requested(body: bytes, layout: Layout | None = None) -> bytes:
    """A body for which ``omits_usage`` is true, with ``include_usage`` set.

    Unchanged if its members cannot be read, or if a body with a layout has unusually long stream options.
    """
    try:
        if layout is None:
            return with_member(body, _OPTIONS, _with_usage(member(body, _OPTIONS)))
        start, end = layout.spans.get(_OPTIONS, (0, 0))
        if end - start > _MAX_OPTIONS_BYTES:
            return body
        options = msgspec.Raw(body[start:end]) if end else None
        return with_members(body, {_OPTIONS: _with_usage(options)}, layout)[0]
    except BodyError:
        return body


def _with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    if options is None or bytes(options) == b"null":
        return _INCLUDE_USAGE
    return msgspec.Raw(with_member(bytes(options), "include_usage", True))
