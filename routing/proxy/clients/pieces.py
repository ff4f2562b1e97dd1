"""A body that comes in pieces, kept as few objects: one for each tiny chunk or read would be many times its bytes."""

from __future__ import annotations

from typing import Final

PIECE_BYTES: Final = 4096  # a shorter piece is joined to the next


def join_tail(pieces: list[bytes], kept: int) -> None:
    """Join what came behind the first ``kept`` pieces into one, and to the last of these where that is short."""
    start = kept - 1 if kept and len(pieces[kept - 1]) < PIECE_BYTES else kept
    if len(pieces) > start + 1:
        pieces[start:] = [b"".join(pieces[start:])]
