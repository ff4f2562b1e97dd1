"""Every figure over time of a subject (fleet, pool, task group or replica), which pages, CSV and REST read.

``FIGURES`` has them all: add one there, and its query here, or to ``series.py`` if it compares several objects with a
line each, or to ``engine.py`` if only some engines report it. Series of a task group are from router metrics, because
engines do not know task groups. The step of a window must be one for which data is retained (``fit_window``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from telemetry.metrics.histograms import Merged, share_at_most
from telemetry.metrics.rates import accounted_ratio, hit_rate_ratio, ratio, sum_known
from telemetry.metrics.windows import PointState, Series, Window
from telemetry.services.figures import engine, groups, series
from telemetry.services.figures.overview import Kind, Subject, share_of_responses, timed_note
from telemetry.services.figures.series import NO_VALUE, Point, hit_rate_of, line_of, point_of
from telemetry.storage import sums
from telemetry.storage.dimension_sums import (
    KeyedSums,
    coverage,
    engine_gauges,
    rank_sums,
    route_sums,
    total,
)
from telemetry.storage.reachable import MIN_WINDOW, reachable_over_time

TIERS = {"device": "device", "host": "host memory", "p2p": "other replicas", "disk": "disk", "other": "other"}
OUTCOMES = {
    "ok_requests": "OK",
    "client_error_requests": "client errors",
    "replica_error_requests": "replica errors",
    "router_error_requests": "router errors",
    "cancelled_requests": "cancelled",
}
QUANTILES = (0.5, 0.95)
REUSE_LABELS = {"hit": "cached", "miss": "computed"}
NO_REPLICA = "no replica"
ACCOUNTED_COLUMNS = ("ok_requests", "usage_reported")  # for the share of responses that a hit rate covers
Steps = dict[datetime, list[KeyedSums]]


# --- hit rate ---------------------------------------------------------------------------------------------


def hit_rate(subject: Subject, window: Window) -> list[Series]:
    """Total hit rate, the local cache's alone if connectors supplied tokens, and the reachable hit rate."""
    if subject.kind is Kind.GROUP:
        return _delivered(subject, window)
    starts = window.starts()
    rows = {starts[row.step]: row for row in sums.hit_sums_by_set([subject.counted_ids(window)], window)}
    points = {at: (hit_rate_of(row), row.state) for at, row in rows.items()}
    reachable = _reachable(subject, window, points)
    lines = [line_of("Hit rate", window, points, _reachable_note(subject, reachable))]
    if any(row.external_hits for row in rows.values()):
        local = {at: (hit_rate_of(row, local=True), row.state) for at, row in rows.items()}
        lines.append(line_of("Local cache only", window, local))
    return lines + reachable


def _engine_rows_by_start(subject: Subject, window: Window) -> dict[datetime, list[sums.EngineSums]]:
    by_start: dict[datetime, list[sums.EngineSums]] = defaultdict(list)
    for row in sums.engine_sums(subject.counted_ids(window), window):
        by_start[row.start].append(row)
    return by_start


def _delivered(subject: Subject, window: Window) -> list[Series]:
    """Hit rate of a task group: cached / prompt tokens of responses that report both."""
    names = ("requests", "prompt_tokens", "cached_tokens", *ACCOUNTED_COLUMNS)
    rows = _router_rows_by_start(subject, window, *names)
    points = _delivered_points(rows, _coverage_by_start(window))
    reachable = _reachable(subject, window, points)
    note = " ".join(filter(None, [_accounted_note("Hit rate", rows), _reachable_note(subject, reachable)]))
    return [line_of("Hit rate", window, points, note), *reachable]


def _accounted_note(label: str, steps: Steps) -> str:
    rows = [row for of_step in steps.values() for row in of_step]
    return series.hit_rate_note(label, accounted_ratio(total(rows, "usage_reported"), total(rows, "ok_requests")))


def _delivered_points(rows: Steps, covered: Mapping[datetime, sums.Coverage]) -> dict[datetime, Point]:
    points = {start: _gap_point(covered[start]) for start in covered}
    for start, of_step in rows.items():
        prompt = total(of_step, "prompt_tokens")
        known = ratio(total(of_step, "cached_tokens"), prompt)
        points[start] = (known, PointState.OK if prompt else PointState.UNKNOWN)
    return points


def _gap_point(step: sums.Coverage) -> Point:
    """State of a step without a reading, by scrape coverage."""
    if step.covered_s > 0:
        return None, PointState.NO_TRAFFIC
    return None, PointState.STALE if step.stale else PointState.UNKNOWN


