"""The charts there are: what each shows, by which query, in which unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from django.http import QueryDict

from telemetry.metrics.windows import Series, Window
from telemetry.services import series
from telemetry.services.overview import Pools

Query = Callable[[Pools, Window], list[Series]]


@dataclass(frozen=True, slots=True)
class View:
    """One way to draw a chart, chosen by its switch."""

    key: str
    label: str
    title: str
    unit: str  # "ratio", "seconds" or "count": how the axis and the sentence are written
    query: Query
    noun: str = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with its views; the first is the default. ``param`` of the URL picks another."""

    slug: str
    param: str
    views: tuple[View, ...]
    about: str

    def view(self, params: QueryDict) -> View:
        """The view that a URL asks for."""
        asked = params.get(self.param, "")
        return next((view for view in self.views if view.key == asked), self.views[0])


HIT_RATE = Chart(
    "hit-rate",
    "by",
    (
        View("replica", "Replica", "Hit rate by replica", "ratio", series.hit_rate_by_replica, "replica"),
        View("group", "Task group", "Hit rate by task group", "ratio", series.hit_rate_by_group, "task group"),
        View("pool", "Pool", "Hit rate by pool", "ratio", series.hit_rate_by_pool, "pool"),
    ),
    "Cached tokens over queried tokens. Replicas and pools by the engines' counters, task groups by what "
    "answers reported.",
)
TTFT = Chart(
    "ttft",
    "clock",
    (
        View("", "Router clock", "Time to first token", "seconds", series.ttft_quantiles),
        View(
            "engine",
            "Engine clock",
            "Time to first token, engines' clock",
            "seconds",
            lambda pools, window: series.ttft_quantiles(pools, window, source="engine"),
        ),
    ),
    "From a request's arrival to its first token: p50 and p95 of all requests together. The band is the "
    "histogram bucket that holds the value.",
)
UTILIZATION = Chart(
    "utilization",
    "util",
    (
        View("kv_usage", "KV usage", "KV usage by replica", "ratio", series.utilization_by_replica, "replica"),
        View(
            "running",
            "Running",
            "Running requests by replica",
            "count",
            lambda pools, window: series.utilization_by_replica(pools, window, what="running"),
            "replica",
        ),
        View(
            "waiting",
            "Waiting",
            "Waiting requests by replica",
            "count",
            lambda pools, window: series.utilization_by_replica(pools, window, what="waiting"),
            "replica",
        ),
    ),
    "KV usage is the share of KV blocks that running requests hold; warm blocks that nobody uses do not count.",
)
CHARTS = {chart.slug: chart for chart in (HIT_RATE, TTFT, UTILIZATION)}
