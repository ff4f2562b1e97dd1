"""Series that compare replicas, task groups or pools: one value per step, None for a gap, each with its state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final

from django.conf import settings
from django.utils import timezone

from telemetry.metrics.histograms import Merged, quantile
from telemetry.metrics.rates import NEARLY_ALL, UPPER_BOUND, accounted_ratio, hit_rate_ratio, ratio, sum_known
from telemetry.metrics.windows import PointState, ReachableShare, Series, Window
from telemetry.services.figures.overview import Subject, group_state
from telemetry.storage import sums
from telemetry.storage.reachable import MIN_WINDOW, reachable_over_time_by
from telemetry.storage.replica_facts import WITHOUT_DECODE, hit_rate_replicas, removed_replicas
from telemetry.storage.rollup_tables import fit_to_retention

INEXACT_NOTE = "Replicas have different histogram buckets: merged on shared bounds."
NO_GROUP = "no group"
REACHABLE_NOTE = "Reachable: hit rate that one unbounded cache would have had"
IN_STEP, TRAILING = "at least the measured one.", "in the 30 minutes up to each point; that of one point may be higher."
NO_REACHABLE_NOTE = "Reachable hit rate: too few requests replayed yet."
GAUGES = {"kv_usage": "kv_usage_ratio", "running": "running", "waiting": "waiting"}
Point = tuple[float | None, PointState]
NO_VALUE: Point = (None, PointState.UNKNOWN)


def point_of(value: float | None, *, stale: bool = False) -> Point:
    """A value with its state; ``stale``: scrapes fail, which is why there may be none."""
    return value, PointState.OK if value is not None else PointState.STALE if stale else PointState.UNKNOWN


def hit_rate_by_replica(subject: Subject, window: Window, *, local: bool = False) -> list[Series]:
    """Hit rate (0 to 1) of each replica by its engines' counters; ``local``: without tokens from connectors."""
    replicas = subject.replicas()
    rows = sums.hit_sums([replica.pk for replica in replicas], window)
    points = ((row.key, row.step, hit_rate_of(row, local=local), row.state) for row in rows)
    return _lines_by_key({replica.pk: replica.name for replica in replicas}, window, points)


def hit_rate_by_pool(subject: Subject, window: Window) -> list[Series]:
    """Hit rate of each pool: sums over its replicas, without decode replicas, then divided."""
    replicas = [*subject.replicas(), *removed_replicas(window.start, subject.pools)]
    counted: dict[str, list[int]] = {replica.pool.name: [] for replica in replicas}
    for replica in hit_rate_replicas(replicas):
        counted[replica.pool.name].append(replica.pk)
    names = sorted(counted)
    rows = sums.hit_sums_by_set([counted[name] for name in names], window)
    points = ((row.key, row.step, hit_rate_of(row), row.state) for row in rows)
    lines = _lines_by_key(dict(enumerate(names)), window, points)
    replica_counts = Counter(replica.pool.name for replica in replicas)
    with_decode = {name for name in names if replica_counts[name] > len(counted[name])}
    return [replace(line, note=WITHOUT_DECODE) if line.label in with_decode else line for line in lines]


def reachable_line(label: str, window: Window, shares: Mapping[datetime, ReachableShare]) -> Series:
    """The reachable hit rate of each step, with a band of two standard errors."""
    points = {start: (share.ratio, PointState.OK) for start, share in shares.items()}
    line = line_of(label, window, points)
    band = [_error_band(shares.get(start)) for start, _ in line.points]
    scope = TRAILING if window.step_s < MIN_WINDOW.total_seconds() else IN_STEP
    return replace(line, band=band, note=f"{REACHABLE_NOTE}, {scope}")


def _error_band(share: ReachableShare | None) -> tuple[float, float] | None:
    if share is None:
        return None
    return max(0.0, share.ratio - 2 * share.standard_error), min(1.0, share.ratio + 2 * share.standard_error)


def reachable_by(subject: Subject, window: Window, *, by: str) -> list[Series]:
    """The reachable hit rate of each ``pool``, or of each ``group`` labelled POOL/GROUP."""
    shares_by_key = reachable_over_time_by(subject.pool_names(), window, by=by)
    return [reachable_line(key, window, shares) for key, shares in shares_by_key.items()]


def hit_rate_of(row: sums.Hits, *, local: bool = False) -> float | None:
    """Total hit rate; ``local``: without tokens from connectors."""
    return hit_rate_ratio(row.queries, row.hits, None if local else row.external_hits)


def hit_rate_by_group(subject: Subject, window: Window) -> list[Series]:
    """Hit rate of each task group that had traffic, from the cached tokens in responses."""
    routed, coverage = sums.router_sums(subject.pool_names(), window)
    covered = {step.start: step for step in coverage}
    rows: dict[tuple[str, str], dict[datetime, sums.RouterSums]] = defaultdict(dict)
    for row in routed:
        rows[row.pool, row.group][row.start] = row
    has_several_pools = len({name for name, _ in rows}) > 1
    lines = []
    for (name, group), steps in sorted(rows.items()):
        label = f"{name}/{group or NO_GROUP}" if has_several_pools else group or NO_GROUP
        points = {start: _group_point(steps.get(start), covered.get(start)) for start in {*steps, *covered}}
        lines.append(line_of(label, window, points, _accounted_note(label, steps.values())))
    return lines


def _accounted_note(label: str, rows: Collection[sums.RouterSums]) -> str:
    completed = sum_known(row.ok_requests for row in rows)
    return hit_rate_note(label, accounted_ratio(sum_known(row.usage_reported for row in rows), completed))


