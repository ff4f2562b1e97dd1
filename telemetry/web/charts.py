"""The charts: their views with title, unit and query, and summaries of charts as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from django.http import QueryDict

from controlplane.web.tags import count, percent, seconds
from telemetry.metrics.windows import PointState, Series, Window
from telemetry.services.figures import chart_series, engine, series
from telemetry.services.figures.overview import Kind, Subject

Query = Callable[[Subject, Window], list[Series]]
FLEET, POOL, GROUP, REPLICA = Kind
ALL = frozenset(Kind)
ENGINES = frozenset({FLEET, POOL, REPLICA})  # engines do not know task groups
NO_FIRST_TOKEN = "no streamed response"  # noqa: S105 - no secret
NO_SAMPLES = "no sampled KV block was reported; vLLM samples them with --kv-cache-metrics"
NAMED_LINES = 4  # in a summary


@dataclass(frozen=True, slots=True)
class View:
    """One way to draw a chart."""

    key: str  # in the URL
    label: str  # on the switch
    title: str
    unit: str  # "ratio", "seconds" or "count"
    query: Query
    kinds: frozenset[Kind] = ALL  # of subjects
    stacked: bool = False
    per: str = ""  # what a count is divided by: "second"
    empty: str = ""  # why there may be no data although scrapes succeed; "": by the states of the lines

    @property
    def unit_text(self) -> str:
        """The unit in words, for the header of a column."""
        return f"{self.unit} per {self.per}" if self.per else self.unit


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. The URL parameter ``param`` selects a view; the first one of a subject is the default."""

    slug: str
    param: str
    views: tuple[View, ...]
    about: str

    def views_of(self, kind: Kind) -> list[View]:
        """The views for a kind of subject."""
        return [view for view in self.views if kind in view.kinds]

    def view(self, params: QueryDict, kind: Kind) -> View | None:
        """The selected view; None if the chart does not exist for such a subject."""
        views, key = self.views_of(kind), params.get(self.param, "")
        return next((view for view in views if view.key == key), views[0] if views else None)


def _gauge(what: str, label: str, title: str, unit: str) -> View:
    return View(what, label, title, unit, partial(chart_series.gauge, name=what), ENGINES)


def _within(objective_s: float, label: str) -> View:
    query = partial(chart_series.share_within, objective_s=objective_s)
    return View(f"{objective_s:g}", label, f"First token within {label}", "ratio", query, empty=NO_FIRST_TOKEN)


def _by_group(subject: Subject, window: Window) -> list[Series]:
    return series.hit_rate_by_group(subject.pools, window)


def _by_pool(subject: Subject, window: Window) -> list[Series]:
    return series.hit_rate_by_pool(subject.pools, window)


def _hit_rate_by(key: str, label: str, query: Query, *kinds: Kind) -> View:
    return View(key, label, f"Hit rate by {label.lower()}", "ratio", query, frozenset(kinds))


