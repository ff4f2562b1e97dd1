"""One member put into a JSON object without writing the rest of it anew.

What goes to an engine should be what its client sent, byte by byte. A body that does not name the member gets it behind
its last one. A body that does name it, however often and however spelled, is put together from its members as they
stand, each once, as a parser that lets the last one win would read them (RFC 8259 leaves that open, engines do it).

Looking for a member takes a decoder's time, which the event loop does not have for a large body. The process that reads
it notes where the members are that may be put in (``Layout``), so that putting them in costs one copy.

A streamed request that asks its engine for token usage, though its client did not.

A client asks with ``stream_options.include_usage``; left out, null and false all mean that it does not. Its other
stream options are kept as they stand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

from routing.prompt.bodies import ChatBody, CompletionBody, ParsedBody
from routing.prompt.parsing import not_json
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
    """Where a JSON object has the members that may be replaced, in bytes."""

    __slots__ = ("end", "spans")

    def __init__(self, spans: dict[str, tuple[int, int]], end: int) -> None:
        self.spans = spans  # start and end of their values
        self.end = end  # where a further member goes: behind the last one, or behind the opening brace


def with_member(body: bytes, name: str, value: Value) -> bytes:
    """``body``, a JSON object that was read before, with ``name``, of letters and underscores, as ``value``.

    BodyError where the names of its members, which nobody has read before, are no text.
    """
    if may_name(body, name):
        members = _decoded(body)
        if name in members:
            return _json(members | {name: msgspec.Raw(_json(value))})
    end = body.rindex(b"}")
    start: bytes | memoryview = memoryview(body)[:end]  # a body may be large: it is copied once
    if body[end - 1] in _BLANKS:
        start = body[:end].rstrip(_BLANKS)
    comma = b"" if start[-1] == _OPENING else b","  # only an empty object ends so: a text ends with its quote
    return b"".join((start, comma, _json(name), b":", _json(value), b"}"))


def layout_of(body: bytes) -> Layout:
    """The layout of a JSON object that was read before; BodyError where two members have one name, and as above.

    Members come in the order of the text. With a name that comes twice there are fewer than the text has, so that this
    order, or the end, is not met.
    """
    spans, at = dict[str, tuple[int, int]](), _after_blanks(body, 0)
    end = at + 1
    for name, value in _decoded(body).items():
        found, data = _name(body, at), bytes(value)
        if found is None or not body.startswith(data, found.end()):
            break
        end = found.end() + len(data)
        if name in REPLACEABLE:
            spans[name] = (found.end(), end)
        at = _after_blanks(body, end)
    rest = body[_after_blanks(body, end) :]
    if rest[:1] != b"}" or rest[1:].strip(_BLANKS):
        raise BodyError(None, "a member of the object is named twice")
    return Layout(spans, end)


def with_members(body: bytes, values: Mapping[str, Value], layout: Layout) -> tuple[bytes, Layout]:
    """``body``, a JSON object of this layout, with these members, all of them ``REPLACEABLE``; and its layout then."""
    left = {name: _json(value) for name, value in values.items()}
    view, at, size = memoryview(body), 0, 0
    pieces: list[bytes | memoryview] = []
    spans: dict[str, tuple[int, int]] = {}
    for name, (start, end) in layout.spans.items():
        value = left.pop(name, view[start:end])
        size += start - at
        pieces += (view[at:start], value)
        spans[name] = (size, size + len(value))
        size += len(value)
        at = end
    pieces.append(view[at : layout.end])
    size += layout.end - at
    comma = (
        b"" if body[layout.end - 1] == _OPENING else b","
    )  # only an empty object ends so: a text ends with its quote
    for name, data in left.items():
        head = b"%b%b:" % (comma, _json(name))
        pieces += (head, data)
        spans[name] = (size + len(head), size + len(head) + len(data))
        size += len(head) + len(data)
        comma = b","
    pieces.append(view[layout.end :])
    return b"".join(pieces), Layout(spans, size)


def member(body: bytes, name: str) -> msgspec.Raw | None:
    """The member ``name`` of a JSON object as it stands, the last one of several; None without. BodyError as above."""
    return _decoded(body).get(name) if may_name(body, name) else None


def may_name(body: bytes, name: str) -> bool:
    """Whether a JSON object can have the member ``name``, however it is spelled; False only where it has none."""
    return name.encode() in body or (b"\\" in body and b"\\u00" in body)  # there is no other way to spell a letter


def _after_blanks(body: bytes, at: int) -> int:
    found = _blanks(body, at)
    return found.end() if found else at


def _decoded(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None


_OPTIONS: Final = "stream_options"
_LONGEST_BYTES: Final = 4096  # of stream options in a large body
_ASKED: Final = msgspec.Raw(b'{"include_usage":true}')


def omits_usage(body: ParsedBody) -> bool:
    """Whether a body asks for a stream without usage, and the engine may be asked for it all the same.

    With ``continuous_usage_stats`` it may not be: every chunk would then carry usage that the client does not expect.
    """
    if body.stream is not True or not isinstance(body, ChatBody | CompletionBody):
        return False
    options = body.stream_options
    if options is None:
        return True
    if type(options) is not dict or options.get("continuous_usage_stats"):
        return False
    asked = options.get("include_usage")
    return asked is None or asked is False


def with_usage_requested(body: bytes, layout: Layout | None = None) -> bytes:
    """``body``, of which ``omits_usage`` is true, with ``include_usage``; itself where its members cannot be read.

    With a layout, also itself where its stream options are longer than anybody's.
    """
    try:
        if layout is None:
            return with_member(body, _OPTIONS, _with_usage(member(body, _OPTIONS)))
        start, end = layout.spans.get(_OPTIONS, (0, 0))
        if end - start > _LONGEST_BYTES:
            return body
        options = msgspec.Raw(body[start:end]) if end else None
        return with_members(body, {_OPTIONS: _with_usage(options)}, layout)[0]
    except BodyError:
        return body


def _with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    if options is None or bytes(options) == b"null":
        return _ASKED
    return msgspec.Raw(with_member(bytes(options), "include_usage", True))
