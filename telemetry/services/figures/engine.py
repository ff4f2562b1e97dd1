"""Series that only some engines report, notes on engines and their versions, and reconciliation of hit rates.

A chart has no line for an engine that does not report the metric. Reconciliation compares a replica's counters, the
usage in its responses and the routers' predictions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.models import Replica
from telemetry.metrics.engine_names import EXPECTED, PROMPT_SOURCES, may_count_twice
from telemetry.metrics.rates import Comparison, EngineCounts, RouterCounts, compare, ratio, sum_known
from telemetry.metrics.windows import PointState, Series, Window
from telemetry.models import ScrapeState
from telemetry.services.figures.overview import Fleet, Subject
from telemetry.services.figures.series import Point, line_of
from telemetry.storage.dimension_sums import (
    KeyedSums,
    engine_counter_sums,
    router_counts_by_replica,
)
from telemetry.storage.dimension_sums import waiting_by_reason as waiting_sums
from telemetry.storage.replica_facts import is_decode
from telemetry.storage.sums import EngineSums, fetch_rows, point_state

PHASES = {"queue": "in queue", "prefill": "in prefill"}
SOURCES = dict(zip(PROMPT_SOURCES, ("computed", "cached", "transferred"), strict=True))
REASONS = ("capacity", "deferred")  # of WAITING_REASONS
BLOCK_TIMES = {
    "block_lifetime": "allocation to eviction",
    "block_idle": "last access to eviction",
    "block_reuse_gap": "between accesses",
}
WRITTEN = ("computed_prompt_tokens", "transferred_prompt_tokens", "generation_tokens")  # into the KV cache
MINUTE_S, HOUR_S = 60.0, 3600.0


def queue_and_prefill(subject: Subject, window: Window) -> list[Series]:
    """Mean seconds in the engines' queue and in prefill. Means, because means can be added and quantiles cannot."""
    return _mean_durations(subject, window, PHASES)


def block_times(subject: Subject, window: Window) -> list[Series]:
    """Mean seconds of sampled KV blocks: lifetime, idle time before eviction, and time between uses."""
    return _mean_durations(subject, window, BLOCK_TIMES)


def sampled_evictions(subject: Subject, window: Window) -> list[Series]:
    """Sampled KV blocks evicted per minute, a line per replica that samples blocks.

    The engine does not report its sampling rate (--kv-cache-metrics-sample), so this is not scaled to all blocks.
    """
    return _by_replica(subject, window, ("block_lifetime_count",), _evicted_per_minute)


def cache_churn(subject: Subject, window: Window) -> list[Series]:
    """Turnovers per hour, a line per replica: tokens written to the KV cache / its capacity in tokens.

    A full cache evicts what is written. 1 / mean block lifetime would be the same for a full cache, but counts only
    the blocks that are reused while it is not full, and lags by one lifetime.
    """
    return _by_replica(subject, window, WRITTEN, _turnovers_per_hour)


def prompt_sources(subject: Subject, window: Window) -> list[Series]:
    """Shares of the prompt tokens that were computed, cached, and transferred by a KV connector, 0 to 1."""
    rows = engine_counter_sums(subject.ids(), window, PROMPT_SOURCES)
    lines = []
    for name, label in SOURCES.items():
        if any(row.counts[name] is not None for row in rows):
            points = {row.start: _ratio_point(row, row.counts[name], _prompt_tokens(row)) for row in rows}
            lines.append(line_of(label, window, points))
    return lines


def mm_hit_rate(subject: Subject, window: Window) -> list[Series]:
    """Cached / queried multimodal items, 0 to 1; no line without queries."""
    rows = engine_counter_sums(subject.ids(), window, ("mm_cache_queries", "mm_cache_hits"))
    if not any(row.counts["mm_cache_queries"] for row in rows):
        return []
    points = {row.start: _ratio_point(row, row.counts["mm_cache_hits"], row.counts["mm_cache_queries"]) for row in rows}
    return [line_of("Multimodal hit rate", window, points)]


