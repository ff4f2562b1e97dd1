"""The reachable share: how much of its prompts' tokens a pool or task group could have reused.

The one definition for pages, charts, alerts, messages, REST and ``/metrics``: the ladder's term W, reuse with one
unbounded cache (``telemetry/lab/README.md``), over the ladder's five-minute bins. It is unknown (None) until the bins
hold ``MIN_REQUESTS`` requests and its standard error is at most ``MOST_STANDARD_ERROR``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, Max, Min, QuerySet, Sum

from telemetry.lab.ladder import ADDED, BIN, MIN_REQUESTS, Sums, bin_start, reachable_error
from telemetry.metrics.windows import Window
from telemetry.models import LadderBin

SHORTEST = timedelta(minutes=30)  # a shorter window is extended backwards to this: its newest bins are incomplete
MOST_STANDARD_ERROR = 0.05  # of the ratio, 0 to 1


@dataclass(frozen=True, slots=True)
class ReachableShare:
    """Reachable tokens of prompts / all tokens of the same prompts, with what it rests on."""

    ratio: float  # 0 to 1
    standard_error: float  # of ``ratio``: of block sampling and of the number of requests
    requests: int
    start: datetime  # of the first bin
    end: datetime  # of the last bin, or of the window
    delivered_ratio: float | None  # cached tokens that responses reported, in the same bins; None: none reported any

    @property
    def delivered_of_reachable(self) -> float | None:
        """Delivered / reachable, 0 and more; None where one of them is unknown or nothing is reachable."""
        return self.delivered_ratio / self.ratio if self.delivered_ratio is not None and self.ratio else None

    def as_json(self) -> dict[str, Any]:
        """As REST and messages show it."""
        return {
            "ratio": self.ratio,
            "standard_error": self.standard_error,
            "requests": self.requests,
            "from": self.start.isoformat(),
            "to": self.end.isoformat(),
            "delivered_ratio": self.delivered_ratio,
        }


def reachable_share(pools: Sequence[str] | None, window: Window, *, group: str | None = None) -> ReachableShare | None:
    """Of some pools together (None: all), or of one task group ("": requests of none). One query."""
    row = _bins(pools, window, group).aggregate(**_SUMS)
    return _share(row, window)


def reachable_by_group(pools: Sequence[str] | None, window: Window) -> dict[tuple[str, str], ReachableShare]:
    """Of each task group of which it is known, by (pool, group). One query."""
    rows = _bins(pools, window, None).values(name=F("pool__name"), of_group=F("group")).annotate(**_SUMS)
    found = {(row["name"], row["of_group"]): _share(row, window) for row in rows}
    return {key: share for key, share in found.items() if share is not None}


def reachable_by_pool(pools: Sequence[str] | None, window: Window) -> dict[str, ReachableShare]:
    """Of each pool of which it is known. One query."""
    rows = _bins(pools, window, None).values(name=F("pool__name")).annotate(**_SUMS)
    found = {row["name"]: _share(row, window) for row in rows}
    return {name: share for name, share in found.items() if share is not None}


def reachable_over_time(
    pools: Sequence[str] | None, window: Window, *, group: str | None = None
) -> dict[datetime, ReachableShare]:
    """For each step of a window, by its start, from the bins of ``SHORTEST`` or the step before its end. One query."""
    rows = _bins(pools, window, group).values("at").annotate(**_SUMS).order_by("at")
    return _over_time(list(rows), window)


def reachable_over_time_by(
    pools: Sequence[str] | None, window: Window, *, by: str
) -> dict[str, dict[datetime, ReachableShare]]:
    """The same for each ``pool``, or each ``group`` as POOL/GROUP. One query."""
    keys = {"name": F("pool__name")} | ({"of_group": F("group")} if by == "group" else {})
    rows = _bins(pools, window, None).values("at", **keys).annotate(**_SUMS).order_by("at")
    of_key: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        of_key["/".join(filter(None, (row["name"], row.get("of_group"))))].append(row)
    return {key: _over_time(listed, window) for key, listed in sorted(of_key.items())}


_SUMS = {f"sum_{name}": Sum(name) for name in ADDED} | {"first": Min("at"), "last": Max("at")}


def _bins(pools: Sequence[str] | None, window: Window, group: str | None) -> QuerySet[LadderBin]:
    start = min(window.start, window.end - SHORTEST)
    bins = LadderBin.objects.filter(at__gte=bin_start(start), at__lt=window.end)
    if pools is not None:
        bins = bins.filter(pool__name__in=pools)
    return bins if group is None else bins.filter(group=group)


def _over_time(rows: Sequence[Mapping[str, Any]], window: Window) -> dict[datetime, ReachableShare]:
    starts = [row["at"] for row in rows]
    step = timedelta(seconds=window.step_s)
    reach = max(step, SHORTEST)
    found: dict[datetime, ReachableShare] = {}
    for start in window.starts():
        end = min(start + step, window.end)
        some = rows[bisect_left(starts, bin_start(end - reach)) : bisect_left(starts, end)]
        if share := _share(_together(some), Window(end - reach, end, window.step_s)):
            found[start] = share
    return found


def _together(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    summed = {f"sum_{name}": _total(row[f"sum_{name}"] for row in rows) for name in ADDED}
    return {**summed, "first": rows[0]["first"], "last": rows[-1]["last"]} if rows else summed


def _total(values: Iterable[float | None]) -> float:
    return sum(value or 0 for value in values)


def _share(row: Mapping[str, Any], window: Window) -> ReachableShare | None:
    """None where the bins hold too little to say it."""
    if not row["sum_requests"] or row["sum_requests"] < MIN_REQUESTS or not row["sum_prompt_tokens"]:
        return None
    sums = Sums(**{name: row[f"sum_{name}"] for name in ADDED})
    error = reachable_error(sums)
    if error is None or error > MOST_STANDARD_ERROR:
        return None
    return ReachableShare(
        ratio=min(max(sums.reachable / sums.prompt_tokens, 0.0), 1.0),
        standard_error=error,
        requests=sums.requests,
        start=row["first"],
        end=min(row["last"] + BIN, window.end),
        delivered_ratio=sums.delivered / sums.reported_tokens if sums.reported_tokens else None,
    )
