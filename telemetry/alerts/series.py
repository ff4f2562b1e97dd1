"""A pool's bins in order of time, and the detectors that have taken them in. Pure.

Theory of operation. A detector takes each bin once, so an evaluation costs the bins since the one before, and a preview
the bins of its stretch of time. What is kept is a cache: a series that begins anew from stored readings finds the same,
because a level is that of a bounded time (``Sensitivity.baseline_s``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from telemetry.alerts.detection import Bin, Detection, Detector, Sensitivity
from telemetry.alerts.detection.level import Decline

MOST_DETECTORS = 300  # of a pool: its rules, each with its task group and settings
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


def bin_length_s(bin_s: float, interval_s: float) -> float:
    """The bin that a setting stands for: so many whole scrape intervals that it is at least as long."""
    return math.ceil(bin_s / interval_s - 1e-9) * interval_s


def grid_floor(at: datetime, bin_s: float) -> datetime:
    """The newest end of a bin at or before a moment; all bins of one length lie on one grid."""
    return EPOCH + timedelta(seconds=math.floor((at - EPOCH).total_seconds() / bin_s + 1e-9) * bin_s)


@dataclass(slots=True)
class _Follower:
    """A detector, and how far it has come."""

    detector: Detector
    through: datetime


@dataclass(slots=True)
class HitRateSeries:
    """Bins from ``start`` to ``through`` and operators' changes, both ascending."""

    bin_s: float
    start: datetime
    through: datetime
    bins: list[Bin] = field(default_factory=list)
    changes: list[datetime] = field(default_factory=list)
    _followers: dict[tuple[Sensitivity, str], _Follower] = field(default_factory=dict)
    _declines: dict[Hashable, Decline | None] = field(default_factory=dict)

    def extend(self, bins: Sequence[Bin], changes: Sequence[datetime], through: datetime, keep_s: float) -> None:
        """Add what came since; bins that are older than ``keep_s`` are forgotten."""
        self.bins.extend(bins)
        self.changes = sorted({*self.changes, *changes})
        self.through = through
        oldest = through - timedelta(seconds=keep_s)
        del self.bins[: bisect_right(self.bins, oldest, key=_end_of)]
        self.changes = [at for at in self.changes if at > oldest]
        self.start = max(self.start, oldest)

    def detect(self, sensitivity: Sensitivity, group: str, until: datetime) -> Detection | None:
        """What a detector of the pool (""), or a task group, says at a moment; None before its first bin.

        Moments of one detector have to ascend; one that goes back begins anew.
        """
        key = (sensitivity, group)
        follower = self._followers.get(key)
        if follower is None or follower.through > until:
            while len(self._followers) >= MOST_DETECTORS:
                self._followers.pop(next(iter(self._followers)))
            follower = self._followers[key] = _Follower(Detector(sensitivity), self.start)
        first, last = (bisect_right(self.bins, at, key=_end_of) for at in (follower.through, until))
        for one in self.bins[first:last]:
            changes = [at for at in self.changes if follower.through < at <= one.end]
            follower.detector.add(one.of_group(group) if group else one, changes)
            follower.through = one.end
        return follower.detector.detection

    def decline(self, key: Hashable, find: Callable[[], Decline | None]) -> Decline | None:
        """What ``find`` returns, called once for a key: the hours that it looks at change once an hour."""
        if key not in self._declines:
            while len(self._declines) >= MOST_DETECTORS:
                self._declines.pop(next(iter(self._declines)))
            self._declines[key] = find()
        return self._declines[key]


def _end_of(one: Bin) -> datetime:
    return one.end