def waiting_by_reason(subject: Subject, window: Window) -> list[Series]:
    """Waiting requests of all engines together, by reason."""
    rows = waiting_sums(subject.ids(), window)
    return [
        line_of(label, window, {start: _value_point(means[number]) for start, means in rows})
        for number, label in enumerate(REASONS)
        if any(means[number] is not None for _, means in rows)
    ]


def _by_replica(
    subject: Subject,
    window: Window,
    names: Sequence[str],
    rate_of: Callable[[Replica, KeyedSums], float | None],
) -> list[Series]:
    """A line per replica with at least one known value."""
    replicas = {replica.pk: replica for replica in subject.replicas()}
    points: dict[int, dict[datetime, Point]] = defaultdict(dict)
    for row in engine_counter_sums(list(replicas), window, names, by="replica"):
        key = int(row.key[0])
        value = rate_of(replicas[key], row)
        absent = PointState.STALE if row.stale else PointState.UNKNOWN
        points[key][row.start] = (value, absent if value is None else PointState.OK)
    return [
        line_of(replica.name, window, points[pk])
        for pk, replica in replicas.items()
        if any(value is not None for value, _ in points[pk].values())
    ]


def _evicted_per_minute(_: Replica, row: KeyedSums) -> float | None:
    rate = ratio(row.counts["block_lifetime_count"], row.covered_s)
    return None if rate is None else MINUTE_S * rate


def _turnovers_per_hour(replica: Replica, row: KeyedSums) -> float | None:
    """How often per hour writes fill the KV cache, by the capacity that the engine currently reports."""
    if row.counts["computed_prompt_tokens"] is None or not (replica.capacity_blocks and replica.block_tokens):
        return None
    written = sum_known(row.counts[name] for name in WRITTEN)
    rate = ratio(written, row.covered_s)
    return None if rate is None else HOUR_S * rate / (replica.capacity_blocks * replica.block_tokens)


def _mean_durations(subject: Subject, window: Window, labels: Mapping[str, str]) -> list[Series]:
    rows = engine_counter_sums(subject.ids(), window, [f"{name}_{part}" for name in labels for part in ("ms", "count")])
    return [
        line_of(label, window, _means(rows, name))
        for name, label in labels.items()
        if any(row.counts[f"{name}_count"] is not None for row in rows)
    ]


def _means(rows: list[KeyedSums], name: str) -> dict[datetime, Point]:
    points = {}
    for row in rows:
        total_ms = row.counts[f"{name}_ms"]
        points[row.start] = _ratio_point(
            row, None if total_ms is None else total_ms / 1000, row.counts[f"{name}_count"]
        )
    return points


def _ratio_point(row: KeyedSums, part: float | None, whole: float | None) -> Point:
    return ratio(part, whole), point_state(whole, stale=row.stale)


def _value_point(value: float | None) -> Point:
    return value, PointState.UNKNOWN if value is None else PointState.OK


def _prompt_tokens(row: KeyedSums) -> float | None:
    known = [value for name in PROMPT_SOURCES if (value := row.counts[name]) is not None]
    return sum(known) if known else None


SKEWED_NOTE = (
    "{} counts a request each time it tries to schedule it, so under memory pressure or with KV connectors the hit"
    " rate may be too high or too low. Releases from 0.33 on count it once."
)
DECODE_NOTE = "Decode replica: its cache is filled by transfer, so its own hit rate is always near 100 %."
COUNTED_AT_END_NOTE = "{} counts requests at their end; vLLM counts them on admission."
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


@dataclass(frozen=True, slots=True)
class EngineNotes:
    """Notes on the engine of one replica."""

    engine: str = ""  # "vLLM", "SGLang", "TensorRT-LLM"; "" while unknown
    version: str = ""  # "" while unknown
    not_reported: tuple[str, ...] = ()  # figures missing from its newest reading
    notes: tuple[str, ...] = ()  # sentences
    is_decode: bool = False

    def reports(self, *figures: str) -> bool:
        """Whether the engine reports all of some figures: columns of ``Reading``, or "ttft"."""
        if unknown := set(figures) - EXPECTED:
            raise ValueError(f"unknown figures: {', '.join(sorted(unknown))}")
        return not set(figures) & set(self.not_reported)


