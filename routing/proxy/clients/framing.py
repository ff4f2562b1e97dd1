"""How an answer's body is framed for the client.

Bodies are framed anew: the bytes inside a chunk or a length are the replica's, the chunk sizes are ours. All the
chunks that came in one read leave as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from routing.proxy.clients.local_answer import connection_line
from routing.proxy.replicas.answer import CHUNKED, CLOSE, LENGTH, AnswerHead

LAST_CHUNK: Final = b"0\r\n\r\n"
SHORT_CHUNK: Final = 1024  # bytes
_SIZE_LINES: Final = [b"%x\r\n" % length for length in range(SHORT_CHUNK)]

Frame = Callable[[bytes, bool], bytes]


def plain(data: bytes, last: bool) -> bytes:  # noqa: ARG001 - one shape for all framings
    """Frame body bytes whose end is told by a length or by the connection."""
    return data


def chunked(data: bytes, last: bool) -> bytes:
    """Frame body bytes as one chunk; the last one is followed by the end."""
    if not data:
        return LAST_CHUNK if last else b""
    if last:
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunk_start(data: bytes) -> int:
    """Where the bytes begin that are all of one chunk, written as ``chunked`` does; 0 for anything else, or longer."""
    size = len(data)
    for start in (3, 4, 5):  # behind one, two or three digits
        length = size - start - 2
        if 0 < length < SHORT_CHUNK:
            line = _SIZE_LINES[length]
            if len(line) == start:
                return start if data[:start] == line and data[-2:] == b"\r\n" else 0
    return 0


def outgoing(answer: AnswerHead, whole: int | None, *, http11: bool, keep_alive: bool) -> tuple[bytes, Frame, bool]:
    """How an answer goes out: the framing's header lines, the framing of its bytes, whether the connection lives on.

    ``whole``: bytes of the body, where all of it is here.
    """
    framing, frame, lines = answer.framing, plain, b""
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
