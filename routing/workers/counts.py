"""What all workers counted together, the ended ones' last figures included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from routing.proxy.metrics.exposition import PREFIX
from routing.proxy.metrics.metrics import GRACE_S, POLICY_LATENCY, POLICY_TTFT, Knows, SeriesKey
from routing.workers.exposition import Families, add, series_key

_TRIED = (
    f"{PREFIX}{POLICY_TTFT}",
    f"{PREFIX}{POLICY_LATENCY}",
)  # samples that are kept only while their policy has a trial
_EARLIER_S = 30.0  # than a worker drops it, so that a sum vanishes whole instead of going down first


class Counts:
    """Sums over workers, past and present; a series ends 15 minutes after it left the configuration."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._past: Families = {}
        self._left_at: dict[str, float] = {}  # when a sample was first seen to have left the configuration

    def bury(self, last_seen: Families, present: Iterable[Families], knows: Knows) -> None:
        """Keep what a worker had counted that has ended; ``present`` is what the others have."""
        self.total([last_seen, *present], knows)  # lets go of what left the configuration, whether anybody asks or not
        add(self._past, last_seen, gauges=False)

    def total(self, present: Iterable[Families], knows: Knows) -> Families:
        """Everything, without series that left the configuration too long ago."""
        total: Families = {}
        for families in (self._past, *present):
            add(total, families)
        gone = self._gone({sample for family in total.values() for sample in family.samples}, knows)
        for families in (total, self._past):
            for family in families.values():
                for sample in gone & family.samples.keys():
                    del family.samples[sample]
        return total

    def _gone(self, samples: set[str], knows: Knows) -> set[str]:
        """Of these, what left the configuration too long ago."""
        known: dict[tuple[SeriesKey, bool], bool] = {}
        now, left_at = self._clock(), {}
        for sample in samples:
            what = series_key(sample), sample.startswith(_TRIED)
            if what not in known:
                known[what] = knows(what[0], tried=what[1])
            if not known[what]:
                left_at[sample] = self._left_at.get(sample, now)
        self._left_at = left_at
        return {sample for sample, at in left_at.items() if now - at > GRACE_S - _EARLIER_S}
