"""Chunks of a body whose length nobody says: one written, and one told from other bytes."""

from __future__ import annotations

from typing import Final

LAST_CHUNK: Final = b"0\r\n\r\n"
SHORT_CHUNK: Final = 1024  # bytes
_SIZE_LINES: Final = [b"%x\r\n" % length for length in range(SHORT_CHUNK)]


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
