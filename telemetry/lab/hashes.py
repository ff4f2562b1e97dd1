"""Hashes of blocks: 64 bits, as people, PostgreSQL and Python write them."""

from __future__ import annotations

HASHES = 1 << 64  # as many there are


def signed(shown: str | None) -> int | None:
    """A hash as people see it -> as PostgreSQL stores it: the signed integer of the same bits."""
    return None if shown is None else (int(shown, 16) ^ HASHES // 2) - HASHES // 2


def shown(stored: int) -> str:
    """The other way."""
    return f"{stored & (HASHES - 1):016x}"
