"""The charts there are: what each shows of which subject, by which query, in which unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from django.http import QueryDict

from telemetry.metrics.windows import Series, Window
from telemetry.services.figures import engine_details, lines, series
from telemetry.services.figures.subjects import Kind, Subject

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
    return View(what, label, title, unit, partial(lines.gauge, what=what), ENGINES)


def _within(objective_s: float, label: str) -> View:
    title = f"First token within {label}"
    query = partial(lines.share_within, objective_s=objective_s)
    return View(f"{objective_s:g}", label, title, "ratio", query, empty=UNTIMED)


def _by_replica(*kinds: Kind) -> View:
    return View("replica", "Replica", "Hit rate by replica", "ratio", lines.hit_rate_by_replica, frozenset(kinds))


HIT_RATE = Chart(
    "hit-rate",
    "by",
    (
        _by_replica(FLEET),
        View("whole", "Whole", "Hit rate and reachable share", "ratio", lines.hit_rate, ALL - {REPLICA}),
        View("whole", "Whole", "Hit rate", "ratio", lines.hit_rate, frozenset({REPLICA})),
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
        View("rank", "Rank", "Hit rate by rank", "ratio", lines.hit_rate_by_engine, frozenset({REPLICA})),
    ),
    "Cached tokens over queried tokens. Replicas and pools by the engines' counters, task groups by what "
    "answers reported.",
)
TIERS = Chart(
    "tiers",
    "tier",
    (
        View("", "Tiers", "Where cached tokens came from", "ratio", lines.tiers, ENGINES, stacked=True),
        View(
            "source",
            "Prompt tokens",
            "Prompt tokens by source",
            "ratio",
            engine_details.prompt_sources,
            ENGINES,
            stacked=True,
            empty="no engine reported prompt tokens by source",
        ),
        View(
            "media",
            "Multimodal",
            "Hit rate of the multimodal cache",
            "ratio",
            engine_details.mm_hit_rate,
            ENGINES,
            empty="no engine reported multimodal items",
        ),
        View(
            "blocks",
            "KV blocks",
            "Life of sampled KV blocks",
            "seconds",
            engine_details.block_times,
            ENGINES,
            empty=UNSAMPLED,
        ),
        View(
            "evictions",
            "Evictions",
            "Sampled KV blocks evicted a minute",
            "count",
            engine_details.sampled_evictions,
            ENGINES,
            empty=UNSAMPLED,
        ),
        View(
            "churn",
            "Churn",
            "KV cache turnovers an hour",
            "count",
            engine_details.cache_churn,
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
        View("", "Routers", "Time to first token", "seconds", lines.ttft_by_router, empty=UNTIMED),
        View("engine", "Engines", "Time to first token, engines' clock", "seconds", lines.ttft_by_engine, ENGINES),
        View(
            "split",
            "Queue and prefill",
            "Mean time in queue and in prefill",
            "seconds",
            engine_details.queue_and_prefill,
            ENGINES,
            stacked=True,
            empty="no engine reported time in queue or in prefill",
        ),
        View(
            "reuse",
            "By reuse",
            "Time to first token by reuse",
            "seconds",
            lines.ttft_by_reuse,
            frozenset({FLEET, POOL, GROUP}),
            empty="no streamed response reported its cached tokens",
        ),
        View(
            "plain",
            "Not streamed",
            "Latency of responses that are not streamed",
            "seconds",
            lines.plain_latency,
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
            engine_details.waiting_by_reason,
            ENGINES,
            stacked=True,
            empty="no engine reported waiting requests by reason",
        ),
        View("preemptions", "Preempted", "Preemptions a second", "count", lines.preemptions, ENGINES),
    ),
    "KV usage is the share of KV blocks that running requests hold; warm blocks that nobody uses do not count. "
    "Waiting by reason: capacity, or deferred by a transient constraint such as a LoRA budget or a KV transfer.",
)
REQUESTS = Chart(
    "requests",
    "req",
    (
        View("", "Outcomes", "Requests a second by outcome", "count", lines.outcomes),
        View(
            "placed",
            "Replicas",
            "Share of requests by replica",
            "ratio",
            lines.requests_by_replica,
            frozenset({FLEET, POOL, GROUP}),
        ),
    ),
    "As the routers counted them.",
)
CHARTS = {chart.slug: chart for chart in (HIT_RATE, TTFT, TIERS, OBJECTIVE, UTILIZATION, REQUESTS)}
