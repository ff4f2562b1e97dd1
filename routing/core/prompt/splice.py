"""One member put into a JSON object without writing the rest of it anew.

What goes to an engine should be what its client sent, byte by byte. A body that does not name the member gets it behind
its last one. A body that does name it, however often and however spelled, is put together from its members as they
stand, each once, as a parser that lets the last one win would read them (RFC 8259 leaves that open, engines do it).
"""

from __future__ import annotations

from typing import Final

import msgspec

from routing.core.prompt.parsing import not_json

_BLANKS: Final = b" \t\n\r"
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_json: Final = msgspec.json.Encoder().encode


def with_member(body: bytes, name: str, value: str | int | msgspec.Raw) -> bytes:
    """``body``, a JSON object that was read before, with ``name``, of letters and underscores, as ``value``.

    BodyError where the names of its members, which nobody has read before, are no text.
    """
    if may_name(body, name):
        members = _decoded(body)
        if name in members:
            return _json(members | {name: msgspec.Raw(_json(value))})
    start = body.rstrip(_BLANKS)[:-1].rstrip(_BLANKS)
    comma = b"" if start.endswith(b"{") else b","  # only an empty object ends so: a text ends with its quote
    return b"%b%b%b:%b}" % (start, comma, _json(name), _json(value))


def member(body: bytes, name: str) -> msgspec.Raw | None:
    """The member ``name`` of a JSON object as it stands, the last one of several; None without. BodyError as above."""
    return _decoded(body).get(name) if may_name(body, name) else None


def may_name(body: bytes, name: str) -> bool:
    """Whether a JSON object can have the member ``name``, however it is spelled; False only where it has none."""
    return name.encode() in body or (b"\\" in body and b"\\u00" in body)  # there is no other way to spell a letter


def _decoded(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None
