"""Hit-rate bins of pools: tokens and requests per task group in short steps; and when operators changed something.

Series of bins as evaluations and previews want them: read anew, or kept from the evaluation before.

Theory of operation. A process keeps the series of the pools that it evaluated, with their detectors, and reads only
what came since. Nothing depends on it: without it the bins of ``series_reach_s`` are read once more and give the same.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.models import Event, EventKind, Pool
from telemetry.alerts.detection import Bin, GroupBin
from telemetry.alerts.series import HitRateSeries, grid_floor
from telemetry.storage.sums import fetch_rows

LEAST_REPORTED = 0.5  # of a pool's requests: with less the engines' counters serve
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


def load_bins(
    pools: Sequence[Pool], rated: Mapping[int, Sequence[int]], start: datetime, end: datetime, bin_s: float
) -> dict[int, list[Bin]]:
    """Bins that end in (start, end], ascending, by pool id; ``rated`` are the replicas that make a pool's rate.

    ``start`` and ``end`` lie on the grid of the bins. Of routers where they know at least half of the requests, else
    of engines, as one task group "". At most two queries.
    """
    routed, doubtful = _routed([pool.name for pool in pools], start, end, bin_s)
    found: dict[int, dict[datetime, Groups]] = {pool.pk: routed.get(pool.name, {}) for pool in pools}
    by_engines = [pool.pk for pool in pools if pool.name in doubtful or pool.name not in routed]
    if ids := {replica: pk for pk in by_engines for replica in rated.get(pk, ())}:
        found |= _counted(ids, start, end, bin_s)
    return {pk: [Bin(at, groups) for at, groups in sorted(bins.items())] for pk, bins in found.items()}


def load_changes(pools: Sequence[Pool], start: datetime, end: datetime) -> dict[int, list[datetime]]:
    """When operators, or restarts, changed a pool; what concerns all pools counts for each. One query."""
    rows = Event.objects.filter(kind__in=CHANGES, at__gt=start, at__lte=end).order_by("at").values_list("pool_id", "at")
    known = list(rows)
    return {pool.pk: [at for pool_id, at in known if pool_id in (None, pool.pk)] for pool in pools}


def _routed(
    pools: list[str], start: datetime, end: datetime, bin_s: float
) -> tuple[dict[str, dict[datetime, Groups]], set[str]]:
    """By pool and end of the bin; and the pools most of whose responses did not report their usage."""
    rows = fetch_rows(
        f"""
        select pool, "group", {_END}, sum(prompt_tokens) filter (where usage_reported > 0)::float8,
            sum(cached_tokens) filter (where usage_reported > 0)::float8, coalesce(sum(usage_reported), 0)::float8,
            coalesce(sum(requests), 0)::float8
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and pool = any(%(pools)s) and reuse = '' and requests is not null
        group by 1, 2, 3
        """,  # noqa: S608 - no part of it comes from outside
        {"pools": pools, "start": start, "end": end, "step": bin_s},
    )
    found: dict[str, dict[datetime, Groups]] = defaultdict(dict)
    asked: dict[str, float] = defaultdict(float)
    told: dict[str, float] = defaultdict(float)
    for pool, group, at, prompt, cached, reported, requests in rows:
        asked[pool] += requests
        told[pool] += reported
        if prompt:
            found[pool].setdefault(at, {})[group] = GroupBin(prompt, cached or 0.0, reported)
    return found, {pool for pool, requests in asked.items() if told[pool] < LEAST_REPORTED * requests}


def _counted(
    pool_of: Mapping[int, int], start: datetime, end: datetime, bin_s: float
) -> dict[int, dict[datetime, Groups]]:
    """What the engines of some replicas counted, as one task group, by pool id and end of the bin."""
    rows = fetch_rows(
        f"""
        select pool_id, {_END}, sum(queries)::float8, sum(hits + coalesce(external_hits, 0))::float8,
            sum(coalesce(first_tokens, finished))::float8
        from telemetry_reading join unnest(%(ids)s::bigint[], %(owners)s::bigint[]) as one(replica_id, pool_id)
            using (replica_id)
        where at > %(start)s and at <= %(end)s and queries > 0 and hits is not null
        group by 1, 2
        """,  # noqa: S608 - no part of it comes from outside
        {"ids": list(pool_of), "owners": list(pool_of.values()), "start": start, "end": end, "step": bin_s},
    )
    found: dict[int, dict[datetime, Groups]] = defaultdict(dict)
    for pool_id, at, prompt, cached, requests in rows:
        found[pool_id][at] = {"": GroupBin(prompt, cached, requests or 0.0)}
    return dict(found)


_END = (
    "date_bin(make_interval(secs => %(step)s), at - interval '1 microsecond', %(start)s)"
    " + make_interval(secs => %(step)s)"
)


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
