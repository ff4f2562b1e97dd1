"""The charts of pages: their views, each a figure with a title, and summaries of charts as text.

The figures themselves are in ``telemetry/services/figures/figures.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from django.http import QueryDict

from controlplane.web.tags import count, percent, seconds
from telemetry.metrics.windows import PointState, Series, Window
from telemetry.services.figures.figures import FIGURES, Figure
from telemetry.services.figures.overview import Kind

FLEET, POOL, GROUP, REPLICA = Kind
NAMED_LINES = 4  # in a summary


@dataclass(frozen=True, slots=True)
class View:
    """One way to draw a chart."""

    key: str  # in the URL
    label: str  # on the switch
    title: str
    figure: Figure
    only: frozenset[Kind] | None = None  # kinds of subjects; None: those of the figure
    spread: bool = False  # of more than two lines, draw the median, and the range of all as a band

    @property
    def kinds(self) -> frozenset[Kind]:
        return self.figure.kinds if self.only is None else self.only


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


_HIT_RATE, _TTFT, _ENGINE_TTFT = FIGURES["hit_rate"], FIGURES["ttft"], FIGURES["engine_ttft"]
HIT_RATE = Chart(
    "hit-rate",
    "by",
    (
        View("whole", "Total", "Hit rate and reachable hit rate", _HIT_RATE["whole"], frozenset({FLEET, POOL, GROUP})),
        View("whole", "Total", "Hit rate", _HIT_RATE["whole"], frozenset({REPLICA})),
        View("replica", "Replica", "Hit rate by replica", _HIT_RATE["replica"]),
        View("group", "Task group", "Hit rate by task group", _HIT_RATE["group"]),
        View("pool", "Pool", "Hit rate by pool", _HIT_RATE["pool"]),
        View("rank", "Rank", "Hit rate by rank", _HIT_RATE["rank"]),
    ),
    "Cached tokens / queried tokens. Reachable: the hit rate that one unlimited shared cache would have had. "
    "Replicas and pools by the engines' counters, task groups by the usage that responses report.",
)
TTFT = Chart(
    "ttft",
    "clock",
    (
        View("", "Routers", "TTFT", _TTFT["quantile"]),
        View("engine", "Engines", "TTFT by the engines' clock", _ENGINE_TTFT["quantile"]),
        View("split", "Queue and prefill", "Mean time in queue and in prefill", _ENGINE_TTFT["phase"]),
        View("reuse", "By cache use", "TTFT by cache use", _TTFT["reuse"]),
        View("plain", "Not streamed", "Latency of responses that are not streamed", FIGURES["latency"]["plain"]),
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
        View("", "Tiers", "Hit rate by cache tier", _HIT_RATE["tier"]),
        View("source", "Prompt tokens", "Prompt tokens by source", FIGURES["prompt_share"]["source"]),
        View("media", "Multimodal", "Hit rate of the multimodal cache", FIGURES["mm_hit_rate"]["pools"]),
        View("blocks", "KV blocks", "Lifetime of KV blocks", FIGURES["block_time"]["phase"]),
        View("evictions", "Evictions", "Evicted KV blocks per minute", FIGURES["sampled_evictions"]["replica"]),
        View("churn", "Churn", "KV cache turnovers per hour", FIGURES["cache_churn"]["replica"]),
    ),
    "Each cache tier's share of the queried tokens of engines that report tiers, stacked; the rest up to 100 % was "
    "computed. Routing mostly affects the device tier. Prompt tokens: computed, cached or transferred, when the first "
    "token came. Multimodal: cached items / queried items. KV blocks and evictions: of blocks that vLLM samples with "
    "--kv-cache-metrics (1 % unless --kv-cache-metrics-sample is set); every reuse of a block's memory counts. Churn: "
    "how often per hour new tokens (computed, transferred, generated) would fill the cache. A full cache evicts about "
    "as much, other caches less.",
)
_OBJECTIVES = {"0.5": "500 ms", "0.25": "250 ms", "1": "1 s", "2.5": "2.5 s"}
OBJECTIVE = Chart(
    "objective",
    "within",
    tuple(
        View(key, label, f"First token within {label}", FIGURES["within"][key]) for key, label in _OBJECTIVES.items()
    ),
    "Share of streamed responses whose first token came in time; of all requests by the engines' clock.",
)
UTILIZATION = Chart(
    "utilization",
    "util",
    (
        View("kv_usage", "KV usage", "KV usage", FIGURES["kv_usage"]["replica"], spread=True),
        View("kv_replica", "KV usage by replica", "KV usage by replica", FIGURES["kv_usage"]["replica"]),
        View("running", "Running", "Running requests", FIGURES["running"]["replica"]),
        View("waiting", "Waiting", "Waiting requests", FIGURES["waiting"]["replica"]),
        View("reason", "Waiting by reason", "Waiting requests by reason", FIGURES["waiting"]["reason"]),
        View("preemptions", "Preempted", "Preemptions per second", FIGURES["preemptions"]["replica"]),
    ),
    "KV usage is the share of KV blocks that running requests use; unused cached blocks do not count. Waiting by "
    "reason: capacity, or deferred by a temporary constraint such as a LoRA limit or a KV transfer.",
)
REQUESTS = Chart(
    "requests",
    "req",
    (
        View("", "Outcomes", "Requests per second by outcome", FIGURES["outcomes"]["outcome"]),
        View("placed", "Replicas", "Share of requests by replica", FIGURES["request_share"]["replica"]),
        View(
            "objectives", "Objectives", "Requests that kept their TTFT objective", FIGURES["objectives_kept"]["group"]
        ),
    ),
    "Counted by the routers. Objectives: of requests with an objective for TTFT, those whose first token came in time; "
    "a request that was shed, or failed, missed it.",
)
CHARTS = {chart.slug: chart for chart in (HIT_RATE, TTFT, TIERS, OBJECTIVE, UTILIZATION, REQUESTS)}

_FORMATS: Mapping[str, Callable[[float | None], str]] = {"ratio": percent, "seconds": seconds, "count": count}
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
    named = ", ".join(f"{label} {figure_text(value, view.figure.unit)}" for label, value in values[:NAMED_LINES])
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
    if view.figure.empty and PointState.STALE not in states:
        return view.figure.empty
    for state in (PointState.STALE, PointState.NO_TRAFFIC, PointState.NOT_REPORTED):
        if state in states:
            return absence(state)
    return "not scraped yet"