def _reachable(subject: Subject, window: Window, delivered: Mapping[datetime, Point]) -> list[Series]:
    """The reachable line, if known. None for a replica, because any replica of the pool could reuse a prompt.

    What was delivered could be reached: in steps of half an hour and more, where both are of the same time, the line is
    not below the hit rate. In shorter steps it is of more time, which its note says.
    """
    if subject.kind is Kind.REPLICA:
        return []
    shares = reachable_over_time(subject.pool_names(), window, group=subject.group)
    if window.step_s >= MIN_WINDOW.total_seconds():
        rates = {at: delivered.get(at, NO_VALUE)[0] or 0.0 for at in shares}
        shares = {at: replace(share, ratio=max(share.ratio, rates[at])) for at, share in shares.items()}
    return [series.reachable_line("Reachable", window, shares)] if shares else []


def _reachable_note(subject: Subject, reachable: list[Series]) -> str:
    return "" if reachable or subject.kind is Kind.REPLICA else series.NO_REACHABLE_NOTE


def hit_rate_by_replica(subject: Subject, window: Window) -> list[Series]:
    """A line per replica: from engine metrics, or for a task group from the responses of each replica."""
    if subject.kind is not Kind.GROUP:
        return series.hit_rate_by_replica(subject, window)
    covered = _coverage_by_start(window)
    by_replica = _router_rows_by_replica(
        subject, window, "requests", "prompt_tokens", "cached_tokens", *ACCOUNTED_COLUMNS
    )
    return [
        line_of(name, window, _delivered_points(rows, covered), _accounted_note(name, rows))
        for name, rows in sorted(by_replica.items())
        if name
    ]


def hit_rate_by_rank(subject: Subject, window: Window) -> list[Series]:
    """A line per data-parallel rank of a replica."""
    points: dict[str, dict[datetime, Point]] = defaultdict(dict)
    for replica in subject.replicas():
        for row in rank_sums(replica.pk, window, ("queries", "hits", "external_hits")):
            queries = row.get("queries")
            value = hit_rate_ratio(queries, row.get("hits"), row.get("external_hits"))
            points[rank_name(*row.key)][row.start] = (value, sums.point_state(queries, stale=row.stale))
    return [line_of(name, window, of_rank) for name, of_rank in sorted(points.items())]


def rank_name(model: str, engine: str) -> str:
    """Label of a rank."""
    return f"rank {engine} ({model})" if engine else model


def tiers(subject: Subject, window: Window) -> list[Series]:
    """Cached tokens by tier as a share of queried tokens, the local tier first.

    Only of engines that report tiers: hits of others may be of any tier. A note says which part of the tokens this is.
    """
    rows = _engine_rows_by_start(subject, window)
    note = _tier_note([row for of_step in rows.values() for row in of_step])
    lines = []
    for tier, label in TIERS.items():
        if tier == "device" or any(_tokens_of_tier(row, tier) for of_step in rows.values() for row in of_step):
            points = {start: _tier_hit_rate(of_step, tier) for start, of_step in rows.items()}
            lines.append(line_of(label, window, points, note))
    return lines


def _tier_note(rows: list[sums.EngineSums]) -> str:
    reported = sum(row.queries or 0 for row in rows if row.device_tokens is not None)
    share = ratio(reported, sum(row.queries or 0 for row in rows))
    if not share or share == 1:
        return ""
    return f"Tiers: of {share * 100:.1f} % of the queried tokens; the other engines do not report tiers."


def _tokens_of_tier(row: sums.EngineSums, tier: str) -> int | None:
    tokens: int | None = getattr(row, f"{tier}_tokens")
    return tokens


def _tier_hit_rate(rows: list[sums.EngineSums], tier: str) -> Point:
    reporting = [row for row in rows if row.device_tokens is not None]
    cached = sum_known(_tokens_of_tier(row, tier) for row in reporting)
    queries = sum_known(row.queries for row in reporting)
    counted = any(row.queries is not None for row in rows)
    return ratio(cached, queries), sums.point_state(queries, stale=any(row.stale for row in rows), not_reported=counted)


# --- time to first token ----------------------------------------------------------------------------------


def ttft_by_router(subject: Subject, window: Window) -> list[Series]:
    """TTFT p50 and p95 of routers, with the bucket as band; of engines if routers observed none."""
    clock, merged = groups.ttft(subject, window)
    return _quantiles(merged, clock, window, _coverage_note(subject, window, clock, merged))


