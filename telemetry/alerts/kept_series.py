"""Series of bins as evaluations and previews want them: read anew, or kept from the evaluation before.

Theory of operation. A process keeps the series of the pools that it evaluated, with their detectors, and reads only
what came since. Nothing depends on it: without it the bins of ``series_reach_s`` are read once more and give the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.models import Pool
from telemetry.alerts.bin_queries import load_bins, load_changes
from telemetry.alerts.series import HitRateSeries, grid_floor

MOST_KEPT = 1000  # pools and lengths of bins, those evaluated last

_kept: OrderedDict[tuple[int, float], HitRateSeries] = OrderedDict()


@dataclass(frozen=True, slots=True)
class Asked:
    """Which series, and from when to when."""

    pools: Sequence[Pool]
    rated: Mapping[int, Sequence[int]]  # pool id -> replicas that make its rate
    since: datetime
    until: datetime
    bin_s: float

    @property
    def through(self) -> datetime:
        """The end of the newest bin."""
        return grid_floor(self.until, self.bin_s)

    @property
    def start(self) -> datetime:
        """Where the oldest bin begins."""
        return grid_floor(self.since, self.bin_s)


def fresh_series(asked: Asked) -> dict[int, HitRateSeries]:
    """Each pool's series by its id, read as a whole. Three queries."""
    found = {pool.pk: HitRateSeries(asked.bin_s, asked.start, asked.start) for pool in asked.pools}
    _read(asked, list(asked.pools), found, asked.start)
    return found


def kept_series(asked: Asked) -> dict[int, HitRateSeries]:
    """The same, with the newest bins alone read where the others are kept. Three queries, three more for new pools."""
    found: dict[int, HitRateSeries] = {}
    behind: dict[datetime, list[Pool]] = {}
    for pool in asked.pools:
        series = _kept.pop((pool.pk, asked.bin_s), None)
        if (
            series is None
            or series.through > asked.through
            or series.through < asked.start
            or series.start > asked.start
        ):
            series = HitRateSeries(asked.bin_s, asked.start, asked.start)
        found[pool.pk] = _kept[pool.pk, asked.bin_s] = series
        behind.setdefault(series.through, []).append(pool)
    for since, pools in behind.items():
        if since < asked.through:
            _read(asked, pools, found, since)
    while len(_kept) > MOST_KEPT:
        _kept.popitem(last=False)
    return found


def _read(asked: Asked, pools: list[Pool], found: Mapping[int, HitRateSeries], since: datetime) -> None:
    bins = load_bins(pools, asked.rated, since, asked.through, asked.bin_s)
    changes = load_changes(pools, since, asked.through)
    keep_s = (asked.through - asked.start).total_seconds()
    for pool in pools:
        found[pool.pk].extend(bins.get(pool.pk, []), changes.get(pool.pk, []), asked.through, keep_s)