def accounted_note(label: str, share: float | None) -> str:
    """Text about the share of responses that a figure covers; "" for ``NEARLY_ALL`` of them or more."""
    return "" if share is None or share >= NEARLY_ALL else f"{label} covers {share * 100:.1f} % of the responses."


def hit_rate_note(label: str, share: float | None) -> str:
    """The same for the hit rate of responses that report their cached tokens."""
    note = accounted_note(label, share)
    return f"{note} {UPPER_BOUND}" if note else ""


def _group_point(row: sums.RouterSums | None, coverage: sums.Coverage | None) -> Point:
    state = group_state(row, coverage)
    return (ratio(row.cached_tokens, row.prompt_tokens) if row else None), state


def quantile_line(label: str, q: float, merged: Mapping[datetime, Merged], window: Window, note: str = "") -> Series:
    """A quantile of each step's histogram, with the bucket that holds it as its band."""
    quantiles = {start: found for start, part in merged.items() if (found := quantile(part.buckets, q)) is not None}
    series = line_of(label, window, {start: (found.value, PointState.OK) for start, found in quantiles.items()})
    for start, _ in series.points:
        bucket = quantiles.get(start)
        series.band.append((bucket.low, bucket.high) if bucket else None)
    inexact = any(not part.exact for part in merged.values())
    notes = " ".join(filter(None, [note, INEXACT_NOTE if inexact else ""]))
    return Series(series.label, series.points, series.states, series.band, notes)


def utilization_by_replica(subject: Subject, window: Window, gauge: str) -> list[Series]:
    """Means over each step of ``kv_usage`` (0 to 1), ``running`` or ``waiting`` (requests)."""
    replicas = subject.replicas()
    rows = sums.mean_gauge([replica.pk for replica in replicas], window, GAUGES[gauge])
    points = ((pk, step, *point_of(value, stale=stale)) for pk, step, value, stale in rows)
    return _lines_by_key({replica.pk: replica.name for replica in replicas}, window, points)


def line_of(label: str, window: Window, points: Mapping[datetime, Point], note: str = "") -> Series:
    """A series with every step of the window; steps without a point are gaps."""
    steps = [(start, *points.get(start, NO_VALUE)) for start in window.starts()]
    return Series(label, [(start, value) for start, value, _ in steps], [state for _, _, state in steps], note=note)


def _lines_by_key(
    names: Mapping[int, str], window: Window, points: Iterable[tuple[int, int, float | None, PointState]]
) -> list[Series]:
    """A line per name from (key, step number, value, state); fast for tens of thousands of points."""
    starts = window.starts()
    gaps, states = [(start, None) for start in starts], [PointState.UNKNOWN] * len(starts)
    lines = {key: Series(name, [*gaps], [*states]) for key, name in names.items()}
    for key, step, value, state in points:
        line = lines[key]
        line.points[step] = (starts[step], value)
        line.states[step] = state
    return list(lines.values())


def fit_window(window: Window) -> Window:
    """The window with a step for which data is still retained: readings for days, minute rollups for weeks."""
    day_s = 86_400.0
    retention_s = {resolution_s: day_s * days for resolution_s, days in settings.ROLLUP_RETENTION_DAYS.items()}
    return fit_to_retention(window, timezone.now(), retention_s, day_s * settings.READINGS_RETENTION_DAYS)


Steps = dict[datetime, list[sums.RouterSums]]
Value = Callable[[sums.RouterSums], int | None]

VALUES: Final[dict[str, Value]] = {
    "requests": lambda row: row.requests,
    "errors": lambda row: row.failed,
    "prompt_tokens": lambda row: row.prompt_tokens,
    "cached_tokens": lambda row: row.cached_tokens,
}


def by_group(subject: Subject, window: Window, value: str) -> list[Series]:
    """A line per task group: the sum of one of ``VALUES`` in each step.

    Tokens are of responses that report cached tokens.
    """
    with_pool = subject.pools is None or len(subject.pools) > 1
    return _routed_lines(subject, window, value, lambda row: _group_label(row, with_pool=with_pool))


def by_pool(subject: Subject, window: Window, value: str) -> list[Series]:
    """``by_group`` with a line per pool."""
    return _routed_lines(subject, window, value, lambda row: row.pool)


def _group_label(row: sums.RouterSums, *, with_pool: bool) -> str:
    group = row.group or NO_GROUP
    return f"{row.pool}/{group}" if with_pool else group


def _routed_lines(
    subject: Subject, window: Window, value: str, key: Callable[[sums.RouterSums], Hashable]
) -> list[Series]:
    routed, coverage = sums.router_sums(subject.pool_names(), window)
    by_label: dict[str, Steps] = defaultdict(lambda: defaultdict(list))
    for row in routed:
        by_label[str(key(row))][row.start].append(row)
    empty = {step.start: _without_requests(step) for step in coverage}
    return [
        line_of(name, window, empty | {start: _point(rows, VALUES[value]) for start, rows in steps.items()})
        for name, steps in sorted(by_label.items())
    ]


def _point(rows: Collection[sums.RouterSums], value: Value) -> Point:
    """Unknown if no request reports the value."""
    known = sum_known(map(value, rows))
    return (known, PointState.OK) if known is not None else (None, PointState.UNKNOWN)


def _without_requests(step: sums.Coverage) -> Point:
    """0 if routers were scraped and counted nothing."""
    if step.covered_s > 0:
        return 0, PointState.OK
    return None, PointState.STALE if step.stale else PointState.UNKNOWN
