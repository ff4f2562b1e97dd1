"""Hit-rate bins of pools with the drop detectors that consume them; loaded from readings and cached per process.

Theory of operation. A detector consumes each bin once, so an evaluation costs only the bins since the evaluation
before, and a preview the bins of its period. A process keeps the series of the pools that it evaluated. The cache
changes no result: a series loaded again for ``HistoryQuery.series_lookback_s`` gives the same levels, which depend on a
bounded time (``Sensitivity.baseline_s``).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from controlplane.models import Event, EventKind, Pool
from telemetry.alerts.detection import Bin, Detection, Detector, GroupBin, Sensitivity
from telemetry.alerts.detection.level import Decline
from telemetry.storage.sums import fetch_rows

MAX_DETECTORS = 300  # of a pool: its rules, each with its task group and settings
MAX_CACHED_SERIES = 1000  # pools and bin lengths, the last evaluated ones
MIN_REPORTED = 0.5  # of a pool's requests must report their usage; with less the engines' counters are used
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
CHANGES = (
    EventKind.POLICY_PUBLISHED,
    EventKind.CONFIG_APPLIED,
    EventKind.GROUP_CHANGED,
    EventKind.REPLICA_ADDED,
    EventKind.REPLICA_REMOVED,
    EventKind.REPLICA_STATE_CHANGED,
    EventKind.REPLICA_RESTARTED,
)
Groups = dict[str, GroupBin]
_BIN_END = (
    "date_bin(make_interval(secs => %(step)s), at - interval '1 microsecond', %(start)s)"
    " + make_interval(secs => %(step)s)"
)


def bin_length_s(bin_s: float, interval_s: float) -> float:
    """A bin length rounded up to whole scrape intervals."""
    return math.ceil(bin_s / interval_s - 1e-9) * interval_s


def grid_floor(at: datetime, bin_s: float) -> datetime:
    """The newest end of a bin at or before a time; all bins of one length lie on one grid."""
    return EPOCH + timedelta(seconds=math.floor((at - EPOCH).total_seconds() / bin_s + 1e-9) * bin_s)


@dataclass(slots=True)
class _DetectorState:
    """A detector and the end of the last bin that it consumed."""

    detector: Detector
    through: datetime


@dataclass(slots=True)
class HitRateSeries:
    """Bins from ``start`` to ``through``, and the times of operators' changes, both ascending."""

    bin_s: float
    start: datetime
    through: datetime
    bins: list[Bin] = field(default_factory=list)
    changes: list[datetime] = field(default_factory=list)
    _detectors: dict[tuple[Sensitivity, str], _DetectorState] = field(default_factory=dict)
    _declines: dict[Hashable, Decline | None] = field(default_factory=dict)

    def extend(self, bins: Sequence[Bin], changes: Sequence[datetime], through: datetime, keep_s: float) -> None:
        """Append newer bins and remove those older than ``keep_s``."""
        self.bins.extend(bins)
        self.changes = sorted({*self.changes, *changes})
        self.through = through
        oldest = through - timedelta(seconds=keep_s)
        del self.bins[: bisect_right(self.bins, oldest, key=_end_of)]
        self.changes = [at for at in self.changes if at > oldest]
        self.start = max(self.start, oldest)

    def detect(self, sensitivity: Sensitivity, group: str, until: datetime) -> Detection | None:
        """The detector's result at a time, of the pool ("") or a task group; None before its first bin.

        Times must ascend; the detector restarts at an earlier one.
        """
        key = (sensitivity, group)
        state = self._detectors.get(key)
        if state is None or state.through > until:
            while len(self._detectors) >= MAX_DETECTORS:
                self._detectors.pop(next(iter(self._detectors)))
            state = self._detectors[key] = _DetectorState(Detector(sensitivity), self.start)
        first, last = (bisect_right(self.bins, at, key=_end_of) for at in (state.through, until))
        for hit_bin in self.bins[first:last]:
            changes = [at for at in self.changes if state.through < at <= hit_bin.end]
            state.detector.add(hit_bin.of_group(group) if group else hit_bin, changes)
            state.through = hit_bin.end
        return state.detector.detection

    def decline(self, key: Hashable, find: Callable[[], Decline | None]) -> Decline | None:
        """Cached result of ``find``: the hours that it compares change once an hour."""
        if key not in self._declines:
            while len(self._declines) >= MAX_DETECTORS:
                self._declines.pop(next(iter(self._declines)))
            self._declines[key] = find()
        return self._declines[key]


def _end_of(hit_bin: Bin) -> datetime:
    return hit_bin.end


@dataclass(frozen=True, slots=True)
class SeriesQuery:
    """Series to load, on the grid of their bins."""

    pools: Sequence[Pool]
    hit_rate_ids: Mapping[int, Sequence[int]]  # pool id -> replicas whose counters make the pool's hit rate
    start: datetime
    through: datetime
    bin_s: float


