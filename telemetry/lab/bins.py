"""The ladder's bins of time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

MINUTE = timedelta(minutes=1)
BIN = timedelta(minutes=5)


def bin_start(at: datetime) -> datetime:
    """When the bin began that holds this moment."""
    return datetime.fromtimestamp(at.timestamp() // BIN.total_seconds() * BIN.total_seconds(), UTC)