def _coverage_note(subject: Subject, window: Window, clock: str, merged: Mapping[datetime, Merged]) -> str:
    """Text about the share of responses with a TTFT; "" for all. One query for router TTFT."""
    if clock != "router":
        return ""
    return timed_note(merged.values(), groups.latency(subject, window, streamed=False, whole=True).values())


def latency(subject: Subject, window: Window, *, streamed: bool) -> list[Series]:
    """Router latency p50 and p95 of whole successful responses, streamed or not."""
    return _quantiles(groups.latency(subject, window, streamed=streamed), "router", window)


def ttft_by_engine(subject: Subject, window: Window) -> list[Series]:
    """TTFT p50 and p95 of engines, without queueing at the router and network time."""
    return _quantiles(groups.engine_ttft(subject, window), "engine", window)


def _quantiles(merged: Mapping[datetime, Merged], clock: str, window: Window, note: str = "") -> list[Series]:
    return [series.quantile_line(f"p{q * 100:g} ({clock})", q, merged, window, note) for q in QUANTILES]


def ttft_by_reuse(subject: Subject, window: Window) -> list[Series]:
    """Router TTFT p50 and p95 of responses whose prompt was at least half cached, and of the others."""
    merged = {reuse: groups.ttft_of_reuse(subject, window, reuse) for reuse in REUSE_LABELS}
    note = _reuse_coverage_note(subject, window, [part for steps in merged.values() for part in steps.values()])
    return [
        series.quantile_line(f"p{q * 100:g}, {label}", q, merged[reuse], window, note)
        for reuse, label in REUSE_LABELS.items()
        for q in QUANTILES
    ]


def _reuse_coverage_note(subject: Subject, window: Window, known: list[Merged]) -> str:
    """Text about the share of responses that are streamed and report cached tokens. Two queries."""
    timed = groups.router_ttft(subject, window, whole=True)
    non_streamed = groups.latency(subject, window, streamed=False, whole=True)
    return series.accounted_note("TTFT by reuse", share_of_responses(known, [*timed.values(), *non_streamed.values()]))


def share_within(subject: Subject, window: Window, objective_s: float) -> list[Series]:
    """Share of requests with a TTFT within the objective, at the largest bucket edge up to it, so it is exact.

    The line's note has the edge.
    """
    clock, merged = groups.ttft(subject, window)
    edge = groups.edge_up_to(objective_s, merged.values())
    shares = {at: share_at_most(part.buckets, edge) if edge is not None else None for at, part in merged.items()}
    points = {at: point_of(share) for at, share in shares.items()}
    line = line_of(f"within {objective_s:g} s ({clock})", window, points)
    notes = [f"Requests within {edge:.3g} s, the nearest histogram bucket, are counted."] if edge is not None else []
    note = " ".join(filter(None, [*notes, _coverage_note(subject, window, clock, merged)]))
    return [Series(line.label, line.points, line.states, line.band, note)]


# --- load -------------------------------------------------------------------------------------------------


def gauge(subject: Subject, window: Window, name: str) -> list[Series]:
    """``kv_usage`` (0 to 1), ``running`` or ``waiting``: a line per replica, or per rank of one replica."""
    if subject.replica is None:
        return series.utilization_by_replica(subject, window, name)
    points: dict[str, dict[datetime, Point]] = defaultdict(dict)
    failed: dict[datetime, Point] = {}
    for (model, rank), start, value, stale in engine_gauges(subject.replica.pk, window, series.GAUGES[name]):
        # A row without model and rank is a failed scrape, of all ranks.
        if stale and not (model or rank):
            failed[start] = (None, PointState.STALE)
        else:
            points[rank_name(model, rank)][start] = point_of(value)
    return [line_of(label, window, failed | of_rank) for label, of_rank in sorted(points.items())]


def preemptions(subject: Subject, window: Window) -> list[Series]:
    """Preemptions per second, a line per replica."""
    points: dict[int, dict[datetime, Point]] = defaultdict(dict)
    for row in sums.engine_sums(subject.ids(), window):
        points[row.replica_id][row.start] = point_of(ratio(row.preemptions, row.covered_s), stale=row.stale)
    return [line_of(replica.name, window, points[replica.pk]) for replica in subject.replicas()]


