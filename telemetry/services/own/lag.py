"""How far scraping is behind its time. Charts of a late telemetry look like a quiet fleet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db.models import Min

from telemetry.models import ScrapeShard


@dataclass(frozen=True, slots=True)
class ShardLag:
    """One shard of the fleet; seconds."""

    number: int
    lag_s: float  # behind its time: of its last tick, or of the one that is overdue
    took_s: float | None  # from the beginning of the last tick until all was stored; None while it runs
    missed: int  # ticks that never were
    targets: int
    failures: int


def scrape_lags(now: datetime) -> list[ShardLag]:
    """Of each shard, by number; empty before the first scrape. One query."""
    return [
        ShardLag(shard.number, _lag_s(shard, now), shard.took_s, shard.missed, shard.targets, shard.failures)
        for shard in ScrapeShard.objects.order_by("number")
    ]


def refused_since() -> datetime | None:
    """Since when the database has had no room for readings; None: it takes them. One query."""
    since: datetime | None = ScrapeShard.objects.aggregate(at=Min("refused_since"))["at"]
    return since


def _lag_s(shard: ScrapeShard, now: datetime) -> float:
    overdue_s = (now - shard.due_at).total_seconds() - settings.SCRAPE_INTERVAL_S
    return max(shard.lag_s, overdue_s)
