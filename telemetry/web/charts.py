"""The charts there are: what each shows of which subject, by which query, in which unit.

What a chart shows, said in a sentence for those who do not see it, and figures in words.
"""

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
ENGINES = frozenset({FLEET, POOL, REPLICA})  # of what engines know, and they know no task groups
SEVERAL = frozenset({FLEET, POOL})
UNTIMED = "no first token was timed"
UNSAMPLED = "no sampled KV block was reported. vLLM samples KV blocks with --kv-cache-metrics"


@dataclass(frozen=True, slots=True)
class View:
    """One way to draw a chart, chosen by its switch."""

    key: str
    label: str
    title: str
    unit: str  # "ratio", "seconds" or "count": how the axis and the sentence are written
    query: Query
    kinds: frozenset[Kind] = ALL  # of subjects that it can be drawn for
    stacked: bool = False
    empty: str = ""  # why nothing may be known although scrapes succeed; "": what the lines' states say


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with its views; the first that fits a subject is the default. ``param`` of the URL picks another."""

    slug: str
    param: str
    views: tuple[View, ...]
    about: str

    def views_of(self, kind: Kind) -> list[View]:
        """The views that a kind of subject has."""
        return [view for view in self.views if kind in view.kinds]

    def view(self, params: QueryDict, kind: Kind) -> View | None:
        """The view that a URL asks for; None where there is nothing to draw of such a subject."""
        fitting, asked = self.views_of(kind), params.get(self.param, "")
        return next((view for view in fitting if view.key == asked), fitting[0] if fitting else None)


def _gauge(what: str, label: str, title: str, unit: str) -> View:
    return View(what, label, title, unit, partial(chart_series.gauge, what=what), ENGINES)


def _within(objective_s: float, label: str) -> View:
    title = f"First token within {label}"
    query = partial(chart_series.share_within, objective_s=objective_s)
    return View(f"{objective_s:g}", label, title, "ratio", query, empty=UNTIMED)


def _by_replica(*kinds: Kind) -> View:
    return View(
        "replica", "Replica", "Hit rate by replica", "ratio", chart_series.hit_rate_by_replica, frozenset(kinds)
    )


HIT_RATE = Chart(
    "hit-rate",
    "by",
    (
        _by_replica(FLEET),
        View("whole", "Whole", "Hit rate and reachable share", "ratio", chart_series.hit_rate, ALL - {REPLICA}),
        View("whole", "Whole", "Hit rate", "ratio", chart_series.hit_rate, frozenset({REPLICA})),
        _by_replica(POOL, GROUP),
        View(
            "group",
            "Task group",
            "Hit rate by task group",
            "ratio",
            lambda subject, window: series.hit_rate_by_group(subject.among, window),
            SEVERAL,
        ),
        View(
            "pool",
            "Pool",
            "Hit rate by pool",
            "ratio",
            lambda subject, window: series.hit_rate_by_pool(subject.among, window),
            frozenset({FLEET}),
        ),
        View("rank", "Rank", "Hit rate by rank", "ratio", chart_series.hit_rate_by_engine, frozenset({REPLICA})),
    ),
    "Cached tokens over queried tokens. Replicas and pools by the engines' counters, task groups by what "
    "answers reported.",
)
TIERS = Chart(
    "tiers",
    "tier",
    (
        View("", "Tiers", "Where cached tokens came from", "ratio", chart_series.tiers, ENGINES, stacked=True),
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
        View(
            "blocks",
            "KV blocks",
            "Life of sampled KV blocks",
            "seconds",
            engine.block_times,
            ENGINES,
            empty=UNSAMPLED,
        ),
        View(
            "evictions",
            "Evictions",
            "Sampled KV blocks evicted a minute",
            "count",
            engine.sampled_evictions,
            ENGINES,
            empty=UNSAMPLED,
        ),
        View(
            "churn",
            "Churn",
            "KV cache turnovers an hour",
            "count",
            engine.cache_churn,
            ENGINES,
            empty="no engine reported its tokens and the size of its KV cache",
        ),
    ),
    "Each tier's share of the queried tokens, stacked; what is missing to 100 % was computed anew. Routing moves the "
    "device's share most. Prompt tokens: computed, cached or transferred, when the first token came. Multimodal: "
    "cached items over queried items. KV blocks, evictions: of blocks that vLLM samples with --kv-cache-metrics, 1 % "
    "of them unless --kv-cache-metrics-sample is set. Each reuse of a block's memory counts, also where it held no "
    "complete block of a prefix. Churn: how often an hour new tokens (computed, transferred, generated) would fill the "
    "cache. A full cache evicts about as much, one that is not full less.",
)
TTFT = Chart(
    "ttft",
    "clock",
    (
        View("", "Routers", "Time to first token", "seconds", chart_series.ttft_by_router, empty=UNTIMED),
        View(
            "engine", "Engines", "Time to first token, engines' clock", "seconds", chart_series.ttft_by_engine, ENGINES
        ),
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
            "By reuse",
            "Time to first token by reuse",
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
            chart_series.plain_latency,
            empty="no response without streaming",
        ),
    ),
    "From a request's arrival to its first token: p50 and p95 of all streamed responses together. The band is the "
    "histogram bucket that holds the value. By reuse: answers of which half of the prompt or more came from the cache, "
    "and the others. Not streamed: seconds to the last byte, as the first byte of such a response comes with its last "
    "token. Engines time the first token of every request. Queue and prefill: means over the requests that finished, "
    "by the engines' clock; their sum is close to the mean time to the first token.",
)
OBJECTIVE = Chart(
    "objective",
    "within",
    (_within(0.5, "500 ms"), _within(0.25, "250 ms"), _within(1.0, "1 s"), _within(2.5, "2.5 s")),
    "The share of streamed responses whose first token came in time; of all requests by the engines' clock.",
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
        View("preemptions", "Preempted", "Preemptions a second", "count", chart_series.preemptions, ENGINES),
    ),
    "KV usage is the share of KV blocks that running requests hold; warm blocks that nobody uses do not count. "
    "Waiting by reason: capacity, or deferred by a transient constraint such as a LoRA budget or a KV transfer.",
)
REQUESTS = Chart(
    "requests",
    "req",
    (
        View("", "Outcomes", "Requests a second by outcome", "count", chart_series.outcomes),
        View(
            "placed",
            "Replicas",
            "Share of requests by replica",
            "ratio",
            chart_series.requests_by_replica,
            frozenset({FLEET, POOL, GROUP}),
        ),
    ),
    "As the routers counted them.",
)
CHARTS = {chart.slug: chart for chart in (HIT_RATE, TTFT, TIERS, OBJECTIVE, UTILIZATION, REQUESTS)}


NAMED = 4  # lines that a sentence names

_WORDS = {"ratio": percent, "seconds": seconds, "count": count}
_ABSENT = {
    PointState.NO_TRAFFIC: "no traffic",
    PointState.STALE: "stale: scrapes fail",
    PointState.NOT_REPORTED: "not reported by this engine",
    PointState.UNKNOWN: "unknown",
    PointState.OK: "unknown",
}


def figure_words(value: float | None, unit: str) -> str:
    """A value with its unit."""
    return _WORDS[unit](value)


def absence(state: PointState | str) -> str:
    """Why there is no figure."""
    return _ABSENT[PointState(state)]


def chart_sentence(view: View, window: Window, lines: Sequence[Series], events: int) -> str:
    """One chart in words: what, when, where each line ends, and what happened meanwhile."""
    span = f"{window.start:%H:%M} to {window.end:%H:%M} UTC"
    known = [(line.label, value) for line in lines if (value := last_value(line)) is not None]
    if not known:
        return f"{view.title}, {span}: nothing was measured ({why_empty(view, lines)})."
    known.sort(key=lambda pair: -pair[1])
    named = ", ".join(f"{label} {figure_words(value, view.unit)}" for label, value in known[:NAMED])
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    happened = f" {events} {'event' if events == 1 else 'events'} marked." if events else ""
    return f"{view.title}, {span}. Last values: {named}{more}.{happened}"


def last_value(line: Series) -> float | None:
    """The newest known value."""
    return next((value for _, value in reversed(line.points) if value is not None), None)


def notes_of(lines: Sequence[Series]) -> list[str]:
    """What readers of a chart must know of its lines, each note once."""
    return sorted({line.note for line in lines if line.note})


def why_empty(view: View, lines: Sequence[Series]) -> str:
    """The most specific reason why a chart has no point: failed scrapes, the view's own, no traffic, not reported."""
    states = {state for line in lines for state in line.states}
    if view.empty and PointState.STALE not in states:
        return view.empty
    for state in (PointState.STALE, PointState.NO_TRAFFIC, PointState.NOT_REPORTED):
        if state in states:
            return absence(state)
    return "no reading yet"