def load_series(query: SeriesQuery, *, cached: bool) -> dict[int, HitRateSeries]:
    """Each pool's series by its id. Three queries; three more for pools that are not cached yet.

    ``cached`` series are kept for the next evaluation, which loads only the newer bins.
    """
    loaded: dict[int, HitRateSeries] = {}
    pools_by_end: dict[datetime, list[Pool]] = defaultdict(list)
    for pool in query.pools:
        series = _cache.pop((pool.pk, query.bin_s), None) if cached else None
        if series is None or not series.start <= query.start <= series.through <= query.through:
            series = HitRateSeries(query.bin_s, query.start, query.start)
        loaded[pool.pk] = series
        pools_by_end[series.through].append(pool)
        if cached:
            _cache[pool.pk, query.bin_s] = series
    keep_s = (query.through - query.start).total_seconds()
    for since, pools in pools_by_end.items():
        if since < query.through:
            bins = load_bins(pools, query.hit_rate_ids, since, query.through, query.bin_s)
            changes = _load_changes(pools, since, query.through)
            for pool in pools:
                loaded[pool.pk].extend(bins.get(pool.pk, []), changes.get(pool.pk, []), query.through, keep_s)
    while len(_cache) > MAX_CACHED_SERIES:
        _cache.popitem(last=False)
    return loaded


_cache: OrderedDict[tuple[int, float], HitRateSeries] = OrderedDict()


def load_bins(
    pools: Sequence[Pool], hit_rate_ids: Mapping[int, Sequence[int]], start: datetime, end: datetime, bin_s: float
) -> dict[int, list[Bin]]:
    """Bins that end in (start, end], ascending, by pool id. At most two queries.

    From router counters where at least half of the pool's requests reported their usage, else from engine counters as
    one task group "". ``start`` and ``end`` lie on the grid of the bins.
    """
    by_routers, unreported = _router_bins([pool.name for pool in pools], start, end, bin_s)
    bins: dict[int, dict[datetime, Groups]] = {pool.pk: by_routers.get(pool.name, {}) for pool in pools}
    by_engines = [pool.pk for pool in pools if pool.name in unreported or pool.name not in by_routers]
    if pool_of := {replica: pk for pk in by_engines for replica in hit_rate_ids.get(pk, ())}:
        bins |= _engine_bins(pool_of, start, end, bin_s)
    return {pk: [Bin(at, groups) for at, groups in sorted(of_pool.items())] for pk, of_pool in bins.items()}


def _load_changes(pools: Sequence[Pool], start: datetime, end: datetime) -> dict[int, list[datetime]]:
    """Times at which an operator or a restart changed each pool; changes without a pool concern all. One query."""
    events = Event.objects.filter(kind__in=CHANGES, at__gt=start, at__lte=end).order_by("at")
    rows = list(events.values_list("pool_id", "at"))
    return {pool.pk: [at for pool_id, at in rows if pool_id in (None, pool.pk)] for pool in pools}


def _router_bins(
    pools: list[str], start: datetime, end: datetime, bin_s: float
) -> tuple[dict[str, dict[datetime, Groups]], set[str]]:
    """Bins by pool and end; and the pools most of whose responses did not report their usage."""
    rows = fetch_rows(
        f"""
        select pool, "group", {_BIN_END}, sum(prompt_tokens) filter (where usage_reported > 0)::float8,
            sum(cached_tokens) filter (where usage_reported > 0)::float8, coalesce(sum(usage_reported), 0)::float8,
            coalesce(sum(requests), 0)::float8
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and pool = any(%(pools)s) and reuse = '' and requests is not null
        group by 1, 2, 3
        """,  # noqa: S608 - only constants are interpolated
        {"pools": pools, "start": start, "end": end, "step": bin_s},
    )
    bins: dict[str, dict[datetime, Groups]] = defaultdict(dict)
    total: dict[str, float] = defaultdict(float)
    total_reported: dict[str, float] = defaultdict(float)
    for pool, group, at, prompt, cached, reported, requests in rows:
        total[pool] += requests
        total_reported[pool] += reported
        if prompt:
            bins[pool].setdefault(at, {})[group] = GroupBin(prompt, cached or 0.0, reported)
    return bins, {pool for pool, requests in total.items() if total_reported[pool] < MIN_REPORTED * requests}


def _engine_bins(
    pool_of: Mapping[int, int], start: datetime, end: datetime, bin_s: float
) -> dict[int, dict[datetime, Groups]]:
    """Bins of the engines' counters by pool id and end, as one task group ""; ``pool_of`` maps replicas to pools."""
    rows = fetch_rows(
        f"""
        select pool_id, {_BIN_END}, sum(queries)::float8, sum(hits + coalesce(external_hits, 0))::float8,
            sum(coalesce(first_tokens, finished))::float8
        from telemetry_reading join unnest(%(ids)s::bigint[], %(pools)s::bigint[]) as owner(replica_id, pool_id)
            using (replica_id)
        where at > %(start)s and at <= %(end)s and queries > 0 and hits is not null
        group by 1, 2
        """,  # noqa: S608 - only constants are interpolated
        {"ids": list(pool_of), "pools": list(pool_of.values()), "start": start, "end": end, "step": bin_s},
    )
    bins: dict[int, dict[datetime, Groups]] = defaultdict(dict)
    for pool_id, at, prompt, cached, requests in rows:
        bins[pool_id][at] = {"": GroupBin(prompt, cached, requests or 0.0)}
    return bins
