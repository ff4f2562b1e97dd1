"""What all workers counted together, the ended ones' last figures included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from routing.proxy.metrics import GRACE_S, SeriesKey
from routing.workers.exposition import Families, Family, add, series_key

_EARLIER_S = 30.0  # than a worker drops it, so that a sum vanishes whole instead of going down first


class Counts:
    """Sums over workers, past and present; a series ends 15 minutes after it left the configuration."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._past: Families = {}
        self._left_at: dict[str, float] = {}  # when a sample was first seen to have left the configuration

    def bury(self, last_seen: Families) -> None:
        """Keep what a worker had counted that has ended."""
        add(self._past, last_seen, gauges=False)

    def total(self, present: Iterable[Families], knows: Callable[[SeriesKey], bool]) -> Families:
        """Everything, without series that left the configuration too long ago."""
        total: Families = {}
        for families in (self._past, *present):
            add(total, families)
        known: dict[SeriesKey, bool] = {}
        for name, family in total.items():
            family.samples = {
                key: value for key, value in family.samples.items() if self._is_shown(name, key, knows, known)
            }
        return total

    def _is_shown(
        self, name: str, sample: str, knows: Callable[[SeriesKey], bool], known: dict[SeriesKey, bool]
    ) -> bool:
        key = series_key(sample)
        if key not in known:
            known[key] = knows(key)
        if known[key]:
            self._left_at.pop(sample, None)
            return True
        now = self._clock()
        if now - self._left_at.setdefault(sample, now) < GRACE_S - _EARLIER_S:
            return True
        self._past.get(name, _NOTHING).samples.pop(sample, None)
        return False


_NOTHING = Family("", "", {})
