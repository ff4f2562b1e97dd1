"""Which headers of a message are of one connection alone, and go no further."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

Header = tuple[bytes, bytes]

HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade"}
)


def without_named(lines: list[bytes], connection: list[bytes]) -> list[bytes]:
    """Drop the header lines that a Connection header names: they were meant for this hop alone."""
    named = {token.strip().lower() for value in connection for token in value.split(b",")} - {b"close", b"keep-alive"}
    if not named:
        return lines
    return [line for line in lines if line.partition(b":")[0].lower() not in named]


def template_of(lines: bytes, cut: Sequence[Header]) -> bytes:
    """Header lines as a format of all values of ``cut``, in order.

    A value whose header is not among the lines is taken by the format, and left out of what it gives.
    """
    pieces: list[bytes] = []
    at = 0
    for name, value in cut:
        line = b"%b: %b\r\n" % (name, value)
        start = lines.find(line, at)
        while start > 0 and lines[start - 1] != 0x0A:
            start = lines.find(line, start + 1)
        if start < 0:
            pieces.append(b"%.0b")
            continue
        pieces.append(lines[at:start].replace(b"%", b"%%") + name + b": %b\r\n")
        at = start + len(line)
    pieces.append(lines[at:].replace(b"%", b"%%"))
    return b"".join(pieces)