def engine_notes(fleet: Fleet, window: Window) -> dict[int, EngineNotes]:
    """Notes by replica id, as of the window's end. At most 3 queries."""
    missing = _not_reported([replica.pk for replica in fleet.replicas], window)
    return {row.pk: _notes(row, fleet.states.get(row.pk), missing.get(row.pk, ())) for row in fleet.replicas}


def _not_reported(replica_ids: Sequence[int], window: Window) -> dict[int, tuple[str, ...]]:
    """Figures that no engine of a replica had in its newest successful scrape of the window."""
    rows = fetch_rows(
        """
        with newest as (
            select distinct on (replica_id) replica_id, at from telemetry_reading
            where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s::bigint[]) and not_reported is not null
            order by replica_id, at desc
        )
        select r.replica_id, r.not_reported from telemetry_reading r join newest n
            on r.replica_id = n.replica_id and r.at = n.at
        where r.at > %(start)s and r.at <= %(end)s and r.not_reported is not null
        """,
        {"start": window.start, "end": window.end, "ids": list(replica_ids)},
    )
    found: dict[int, set[str]] = {}
    for pk, names in rows:
        found[pk] = found.get(pk, set(names)) & set(names)
    return {pk: tuple(sorted(names)) for pk, names in found.items()}


def _notes(replica: Replica, state: ScrapeState | None, not_reported: tuple[str, ...]) -> EngineNotes:
    engine, version = (state.engine, state.version) if state else ("", "")
    title = TITLES.get(engine, "")
    decode_only = is_decode(replica, state.role if state else "")
    sentences = [DECODE_NOTE] if decode_only else []
    if engine == "vllm" and may_count_twice(version, not_reported):
        sentences.append(SKEWED_NOTE.format(f"vLLM {version}" if version else "This release of vLLM"))
    elif title and engine != "vllm":
        sentences.append(COUNTED_AT_END_NOTE.format(title))
    return EngineNotes(title, version, not_reported, tuple(sentences), decode_only)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """One replica's three hit rates over a window, and their comparison."""

    pool: str
    replica: str
    engine: EngineCounts
    responses: RouterCounts
    comparison: Comparison
    notes: EngineNotes


MAX_WINDOW_S = 86_400.0  # because it reads unaggregated readings


def last_day_of(window: Window) -> Window:
    """The part of a window that is reconciled: at most its last day."""
    is_long = window.length_s > MAX_WINDOW_S
    return Window.last(MAX_WINDOW_S, until=window.end, step_s=window.step_s) if is_long else window


def reconcile(fleet: Fleet, window: Window) -> list[Reconciled]:
    """Reconcile the replicas of some or all pools, by pool and name, or only one. At most 6 queries."""
    engine_rows = fleet.engine_sums(window)
    routed = router_counts_by_replica(fleet.subject.pool_names(), window)
    notes = engine_notes(fleet, window)
    rows = []
    for replica in fleet.replicas:
        engine_note = notes[replica.pk]
        engine = _engine_counts(engine_rows.get(replica.pk), is_decode=engine_note.is_decode)
        responses = routed.get((replica.pool.name, replica.name), RouterCounts())
        comparison = compare(engine, responses)
        rows.append(Reconciled(replica.pool.name, replica.name, engine, responses, comparison, engine_note))
    return rows


def _engine_counts(row: EngineSums | None, *, is_decode: bool) -> EngineCounts:
    if row is None:
        return EngineCounts(is_decode=is_decode)
    return EngineCounts(
        queries=row.queries,
        hits=row.hits,
        external_hits=row.external_hits,
        requests=row.requests,
        prompt_tokens=row.admitted_tokens,
        reports=not row.not_reported,
        is_decode=is_decode,
    )
