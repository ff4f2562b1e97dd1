"""How an answer's body is framed for the client.

Bodies are framed anew: the bytes inside a chunk or a length are the replica's, the chunk sizes are ours. All the
chunks that came in one read leave as one.
"""

from __future__ import annotations

from collections.abc import Callable

from routing.proxy.http.answer import CHUNKED, CLOSE, LENGTH, AnswerHead
from routing.proxy.http.chunks import chunked
from routing.proxy.http.local_answer import connection_line

Frame = Callable[[bytes, bool], bytes]


def plain(data: bytes, last: bool) -> bytes:  # noqa: ARG001 - one shape for all framings
    """Frame body bytes whose end is told by a length or by the connection."""
    return data


def outgoing(
    answer: AnswerHead, whole: int | None, *, http11: bool, keep_alive: bool, is_filtered: bool = False
) -> tuple[bytes, Frame, bool]:
    """How an answer goes out: the framing's header lines, the framing of its bytes, whether the connection lives on.

    ``whole``: bytes of the body, where all of it is here. ``is_filtered``: bytes may be taken out of what is to come.
    """
    framing, frame, lines = answer.framing, plain, b""
    if is_filtered and whole is None and framing is LENGTH:
        framing = CHUNKED
    if whole is not None and framing is LENGTH:
        lines = b"Content-Length: %d\r\n" % whole
    elif answer.length and framing is not CHUNKED:
        lines = b"Content-Length: %b\r\n" % answer.length
    if framing is CHUNKED and http11:
        lines, frame = b"Transfer-Encoding: chunked\r\n", chunked
    elif framing is CLOSE or framing is CHUNKED:
        keep_alive = False
    if not (http11 and keep_alive):
        lines += connection_line(http11=http11, keep_alive=keep_alive)
    return lines, frame, keep_alive
