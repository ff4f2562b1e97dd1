"""What scraping knows of a target, in one word and a reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings

from telemetry.models import STARTING_S, Health, ScrapeState
from telemetry.storage.cold import COLD_S

SILENT_INTERVALS = 3  # nothing tried for so long: it is the scraper that is away


@dataclass(frozen=True, slots=True)
class HealthWord:
    """``up``, ``starting``, ``down``, ``stale``, ``cold`` or ``unknown``, and why; ``reason`` is "" when up."""

    word: str
    reason: str = ""

    @property
    def answers(self) -> bool:
        """Whether it answers requests as far as we know."""
        return self.word in {"up", "cold"}


def health_of(state: ScrapeState | None, now: datetime, *, added_at: datetime | None = None) -> HealthWord:
    """Judge a target by its last scrape; one that was never read is starting for ``STARTING_S`` from ``added_at``."""
    if state is None:
        return HealthWord("unknown", "not scraped yet")
    if (now - state.at).total_seconds() > SILENT_INTERVALS * settings.SCRAPE_INTERVAL_S + 1:
        return HealthWord("stale", "no scrape was tried lately")
    if state.ok_at is None and state.failures and added_at is not None:
        left_s = STARTING_S - (now - added_at).total_seconds()
        if left_s > 0:
            return HealthWord("starting", f"{state.reason}; counts as down in {math.ceil(left_s / 60)} min")
    if state.health == Health.DOWN:
        return HealthWord("down", state.reason)
    if state.failures:
        return HealthWord("stale", state.reason)
    if state.asleep:
        return HealthWord("cold", "the engine sleeps")
    if state.restarted_at is not None and (now - state.restarted_at).total_seconds() < COLD_S:
        return HealthWord("cold", "restarted a moment ago")
    return HealthWord("up") if state.ok_at is not None else HealthWord("unknown", "not scraped yet")
