"""The semantic cache of a task group at each router, as of the last scrape: state, and precision by threshold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from django.utils import timezone
from msgspec import Meta

from controlplane.models import TaskGroup
from routing.schema import wilson_interval
from telemetry.services.figures.kv_streams import (
    UNKNOWN,
    StateAdvice,
    advice_on,
    reported_by_routers,
    scrape_problem,
    worst_state,
)

BY_SEVERITY = ("stopped", "collecting", "shadow", "serving")
TONES = {"serving": "good", "shadow": "", "collecting": "warn", "stopped": "bad"}
NOT_REPORTED = "The router does not report this cache. It has not received this configuration yet: see Routers."
FIGURES = ("recent_precision", "lower_bound", "window_checks", "entries")


@dataclass(frozen=True, slots=True)
class RouterRow:
    """The cache at one router. None: not reported. Figures are of the caller with the lowest precision."""

    router: str
    state: Annotated[str, Meta(description=f"{', '.join(BY_SEVERITY)} or unknown: the worst of callers and processes")]
    is_partly: Annotated[bool, Meta(description="others of them are in another state")] = False
    recent_precision: float | None = None
    lower_bound: Annotated[float | None, Meta(description="of the precision, 95 %")] = None
    window_checks: float | None = None
    entries: float | None = None
    reason: Annotated[str, Meta(description="why it is unknown")] = ""

    @property
    def tone(self) -> str:
        return TONES.get(self.state, "")


@dataclass(frozen=True, slots=True)
class PrecisionPoint:
    """The checks of requests with at least this similarity."""

    threshold: float
    checks: int
    wrong: int
    precision: float
    interval: Annotated[tuple[float, ...], Meta(description="of the precision, 95 %: low, high")]


@dataclass(frozen=True, slots=True)
class SemanticCacheFigures:
    """The cache at all routers. ``settings``: as configured (``routing.schema.SemanticCache``)."""

    settings: Mapping[str, Any]
    routers: list[RouterRow]
    points: list[PrecisionPoint]  # ascending; only those with checks
    advice: list[StateAdvice]  # on the states of the rows, the worst first

    @property
    def at_threshold(self) -> PrecisionPoint | None:
        """The checks at or above the configured threshold; None without any."""
        least = round(self.settings["threshold"], 2)
        return next((point for point in self.points if point.threshold >= least), None)


def semantic_cache_of(group: TaskGroup | None, pool: str) -> SemanticCacheFigures | None:
    """A group's cache at each connected router; None if it has none. One query."""
    if group is None or group.semantic_cache is None:
        return None
    routers = reported_by_routers("semantic_caches", pool, group.name)
    rows = [_row(router) for router in routers]
    points = precision_points(router["reported"] for router in routers if router["reported"])
    advice = advice_on(rows, _texts(group.semantic_cache), BY_SEVERITY, TONES)
    return SemanticCacheFigures(group.semantic_cache, rows, points, list(advice))


def precision_points(caches: Iterable[Mapping[str, Any]]) -> list[PrecisionPoint]:
    """Checks at or above each similarity. Routers with a store report the checks of all of them, others their own."""
    own: Counter[tuple[str, str]] = Counter()
    shared: Counter[tuple[str, str]] = Counter()
    for cache in caches:
        if cache.get("shared_checks"):
            shared |= _counts(cache["shared_checks"])
        else:
            own += _counts(cache.get("checks", {}))
    checks, wrong, points = 0, 0, list[PrecisionPoint]()
    total = own + shared
    for similarity in sorted({similarity for similarity, _ in total}, key=float, reverse=True):
        checks += total[similarity, "right"] + total[similarity, "wrong"]
        wrong += total[similarity, "wrong"]
        interval = wilson_interval(checks - wrong, checks)
        points.append(PrecisionPoint(float(similarity), checks, wrong, 1 - wrong / checks, interval))
    return points[::-1]


def _counts(checks: Mapping[str, Mapping[str, int]]) -> Counter[tuple[str, str]]:
    return Counter(
        {
            (similarity, result): number
            for similarity, results in checks.items()
            if similarity.replace(".", "", 1).isdecimal()
            for result, number in results.items()
        }
    )


def _row(router: Mapping[str, Any]) -> RouterRow:
    reason = scrape_problem(router, timezone.now())
    cache = None if reason else router["reported"]
    state, is_partly = worst_state(cache, BY_SEVERITY)
    if cache is None or state is None:
        return RouterRow(router["name"], UNKNOWN, reason=reason or NOT_REPORTED)
    figures: dict[str, Any] = {name: cache.get(name) for name in FIGURES}
    return RouterRow(router["name"], state, is_partly=is_partly, **figures)


def _texts(settings: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The meaning of each state, and what to do."""
    checks, limit = settings["min_checks"], f"{100 * settings['min_precision']:g} %"
    return {
        "stopped": (
            f"The precision of the last {checks} checks of a caller is below {limit}. It gets no stored response of a "
            "similar request until its checks are good again.",
            "Raise the threshold to one with enough precision in the chart. If the engines load other weights or "
            "another chat template, change the version of the response cache.",
        ),
        "collecting": (
            f"Some callers are not served yet: each needs {checks} checks of its own requests at or above the "
            f"threshold, and a lower bound of their precision of at least {limit}.",
            "Wait for more similar requests, or choose a threshold whose interval in the chart lies above the limit.",
        ),
        "shadow": (
            "Similar requests are found and their responses compared; none is served.",
            "Set the mode to serve once the precision at the threshold is good enough.",
        ),
        "serving": (
            "Similar requests get the stored response. "
            f"{100 * settings['check_rate']:g} % of the requests are answered by a replica and compared.",
            "",
        ),
    }
