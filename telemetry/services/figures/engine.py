"""Lines of what only some engines report. A chart of what none of the subject's engines reports has no line.

What must be known of a replica's engine before its figures are believed.

Whether a replica's counters, its answers and the routers' predictions tell of the same hit rate (H17).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controlplane.models import Replica
from telemetry.metrics.engine_names import EXPECTED, PROMPT_SOURCES, WAITING_REASONS, may_count_twice
from telemetry.metrics.rates import Comparison, EngineCounts, RouterCounts, compare, ratio, sum_known
from telemetry.metrics.windows import PointState, Series, Window
from telemetry.models import ScrapeState
from telemetry.services.figures.overview import Pools, Subject, names_of, replicas_of
from telemetry.services.figures.series import Point, line_of
from telemetry.storage.dimension_sums import (
    EngineTotals,
    ReplicaTotals,
    counted,
    counter_sums_by_replica,
    router_counts_by_replica,
)
from telemetry.storage.dimension_sums import waiting_by_reason as waiting_sums
from telemetry.storage.replica_facts import is_decode
from telemetry.storage.sums import EngineSums, engine_sums, fetch_rows, point_state

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
    for row in counter_sums_by_replica(list(replicas), window, names):
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
    written = sum_known(row.totals.values[name] for name in WRITTEN)
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


MAY_BE_SKEWED = (
    "{} counts a request once for each time its scheduling is tried, so its hit rate may be skewed, either way, under"
    " memory pressure or with KV connectors. Releases from 0.33 on count it once."
)
DECODES = "A decode replica: its cache is filled by transfer, so its own hit rate is near 100 % whatever was reused."
LATE = "{} counts requests when they end, where vLLM counts them when they are admitted."
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


@dataclass(frozen=True, slots=True)
class EngineNotes:
    """One replica's engine."""

    engine: str = ""  # "vLLM", "SGLang", "TensorRT-LLM"; "" while unknown
    version: str = ""  # "" while unknown
    not_reported: tuple[str, ...] = ()  # names of figures that its newest reading says it does not have
    notes: tuple[str, ...] = ()  # sentences (H13, H19)
    decodes: bool = False

    def reports(self, *figures: str) -> bool:
        """Whether it has all of some figures, by the names of ``Reading``'s columns, "ttft" and "itl"."""
        if unknown := set(figures) - EXPECTED:
            raise ValueError(f"no figures of a reading: {', '.join(sorted(unknown))}")
        return not set(figures) & set(self.not_reported)


def engine_notes(replicas: Sequence[Replica], window: Window) -> dict[int, EngineNotes]:
    """Of each replica, by id, as of the end of a window. 2 queries."""
    ids = [replica.pk for replica in replicas]
    states = {state.replica_id: state for state in ScrapeState.objects.filter(replica_id__in=ids).defer("raw_counters")}
    missing = _not_reported(ids, window)
    return {replica.pk: _notes(replica, states.get(replica.pk), missing.get(replica.pk, ())) for replica in replicas}


def _not_reported(replica_ids: Sequence[int], window: Window) -> dict[int, tuple[str, ...]]:
    """Of each replica's newest scrape of the window that succeeded: what none of its engines has."""
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
    decodes = is_decode(replica, state.role if state else "")
    sentences = [DECODES] if decodes else []
    if engine == "vllm" and may_count_twice(version, not_reported):
        sentences.append(MAY_BE_SKEWED.format(f"vLLM {version}" if version else "This release of vLLM"))
    elif title and engine != "vllm":
        sentences.append(LATE.format(title))
    return EngineNotes(title, version, not_reported, tuple(sentences), decodes)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """One replica's three ratios over a window, and what comes of holding them against each other."""

    pool: str
    replica: str
    engine: EngineCounts
    answers: RouterCounts
    comparison: Comparison
    notes: EngineNotes


LONGEST_S = 86_400.0  # it is read from the readings themselves


def newest_part(window: Window) -> Window:
    """What of a window can be reconciled: its last day."""
    return Window.last(min(window.length_s, LONGEST_S), until=window.end, step_s=window.step_s)


def reconcile(pools: Pools, window: Window, *, only: Replica | None = None) -> list[Reconciled]:
    """Each replica of some pools, or of all, by pool and name; or one, which is of these. 5 queries at most."""
    replicas = replicas_of(pools) if only is None else [only]
    ids = [replica.pk for replica in replicas]
    counted = {row.replica_id: row for row in engine_sums(ids, window, whole=True)}
    answered = router_counts_by_replica(names_of(pools), window)
    notes = engine_notes(replicas, window)
    rows = []
    for replica in replicas:
        of_replica = notes[replica.pk]
        engine = _engine_side(counted.get(replica.pk), decodes=of_replica.decodes)
        answers = answered.get((replica.pool.name, replica.name), RouterCounts())
        compared = compare(engine, answers)
        rows.append(Reconciled(replica.pool.name, replica.name, engine, answers, compared, of_replica))
    return rows


def _engine_side(row: EngineSums | None, *, decodes: bool) -> EngineCounts:
    if row is None:
        return EngineCounts(decodes=decodes)
    return EngineCounts(
        queries=row.queries,
        hits=row.hits,
        external_hits=row.external_hits,
        requests=row.requests,
        prompt_tokens=row.admitted_tokens,
        reports=not row.not_reported,
        decodes=decodes,
    )
