"""How far scraping and evaluating are behind their time. Charts of a late telemetry look like a quiet fleet."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db.models import Min

from telemetry.models import AlertRule, ScrapeShard


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


def scrape_lag_s(now: datetime) -> float | None:
    """How far the shard that is worst off is behind its time; None before the first scrape. One query."""
    return max((shard.lag_s for shard in scrape_lags(now)), default=None)


def refused_since() -> datetime | None:
    """Since when the database has had no room for readings; None: it takes them. One query."""
    since: datetime | None = ScrapeShard.objects.aggregate(at=Min("refused_since"))["at"]
    return since


def evaluation_lag_s(now: datetime) -> float | None:
    """How overdue the evaluation of the rule that waits longest is; None where no rule was ever evaluated. One query.

    Rules are evaluated as often as the fleet is scraped, and every 5 s at most.
    """
    oldest: datetime | None = AlertRule.objects.filter(enabled=True).aggregate(at=Min("evaluated_at"))["at"]
    every_s = max(settings.SCRAPE_INTERVAL_S, 5)
    return None if oldest is None else max(0.0, (now - oldest).total_seconds() - every_s)


def _lag_s(shard: ScrapeShard, now: datetime) -> float:
    overdue_s = (now - shard.due_at).total_seconds() - settings.SCRAPE_INTERVAL_S
    return max(shard.lag_s, overdue_s)
