"""A streamed request that asks its engine for token usage, though its client did not.

A client asks with ``stream_options.include_usage``; left out, null and false all mean that it does not. Its other
stream options are kept as they stand.
"""

from __future__ import annotations

from typing import Final

import msgspec

from routing.core.prompt.bodies import ChatBody, CompletionBody, ParsedBody
from routing.core.prompt.splice import member, with_member
from routing.core.types import BodyError

_OPTIONS: Final = "stream_options"
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


def with_usage_requested(body: bytes) -> bytes:
    """``body``, of which ``omits_usage`` is true, with ``include_usage``; itself where its members cannot be read."""
    try:
        options = member(body, _OPTIONS)
        if options is None or bytes(options) == b"null":
            return with_member(body, _OPTIONS, _ASKED)
        return with_member(body, _OPTIONS, msgspec.Raw(with_member(bytes(options), "include_usage", True)))
    except BodyError:
        return body
