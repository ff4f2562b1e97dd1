"""Which headers of a message are of one connection alone, and go no further."""

from __future__ import annotations

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
