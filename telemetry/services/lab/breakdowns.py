"""Hit-rate breakdowns of a time window, from stored five-minute bins, and whether prefix routing is worth it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from django.db.models import Max, Min, QuerySet, Sum
from msgspec import Meta

from controlplane.models import Pool, Replica, ReplicaState
from telemetry.lab.breakdown import BIN, Breakdown, bin_start, breakdown_from
from telemetry.lab.cache_grid import Placements, WorkingSet
from telemetry.lab.worth import Assessment, Caches, assess_caches, assess_routing
from telemetry.metrics.windows import Window
from telemetry.models import BreakdownBin, CapacityCurve
from telemetry.storage.reachable import BIN_SUMS, reachable_sums, sums_of


@dataclass(frozen=True, slots=True)
class GroupBreakdown:
    """The breakdown of one task group; "": requests without one."""

    group: str
    breakdown: Breakdown

    @property
    def reachable(self) -> float | None:
        return self.breakdown.ratio(self.breakdown.reachable)

    @property
    def delivered(self) -> float | None:
        return self.breakdown.ratio(self.breakdown.delivered)


def breakdown_of(pool: Pool, window: Window, group: str | None = None) -> Breakdown | None:
    """The breakdown of the bins that overlap the window; None without any. One query.

    ``group``: a task group, "" for requests without one, None for all. If cache sizes were unknown in one of the bins,
    the terms that need them are unknown.
    """
    return _breakdown(_bins(pool, window, group).aggregate(**_SUMS))


def breakdowns_by_group(pool: Pool, window: Window) -> list[GroupBreakdown]:
    """Breakdowns of all task groups with requests, most prompt tokens first. One query."""
    rows = _bins(pool, window).values("group").annotate(**_SUMS).order_by("-sum_prompt_tokens")
    breakdowns = ((row["group"], _breakdown(row)) for row in rows)
    return [GroupBreakdown(group, breakdown) for group, breakdown in breakdowns if breakdown is not None]


def breakdowns_by_pool(pools: Iterable[Pool], window: Window) -> dict[int, tuple[Breakdown, Window]]:
    """The breakdown of each pool with requests, and the time of its bins, by the pool's id. One query."""
    bins = BreakdownBin.objects.filter(pool__in=list(pools), at__gte=bin_start(window.start), at__lt=window.end)
    found = {}
    for row in bins.values("pool").annotate(**_SUMS):
        breakdown = _breakdown(row)
        if breakdown is not None:
            end = max(min(row["last"] + BIN, window.end), row["first"] + timedelta(seconds=1))
            found[row["pool"]] = breakdown, Window(row["first"], end, window.step_s)
    return found


def breakdowns_over_time(pool: Pool, window: Window, group: str | None = None) -> list[tuple[datetime, Breakdown]]:
    """The breakdown of each bin, ascending. One query."""
    rows = _bins(pool, window, group).values("at").annotate(**_SUMS).order_by("at")
    breakdowns = ((row["at"], _breakdown(row)) for row in rows)
    return [(at, breakdown) for at, breakdown in breakdowns if breakdown is not None]


def curve_of(pool: Pool) -> CapacityCurve | None:
    """The pool's hit rate by cache size; None until first computed. One query."""
    return CapacityCurve.objects.filter(pool=pool).first()


@dataclass(frozen=True, slots=True)
class Worth:
    """Whether prefix routing is worth it for a pool, by the traffic of all its task groups, and how caches fit it."""

    routing: Assessment
    caches: Assessment
    placements: Placements | None
    working_set: WorkingSet | None
    replicas: Annotated[int, Meta(description="caches: replicas, or their data-parallel ranks")]
    replica_tokens: Annotated[int | None, Meta(description="cache size of each, on average")]


def worth_of(pool: Pool, window: Window, curve: CapacityCurve | None) -> Worth:
    """The verdicts of a pool: reachable hit rate of the window, placements of the curve's hour. Two queries."""
    replicas = Replica.objects.filter(pool=pool).exclude(state=ReplicaState.DISABLED)
    figures = Caches(
        replicas=replicas.aggregate(ranks=Sum("data_parallel_size"))["ranks"] or 0,
        reason=curve.reason if curve else "The replay of the last hour has not run yet; it runs every ten minutes.",
    )
    if curve is not None and curve.points:
        placements, working_set = curve.placements, curve.working_set
        figures = Caches(
            placements and Placements(**placements),
            working_set and WorkingSet(**working_set),
            curve.replicas,
            curve.cache_tokens,
        )
    routing = assess_routing(reachable_sums([pool.name], window), figures)
    caches = figures.placements, figures.working_set, figures.replicas, figures.replica_tokens
    return Worth(routing, assess_caches(figures), *caches)


_SUMS = {**BIN_SUMS, "ratio": Min("sample_ratio"), "any_reason": Max("reason")}


def _bins(pool: Pool, window: Window, group: str | None = None) -> QuerySet[BreakdownBin]:
    bins = BreakdownBin.objects.filter(pool=pool, at__gte=bin_start(window.start), at__lt=window.end)
    return bins if group is None else bins.filter(group=group)


def _breakdown(row: dict[str, object]) -> Breakdown | None:
    if not row["sum_requests"]:
        return None
    return breakdown_from(sums_of(row), sample_ratio=float(row["ratio"]), reason=str(row["any_reason"]))  # type: ignore[arg-type]
