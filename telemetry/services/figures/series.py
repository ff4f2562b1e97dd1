"""Lines of charts: one value per step, None for a gap, each with the reason for what it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from django.conf import settings
from django.utils import timezone

from controlplane.models import Replica
from telemetry.metrics.histograms import Merged, quantile
from telemetry.metrics.rates import hit_rate_ratio, ratio
from telemetry.metrics.windows import PointState, Series, Window
from telemetry.services.figures.overview import Pools, group_state, names_of, replicas_of
from telemetry.storage import sums
from telemetry.storage.roles import WITHOUT_DECODE, rated
from telemetry.storage.rollups.cover import readable

INEXACT = "Replicas have different histogram edges: merged on the edges they share."
NO_GROUP = "no group"
WORDS_OF_REUSE = {"hit": "mostly cached", "miss": "mostly computed"}
GAUGES = {"kv_usage": "kv_usage_ratio", "running": "running", "waiting": "waiting"}
Point = tuple[float | None, PointState]
NOTHING: Point = (None, PointState.UNKNOWN)


def hit_rate_by_replica(pools: Pools, window: Window, *, local: bool = False) -> list[Series]:
    """Hit rate (0 to 1) of each replica by its engines' counters; ``local``: without what connectors supplied (H4)."""
    window = still_kept(window)
    replicas = replicas_of(pools)
    points: dict[int, dict[int, Point]] = defaultdict(dict)
    for row in sums.hit_sums([replica.pk for replica in replicas], window):
        value = hit_rate_ratio(row.queries, row.hits, None if local else row.external_hits)
        points[row.replica_id][row.step] = (value, row.state)
    return _lines(replicas, window, points)


def hit_rate_by_pool(pools: Pools, window: Window) -> list[Series]:
    """Hit rate of each pool: sums over its replicas, decode replicas left out (H19), then divided (H2)."""
    window = still_kept(window)
    replicas = replicas_of(pools)
    counted = {replica.pk: replica.pool.name for replica in rated(replicas)}
    rows: dict[str, dict[int, list[sums.Hits]]] = {replica.pool.name: defaultdict(list) for replica in replicas}
    for row in sums.hit_sums(list(counted), window):
        rows[counted[row.replica_id]][row.step].append(row)
    split = {replica.pool.name for replica in replicas if replica.pk not in counted}
    lines = [
        _line(name, window.starts(), {step: _together(of_step) for step, of_step in steps.items()})
        for name, steps in sorted(rows.items())
    ]
    return [replace(line, note=WITHOUT_DECODE) if line.label in split else line for line in lines]


def _together(rows: list[sums.Hits]) -> Point:
    known = [row for row in rows if row.queries is not None]
    queries = sum(row.queries or 0 for row in known) if known else None
    hits = sum((row.hits or 0) + (row.external_hits or 0) for row in known)
    return hit_rate_ratio(queries, hits), sums.state_together(rows)


def hit_rate_by_group(pools: Pools, window: Window) -> list[Series]:
    """Hit rate of each task group that had traffic, from the cached tokens that answers reported (H16)."""
    window = still_kept(window)
    routed, coverage = sums.router_sums(names_of(pools), window)
    covered = {step.start: step for step in coverage}
    rows: dict[tuple[str, str], dict[datetime, sums.RouterSums]] = defaultdict(dict)
    for row in routed:
        rows[row.pool, row.group][row.start] = row
    several = len({name for name, _ in rows}) > 1
    return [
        line_of(
            f"{name}/{group or NO_GROUP}" if several else group or NO_GROUP,
            window,
            {start: _group_point(steps.get(start), covered.get(start)) for start in {*steps, *covered}},
        )
        for (name, group), steps in sorted(rows.items())
    ]


def _group_point(row: sums.RouterSums | None, coverage: sums.Coverage | None) -> Point:
    state = group_state(row, coverage)
    return (ratio(row.cached_tokens, row.prompt_tokens) if row else None), state