HIT_RATE = Chart(
    "hit-rate",
    "by",
    (
        View("whole", "Total", "Hit rate and reachable hit rate", "ratio", chart_series.hit_rate, ALL - {REPLICA}),
        View("whole", "Total", "Hit rate", "ratio", chart_series.hit_rate, frozenset({REPLICA})),
        _hit_rate_by("replica", "Replica", chart_series.hit_rate_by_replica, FLEET, POOL, GROUP),
        _hit_rate_by("group", "Task group", _by_group, FLEET, POOL),
        _hit_rate_by("pool", "Pool", _by_pool, FLEET),
        _hit_rate_by("rank", "Rank", chart_series.hit_rate_by_engine, REPLICA),
    ),
    "Cached tokens / queried tokens. Reachable: the hit rate that one unlimited shared cache would have had. "
    "Replicas and pools by the engines' counters, task groups by the usage that responses report.",
)
TTFT = Chart(
    "ttft",
    "clock",
    (
        View("", "Routers", "TTFT", "seconds", chart_series.ttft_by_router, empty=NO_FIRST_TOKEN),
        View("engine", "Engines", "TTFT by the engines' clock", "seconds", chart_series.ttft_by_engine, ENGINES),
        View(
            "split",
            "Queue and prefill",
            "Mean time in queue and in prefill",
            "seconds",
            engine.queue_and_prefill,
            ENGINES,
            stacked=True,
            empty="no engine reported time in queue or in prefill",
        ),
        View(
            "reuse",
            "By cache use",
            "TTFT by cache use",
            "seconds",
            chart_series.ttft_by_reuse,
            frozenset({FLEET, POOL, GROUP}),
            empty="no streamed response reported its cached tokens",
        ),
        View(
            "plain",
            "Not streamed",
            "Latency of responses that are not streamed",
            "seconds",
            chart_series.non_streamed_latency,
            empty="all responses were streamed",
        ),
    ),
    "TTFT (time to first token): seconds from the arrival of a request to its first token. p50 and p95 over all "
    "streamed responses; the band is the histogram bucket of the value. By cache use: responses with at least half of "
    "the prompt cached, and all others. Not streamed: seconds to the end of the response. Engines measure every "
    "request on their own clock. Queue and prefill: means over finished requests by the engines' clock; their sum is "
    "close to the mean TTFT.",
)
TIERS = Chart(
    "tiers",
    "tier",
    (
        View("", "Tiers", "Hit rate by cache tier", "ratio", chart_series.tiers, ENGINES, stacked=True),
        View(
            "source",
            "Prompt tokens",
            "Prompt tokens by source",
            "ratio",
            engine.prompt_sources,
            ENGINES,
            stacked=True,
            empty="no engine reported prompt tokens by source",
        ),
        View(
            "media",
            "Multimodal",
            "Hit rate of the multimodal cache",
            "ratio",
            engine.mm_hit_rate,
            ENGINES,
            empty="no engine reported multimodal items",
        ),
        View("blocks", "KV blocks", "Lifetime of KV blocks", "seconds", engine.block_times, ENGINES, empty=NO_SAMPLES),
        View(
            "evictions",
            "Evictions",
            "Evicted KV blocks per minute",
            "count",
            engine.sampled_evictions,
            ENGINES,
            empty=NO_SAMPLES,
        ),
        View(
            "churn",
            "Churn",
            "KV cache turnovers per hour",
            "count",
            engine.cache_churn,
            ENGINES,
            empty="no engine reported its tokens and the size of its KV cache",
        ),
    ),
    "Each cache tier's share of the queried tokens, stacked; the rest up to 100 % was computed. Routing mostly "
    "affects the device tier. Prompt tokens: computed, cached or transferred, when the first token came. Multimodal: "
    "cached items / queried items. KV blocks and evictions: of blocks that vLLM samples with --kv-cache-metrics (1 % "
    "unless --kv-cache-metrics-sample is set); every reuse of a block's memory counts. Churn: how often per hour new "
    "tokens (computed, transferred, generated) would fill the cache. A full cache evicts about as much, other caches "
    "less.",
)
OBJECTIVE = Chart(
    "objective",
    "within",
    (_within(0.5, "500 ms"), _within(0.25, "250 ms"), _within(1.0, "1 s"), _within(2.5, "2.5 s")),
    "Share of streamed responses whose first token came in time; of all requests by the engines' clock.",
)
UTILIZATION = Chart(
    "utilization",
    "util",
    (
        _gauge("kv_usage", "KV usage", "KV usage", "ratio"),
        _gauge("running", "Running", "Running requests", "count"),
        _gauge("waiting", "Waiting", "Waiting requests", "count"),
        View(
            "reason",
            "Waiting by reason",
            "Waiting requests by reason",
            "count",
            engine.waiting_by_reason,
            ENGINES,
            stacked=True,
            empty="no engine reported waiting requests by reason",
        ),
        View(
            "preemptions",
            "Preempted",
            "Preemptions per second",
            "count",
            chart_series.preemptions,
            ENGINES,
            per="second",
        ),
    ),
    "KV usage is the share of KV blocks that running requests use; unused cached blocks do not count. Waiting by "
    "reason: capacity, or deferred by a temporary constraint such as a LoRA limit or a KV transfer.",
)
REQUESTS = Chart(
    "requests",
    "req",
    (
        View("", "Outcomes", "Requests per second by outcome", "count", chart_series.outcomes, per="second"),
        View(
            "placed",
            "Replicas",
            "Share of requests by replica",
            "ratio",
            chart_series.requests_by_replica,
            frozenset({FLEET, POOL, GROUP}),
        ),
    ),
    "Counted by the routers.",
)
CHARTS = {chart.slug: chart for chart in (HIT_RATE, TTFT, TIERS, OBJECTIVE, UTILIZATION, REQUESTS)}

_FORMATS = {"ratio": percent, "seconds": seconds, "count": count}
_ABSENT = {
    PointState.NO_TRAFFIC: "no traffic",
    PointState.STALE: "stale: scrapes fail",
    PointState.NOT_REPORTED: "not reported by this engine",
    PointState.UNKNOWN: "unknown",
    PointState.OK: "unknown",
}


def figure_text(value: float | None, unit: str) -> str:
    """A value with its unit."""
    return _FORMATS[unit](value)


def absence(state: PointState | str) -> str:
    """Why there is no value."""
    return _ABSENT[PointState(state)]


def chart_summary(view: View, window: Window, lines: Sequence[Series], events: int) -> str:
    """A chart as text: title, range, latest values and number of events."""
    span = f"{window.start:%H:%M} to {window.end:%H:%M} UTC"
    values = [(line.label, value) for line in lines if (value := last_value(line)) is not None]
    if not values:
        return f"{view.title}, {span}: no data ({why_empty(view, lines)})."
    values.sort(key=lambda pair: -pair[1])
    named = ", ".join(f"{label} {figure_text(value, view.unit)}" for label, value in values[:NAMED_LINES])
    more = f" and {len(values) - NAMED_LINES} more" if len(values) > NAMED_LINES else ""
    marked = f" {events} {'event' if events == 1 else 'events'} marked." if events else ""
    return f"{view.title}, {span}. Latest values: {named}{more}.{marked}"


def last_value(line: Series) -> float | None:
    """The newest known value."""
    return next((value for _, value in reversed(line.points) if value is not None), None)


def notes_of(lines: Sequence[Series]) -> list[str]:
    """The notes of all lines, each once."""
    return sorted({line.note for line in lines if line.note})


def why_empty(view: View, lines: Sequence[Series]) -> str:
    """Why a chart has no data: failed scrapes, the view's own reason, no traffic, or not reported."""
    states = {state for line in lines for state in line.states}
    if view.empty and PointState.STALE not in states:
        return view.empty
    for state in (PointState.STALE, PointState.NO_TRAFFIC, PointState.NOT_REPORTED):
        if state in states:
            return absence(state)
    return "not scraped yet"
