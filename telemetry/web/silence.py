"""Whether reading the fleet stopped: a figure that is shown as now has to be of now."""

from __future__ import annotations

from datetime import datetime

from django.conf import settings

from telemetry.metrics.windows import FleetTiles

LATE_INTERVALS = 3  # scrapes that may be missed before a page says that reading stopped


def reading_stopped(tiles: FleetTiles, now: datetime) -> str:
    """``late`` when the newest reading is too old to be called now, ``never`` before the first one, else nothing."""
    if not tiles.replicas_total:
        return ""
    return silence_of(tiles.read_at, now)


def silence_of(read_at: datetime | None, now: datetime) -> str:
    """The same by the newest reading's time."""
    if read_at is None:
        return "never"
    allowed_s = LATE_INTERVALS * settings.SCRAPE_INTERVAL_S + 1
    return "late" if (now - read_at).total_seconds() > allowed_s else ""