def outcomes(subject: Subject, window: Window) -> list[Series]:
    """Requests per second by outcome; outcomes without requests are left out, except OK."""
    rows, covered = _router_rows_by_start(subject, window, *OUTCOMES), _coverage_by_start(window)
    lines = []
    for name, label in OUTCOMES.items():
        if name == "ok_requests" or any(total(of_step, name) for of_step in rows.values()):
            points = {start: _per_second(rows.get(start, []), name, step) for start, step in covered.items()}
            lines.append(line_of(label, window, points))
    return lines


def _per_second(rows: list[KeyedSums], name: str, step: sums.Coverage) -> Point:
    """0 if routers were scraped and counted nothing."""
    if not step.covered_s:
        return _gap_point(step)
    return sums.per_second(total(rows, name), [step]), PointState.OK


def requests_by_replica(subject: Subject, window: Window) -> list[Series]:
    """Share of the subject's requests by replica."""
    by_replica = _router_rows_by_replica(subject, window, "requests")
    whole: Steps = defaultdict(list)
    for rows in by_replica.values():
        for start, of_step in rows.items():
            whole[start] += of_step
    totals = {start: total(of_step, "requests") for start, of_step in whole.items()}
    lines = []
    for name, rows in sorted(by_replica.items()):
        points = {start: _share_of(rows.get(start), of_all) for start, of_all in totals.items()}
        lines.append(line_of(name or NO_REPLICA, window, points))
    return lines


def _share_of(rows: list[KeyedSums] | None, requests: int | None) -> Point:
    """Share of the requests; 0 if only other replicas got requests."""
    if not requests:
        return NO_VALUE
    return (total(rows or [], "requests") or 0) / requests, PointState.OK


def objectives_kept(subject: Subject, window: Window) -> list[Series]:
    """Share of the requests with an objective for TTFT that kept it, a line per task group."""
    names, by = ("objective_requests", "objective_kept"), ("pool", "group")
    pools = subject.pool_names()
    rows = route_sums(pools, window, names, by=by, group=subject.group, counted="objective_requests")
    by_group: dict[tuple[str, ...], list[KeyedSums]] = defaultdict(list)
    for row in rows:
        by_group[row.key].append(row)
    has_several_pools = len({pool for pool, _ in by_group}) > 1
    lines = []
    for (pool, group), of_group in by_group.items():
        if not total(of_group, "objective_requests"):
            continue
        label = f"{pool}/{group or series.NO_GROUP}" if has_several_pools else group or series.NO_GROUP
        kept = {row.start: row.get("objective_kept") or 0 for row in of_group}
        points = {row.start: point_of(ratio(kept[row.start], row.get("objective_requests"))) for row in of_group}
        note = f"{label}: {total(of_group, 'objective_requests'):,} requests had an objective."
        lines.append(line_of(label, window, points, note))
    return lines


# --- rows -------------------------------------------------------------------------------------------------


def _router_rows_by_start(subject: Subject, window: Window, *names: str) -> Steps:
    replica = subject.replica.name if subject.replica is not None else None
    by_start: Steps = defaultdict(list)
    for row in route_sums(subject.pool_names(), window, names, group=subject.group, replica=replica):
        by_start[row.start].append(row)
    return by_start


def _router_rows_by_replica(subject: Subject, window: Window, *names: str) -> dict[str, Steps]:
    by_replica: dict[str, Steps] = defaultdict(lambda: defaultdict(list))
    for row in route_sums(subject.pool_names(), window, names, by=("replica",), group=subject.group):
        by_replica[row.key[0]][row.start].append(row)
    return by_replica


def _coverage_by_start(window: Window) -> dict[datetime, sums.Coverage]:
    return {step.start: step for step in coverage(window)}


# --- the registry -----------------------------------------------------------------------------------------

