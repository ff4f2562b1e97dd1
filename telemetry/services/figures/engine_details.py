"""Lines of what only some engines report. A chart of what none of the subject's engines reports has no line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from controlplane.models import Replica
from telemetry.metrics.engines.names import PROMPT_SOURCES, WAITING_REASONS
from telemetry.metrics.rates import ratio, total_known
from telemetry.metrics.windows import PointState, Series, Window
from telemetry.services.figures.series import Point, line_of
from telemetry.services.figures.subjects import Subject
from telemetry.storage.engine_totals import EngineTotals, ReplicaTotals, counted, counted_by_replica
from telemetry.storage.engine_totals import waiting_by_reason as waiting_sums
from telemetry.storage.sums import point_state

PHASES = {"queue": "in queue", "prefill": "in prefill"}
SOURCES = dict(zip(PROMPT_SOURCES, ("computed", "cached", "transferred"), strict=True))
REASONS = dict(zip(WAITING_REASONS, ("capacity", "deferred"), strict=True))
BLOCK_TIMES = {
    "block_lifetime": "allocation to eviction",
    "block_idle": "last access to eviction",
    "block_reuse_gap": "between accesses",
}
WRITTEN = ("computed_prompt_tokens", "transferred_prompt_tokens", "generation_tokens")  # into the KV cache
MINUTE_S, HOUR_S = 60.0, 3600.0


def queue_and_prefill(subject: Subject, window: Window) -> list[Series]:
    """Mean seconds in the engines' queue and in prefill. Means, since these add up and quantiles do not."""
    return _mean_durations(subject, window, PHASES)


def block_times(subject: Subject, window: Window) -> list[Series]:
    """Mean seconds of sampled KV blocks: how long they live, stay idle before eviction, and wait for reuse."""
    return _mean_durations(subject, window, BLOCK_TIMES)


def sampled_evictions(subject: Subject, window: Window) -> list[Series]:
    """Sampled KV blocks evicted a minute, a line a replica that samples blocks.

    The engine does not report its sampling rate (--kv-cache-metrics-sample), so this is not scaled to all blocks.
    """
    return _by_replica(subject, window, ("block_lifetime_count",), _evicted_per_minute)


def cache_churn(subject: Subject, window: Window) -> list[Series]:
    """Turnovers an hour, a line a replica: tokens written to the KV cache / its capacity in tokens.

    A full cache evicts what is written. 1 / mean block lifetime would be the same for a full cache, but counts only
    the blocks that are reused while it is not full, and lags by one lifetime.
    """
    return _by_replica(subject, window, WRITTEN, _turnovers_per_hour)


def prompt_sources(subject: Subject, window: Window) -> list[Series]:
    """Shares of the prompt tokens that were computed, cached, and transferred by a KV connector, 0 to 1."""
    rows = counted(_ids(subject), window, PROMPT_SOURCES)
    lines = []
    for name, label in SOURCES.items():
        if any(row.values[name] is not None for row in rows):
            points = {row.start: _of(row, row.values[name], _sum(row)) for row in rows}
            lines.append(line_of(label, window, points))
    return lines


def mm_hit_rate(subject: Subject, window: Window) -> list[Series]:
    """Cached / queried multimodal items, 0 to 1; no line where nothing was queried."""
    rows = counted(_ids(subject), window, ("mm_cache_queries", "mm_cache_hits"))
    if not any(row.values["mm_cache_queries"] for row in rows):
        return []
    points = {row.start: _of(row, row.values["mm_cache_hits"], row.values["mm_cache_queries"]) for row in rows}
    return [line_of("Multimodal hit rate", window, points)]


def waiting_by_reason(subject: Subject, window: Window) -> list[Series]:
    """Waiting requests of all engines together, by reason."""
    rows = waiting_sums(_ids(subject), window)
    return [
        line_of(label, window, {row.start: _known(row.values[name]) for row in rows})
        for name, label in REASONS.items()
        if any(row.values[name] is not None for row in rows)
    ]


def _by_replica(
    subject: Subject,
    window: Window,
    names: Sequence[str],
    rate_of: Callable[[Replica, ReplicaTotals], float | None],
) -> list[Series]:
    """A line for each replica whose rate is known at some time."""
    replicas = {replica.pk: replica for replica in subject.replicas()}
    points: dict[int, dict[datetime, Point]] = defaultdict(dict)
    for row in counted_by_replica(list(replicas), window, names):
        value = rate_of(replicas[row.replica_id], row)
        absent = PointState.STALE if row.totals.stale else PointState.UNKNOWN
        points[row.replica_id][row.totals.start] = (value, absent if value is None else PointState.OK)
    return [
        line_of(replica.name, window, points[pk])
        for pk, replica in replicas.items()
        if any(value is not None for value, _ in points[pk].values())
    ]


def _evicted_per_minute(_: Replica, row: ReplicaTotals) -> float | None:
    rate = ratio(row.totals.values["block_lifetime_count"], row.covered_s)
    return None if rate is None else MINUTE_S * rate


def _turnovers_per_hour(replica: Replica, row: ReplicaTotals) -> float | None:
    """By the capacity as the engine reports it now."""
    if row.totals.values["computed_prompt_tokens"] is None or not (replica.capacity_blocks and replica.block_tokens):
        return None
    written = total_known(row.totals.values[name] for name in WRITTEN)
    rate = ratio(written, row.covered_s)
    return None if rate is None else HOUR_S * rate / (replica.capacity_blocks * replica.block_tokens)


def _mean_durations(subject: Subject, window: Window, labels: Mapping[str, str]) -> list[Series]:
    rows = counted(_ids(subject), window, [f"{name}_{part}" for name in labels for part in ("ms", "count")])
    return [
        line_of(label, window, _means(rows, name))
        for name, label in labels.items()
        if any(row.values[f"{name}_count"] is not None for row in rows)
    ]


def _means(rows: list[EngineTotals], name: str) -> dict[datetime, Point]:
    points = {}
    for row in rows:
        total_ms = row.values[f"{name}_ms"]
        points[row.start] = _of(row, None if total_ms is None else total_ms / 1000, row.values[f"{name}_count"])
    return points


def _of(row: EngineTotals, part: float | None, whole: float | None) -> Point:
    return ratio(part, whole), point_state(whole, stale=row.stale)


def _known(value: float | None) -> Point:
    return value, PointState.UNKNOWN if value is None else PointState.OK


def _sum(row: EngineTotals) -> float | None:
    known = [value for name in PROMPT_SOURCES if (value := row.values[name]) is not None]
    return sum(known) if known else None


def _ids(subject: Subject) -> list[int]:
    return [replica.pk for replica in subject.replicas()]
