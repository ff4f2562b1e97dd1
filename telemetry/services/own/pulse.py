"""Whether telemetry keeps up with its own work. If it does not, silence means nothing."""

from __future__ import annotations

from datetime import datetime

from django.conf import settings
from django.db.models import Min

from telemetry.services.notifications.outbox import due
from telemetry.services.own.lag import evaluation_lag_s, scrape_lag_s

INTERVALS = 3  # behind by more than so many, and it does not keep up
DELIVERY_EVERY_S = 5  # as beat knocks


def delivery_lag_s(now: datetime) -> float | None:
    """How long the message that could go out longest has been waiting; None where none is. One query."""
    oldest: datetime | None = due(now).aggregate(at=Min("next_at"))["at"]
    return None if oldest is None else (now - oldest).total_seconds()


def falling_behind(now: datetime) -> list[str]:
    """What is more than ``INTERVALS`` intervals late, in words; [] where all is well. Three queries."""
    every_s = settings.SCRAPE_INTERVAL_S
    lags = (
        ("scraping", scrape_lag_s(now), every_s),
        ("evaluating alert rules", evaluation_lag_s(now), max(every_s, 5)),
        ("delivering messages", delivery_lag_s(now), DELIVERY_EVERY_S),
    )
    return [f"{what} is {lag:.0f} s late" for what, lag, each in lags if lag is not None and lag > INTERVALS * each]