def ttft_quantiles(
    pools: Pools, window: Window, *, quantiles: tuple[float, ...] = (0.5, 0.95), source: str | None = None
) -> list[Series]:
    """TTFT quantiles in seconds, each with its bucket as a band (T5).

    By the routers' clock, or by the engines' where no router observed anything (T1); ``source`` asks for one of them.
    """
    window = still_kept(window)
    clock, names = "router", names_of(pools)
    merged = sums.merged_over_keys(sums.router_ttft(names, window)) if source != "engine" else {}
    if not merged and source != "router":
        clock = "engine"
        merged = sums.merged_over_keys(sums.pools_engine_ttft(names, window))
    return [quantile_line(f"p{q * 100:g} ({clock})", q, merged, window) for q in quantiles]


def ttft_by_reuse(pools: Pools, window: Window, *, q: float = 0.95) -> list[Series]:
    """A TTFT quantile in seconds of answers of whose prompt at least half was cached, and of the others.

    By the routers' clock (T1), of answers that told their cached tokens (H16), each with its bucket as a band (T5).
    """
    parts: dict[str, list[tuple[datetime, Merged]]] = {"hit": [], "miss": []}
    for ((_, _, reuse), start), merged in sums.router_ttft(names_of(pools), window, by="reuse").items():
        parts[reuse].append((start, merged))
    return [
        quantile_line(f"p{q * 100:g} {WORDS_OF_REUSE[reuse]} (router)", q, sums.merged_by_step(found), window)
        for reuse, found in parts.items()
    ]


def quantile_line(label: str, q: float, merged: Mapping[datetime, Merged], window: Window) -> Series:
    """A quantile of each step's histogram, with the bucket that holds it as its band (T4, T5)."""
    found = {start: value for start, part in merged.items() if (value := quantile(part.buckets, q)) is not None}
    series = line_of(label, window, {start: (value.value, PointState.OK) for start, value in found.items()})
    for start, _ in series.points:
        at = found.get(start)
        series.band.append((at.low, at.high) if at else None)
    inexact = any(not part.exact for part in merged.values())
    return Series(series.label, series.points, series.states, series.band, INEXACT if inexact else "")


def utilization_by_replica(pools: Pools, window: Window, what: str = "kv_usage") -> list[Series]:
    """Means over each step of ``kv_usage`` (0 to 1), ``running`` or ``waiting`` (requests)."""
    window = still_kept(window)
    replicas = replicas_of(pools)
    points: dict[int, dict[int, Point]] = defaultdict(dict)
    for pk, step, value, stale in sums.mean_gauge([replica.pk for replica in replicas], window, GAUGES[what]):
        missing = PointState.STALE if stale else PointState.UNKNOWN
        points[pk][step] = (value, PointState.OK if value is not None else missing)
    return _lines(replicas, window, points)


def line_of(label: str, window: Window, points: Mapping[datetime, Point]) -> Series:
    """Every step of the window, with a gap wherever nothing is known."""
    steps = [(start, *points.get(start, NOTHING)) for start in window.starts()]
    return Series(label, [(start, value) for start, value, _ in steps], [state for _, _, state in steps])


def _lines(replicas: list[Replica], window: Window, points: Mapping[int, Mapping[int, Point]]) -> list[Series]:
    """A line for each replica."""
    starts = window.starts()
    return [_line(replica.name, starts, points.get(replica.pk, {})) for replica in replicas]


def _line(label: str, starts: list[datetime], points: Mapping[int, Point]) -> Series:
    """Every step of a window, of points by number of the step."""
    found = [points.get(step, NOTHING) for step in range(len(starts))]
    values = [(start, value) for start, (value, _) in zip(starts, found, strict=True)]
    return Series(label, values, [state for _, state in found])


def still_kept(window: Window) -> Window:
    """The window in steps that what is kept of its time can fill: readings go after days, minutes after weeks."""
    day_s = 86_400.0
    kept_s = {resolution_s: day_s * days for resolution_s, days in settings.ROLLUP_RETENTION_DAYS.items()}
    return readable(window, timezone.now(), kept_s, day_s * settings.READINGS_RETENTION_DAYS)
