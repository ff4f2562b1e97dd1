"""A streamed request that asks its engine for token usage, though its client did not.

A client asks with ``stream_options.include_usage``; left out, null and false all mean that it does not. Its other
stream options are kept as they stand.
"""

from __future__ import annotations

from typing import Final

import msgspec

from routing.core.prompt.bodies import ChatBody, CompletionBody, ParsedBody
from routing.core.prompt.splice import Layout, member, with_member, with_members
from routing.core.types import BodyError

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