ALL = frozenset(Kind)
ENGINES = ALL - {Kind.GROUP}  # engines do not know task groups
NOT_REPLICA = ALL - {Kind.REPLICA}  # of which a line per replica, or a share of its requests, says nothing
NO_FIRST_TOKEN = "no streamed response"  # noqa: S105 - no secret
NO_SAMPLES = "no sampled KV block was reported; vLLM samples them with --kv-cache-metrics"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure over time. REST has it as ``/series?metric=METRIC&by=BY``, pages as a view of a chart."""

    metric: str
    by: str
    unit: str  # "ratio", "seconds" or "count"
    query: Callable[[Subject, Window], list[Series]]
    kinds: frozenset[Kind] = ALL  # of subjects
    stacked: bool = False
    per: str = ""  # the time that a count is divided by: "second", "minute" or "hour"; "": not a rate
    empty: str = ""  # why there may be no data although scrapes succeed; "": by the states of the lines

    @property
    def unit_text(self) -> str:
        """The unit in words, for the header of a column."""
        return f"{self.unit} per {self.per}" if self.per else self.unit


def _gauge(metric: str, unit: str) -> Figure:
    return Figure(metric, "replica", unit, partial(gauge, name=metric), ENGINES)


def _within(objective_s: float) -> Figure:
    query = partial(share_within, objective_s=objective_s)
    return Figure("within", f"{objective_s:g}", "ratio", query, empty=NO_FIRST_TOKEN)


# The first ``by`` of a metric is its default.
_FIGURES = (
    Figure("hit_rate", "replica", "ratio", hit_rate_by_replica, NOT_REPLICA),
    Figure("hit_rate", "group", "ratio", series.hit_rate_by_group, NOT_REPLICA - {Kind.GROUP}),
    Figure("hit_rate", "pool", "ratio", series.hit_rate_by_pool, frozenset({Kind.FLEET})),
    Figure("hit_rate", "tier", "ratio", tiers, ENGINES, stacked=True),
    Figure("hit_rate", "whole", "ratio", hit_rate),
    Figure("hit_rate", "rank", "ratio", hit_rate_by_rank, frozenset({Kind.REPLICA})),
    Figure("reachable", "pool", "ratio", partial(series.reachable_by, by="pool"), frozenset({Kind.FLEET})),
    Figure("reachable", "group", "ratio", partial(series.reachable_by, by="group"), frozenset({Kind.FLEET})),
    Figure("local_hit_rate", "replica", "ratio", partial(series.hit_rate_by_replica, local=True), ENGINES),
    Figure("ttft", "quantile", "seconds", ttft_by_router, empty=NO_FIRST_TOKEN),
    Figure(
        "ttft", "reuse", "seconds", ttft_by_reuse, NOT_REPLICA, empty="no streamed response reported its cached tokens"
    ),
    Figure("engine_ttft", "quantile", "seconds", ttft_by_engine, ENGINES),
    Figure(
        "engine_ttft",
        "phase",
        "seconds",
        engine.queue_and_prefill,
        ENGINES,
        stacked=True,
        empty="no engine reported time in queue or in prefill",
    ),
    Figure("latency", "plain", "seconds", partial(latency, streamed=False), empty="all responses were streamed"),
    Figure("latency", "streamed", "seconds", partial(latency, streamed=True)),
    _within(0.5),
    _within(0.25),
    _within(1.0),
    _within(2.5),
    _gauge("kv_usage", "ratio"),
    _gauge("running", "count"),
    _gauge("waiting", "count"),
    Figure(
        "waiting",
        "reason",
        "count",
        engine.waiting_by_reason,
        ENGINES,
        stacked=True,
        empty="no engine reported waiting requests by reason",
    ),
    Figure("preemptions", "replica", "count", preemptions, ENGINES, per="second"),
    Figure("outcomes", "outcome", "count", outcomes, per="second"),
    Figure("request_share", "replica", "ratio", requests_by_replica, NOT_REPLICA),
    Figure(
        "objectives_kept",
        "group",
        "ratio",
        objectives_kept,
        NOT_REPLICA,
        empty="no request had an objective for TTFT (X-TTFT-Objective-Ms, or that of its task group)",
    ),
    Figure(
        "prompt_share",
        "source",
        "ratio",
        engine.prompt_sources,
        ENGINES,
        stacked=True,
        empty="no engine reported prompt tokens by source",
    ),
    Figure("mm_hit_rate", "pools", "ratio", engine.mm_hit_rate, ENGINES, empty="no engine reported multimodal items"),
    Figure("block_time", "phase", "seconds", engine.block_times, ENGINES, empty=NO_SAMPLES),
    Figure("sampled_evictions", "replica", "count", engine.sampled_evictions, ENGINES, per="minute", empty=NO_SAMPLES),
    Figure(
        "cache_churn",
        "replica",
        "count",
        engine.cache_churn,
        ENGINES,
        per="hour",
        empty="no engine reported its tokens and the size of its KV cache",
    ),
    *(  # sums over each step, not rates
        Figure(name, by, "count", partial(query, value=name), frozenset({Kind.FLEET}))
        for name in series.VALUES
        for by, query in (("group", series.by_group), ("pool", series.by_pool))
    ),
)
FIGURES: dict[str, dict[str, Figure]] = {}  # by metric and ``by``
for _figure in _FIGURES:
    FIGURES.setdefault(_figure.metric, {})[_figure.by] = _figure
