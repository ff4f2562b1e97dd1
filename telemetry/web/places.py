"""How addresses name a decision."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from telemetry.models import Decision

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def place_of(one: Decision) -> str:
    """A decision as an address names it: time in microseconds, router, boot, number."""
    return f"{(one.at - EPOCH) // timedelta(microseconds=1)}-{one.router_id}-{one.seq}-{one.boot}"


def read_place(text: str) -> tuple[datetime, int, str, int] | None:
    """The other way; None for a text that is no place."""
    *numbers, boot = text.split("-", 3)
    if len(numbers) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 17 for part in numbers):
        return None
    moment, router_id, seq = map(int, numbers)
    try:
        return EPOCH + timedelta(microseconds=moment), router_id, boot, seq
    except OverflowError:
        return None
