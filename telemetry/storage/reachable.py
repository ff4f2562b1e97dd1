"""The reachable share: the part of its prompts' tokens that a pool or task group could have reused.

Pages, charts, alerts, messages, REST and ``/metrics`` all use this definition: the first term of the hit-rate
breakdown, reuse with one unbounded cache (``telemetry/lab/README.md``), over the breakdown's five-minute bins. It is
unknown (None) until the bins have ``MIN_REQUESTS`` requests and its standard error is at most ``MAX_REACHABLE_ERROR``.
Functions run one query.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, Max, Min, QuerySet, Sum

from telemetry.lab.breakdown import BIN, MAX_REACHABLE_ERROR, MIN_REQUESTS, SUM_FIELDS, Sums, bin_start, reachable_error
from telemetry.metrics.windows import ReachableShare, Window
from telemetry.models import BreakdownBin

MIN_WINDOW = timedelta(minutes=30)  # shorter windows start earlier, because the newest bins are incomplete


def reachable_share(pools: Sequence[str] | None, window: Window, *, group: str | None = None) -> ReachableShare | None:
    """The share of some pools together (None: all), or of one task group ("": requests of no group)."""
    return _share(_bins(pools, window, group).aggregate(**BIN_SUMS), window)


def reachable_sums(pools: Sequence[str] | None, window: Window) -> Sums | None:
    """The sums that ``reachable_share`` is computed from, however few; None without requests."""
    row = _bins(pools, window, None).aggregate(**BIN_SUMS)
    return sums_of(row) if row["sum_requests"] else None


def reachable_by_group(pools: Sequence[str] | None, window: Window) -> dict[tuple[str, str], ReachableShare]:
    """The known shares of task groups, by (pool, group)."""
    rows = _bins(pools, window, None).values(name=F("pool__name"), of_group=F("group")).annotate(**BIN_SUMS)
    return {(row["name"], row["of_group"]): share for row in rows if (share := _share(row, window)) is not None}


def reachable_by_pool(pools: Sequence[str] | None, window: Window) -> dict[str, ReachableShare]:
    """The known shares of pools, by name."""
    rows = _bins(pools, window, None).values(name=F("pool__name")).annotate(**BIN_SUMS)
    return {row["name"]: share for row in rows if (share := _share(row, window)) is not None}


def reachable_over_time(
    pools: Sequence[str] | None, window: Window, *, group: str | None = None
) -> dict[datetime, ReachableShare]:
    """Reachable hit rate by start of step, over a trailing window: the step, or ``MIN_WINDOW`` if that is longer."""
    rows = _bins(pools, window, group).values("at").annotate(**BIN_SUMS).order_by("at")
    return _over_time(list(rows), window)


def reachable_over_time_by(
    pools: Sequence[str] | None, window: Window, *, by: str
) -> dict[str, dict[datetime, ReachableShare]]:
    """``reachable_over_time`` per ``pool``, or per ``group`` as POOL/GROUP."""
    keys = {"name": F("pool__name")} | ({"of_group": F("group")} if by == "group" else {})
    rows = _bins(pools, window, None).values("at", **keys).annotate(**BIN_SUMS).order_by("at")
    of_key: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        of_key["/".join(filter(None, (row["name"], row.get("of_group"))))].append(row)
    return {key: _over_time(listed, window) for key, listed in sorted(of_key.items())}


BIN_SUMS = {f"sum_{name}": Sum(name) for name in SUM_FIELDS} | {"first": Min("at"), "last": Max("at")}


def _bins(pools: Sequence[str] | None, window: Window, group: str | None) -> QuerySet[BreakdownBin]:
    start = min(window.start, window.end - MIN_WINDOW)
    bins = BreakdownBin.objects.filter(at__gte=bin_start(start), at__lt=window.end)
    if pools is not None:
        bins = bins.filter(pool__name__in=pools)
    return bins if group is None else bins.filter(group=group)


def _over_time(rows: Sequence[Mapping[str, Any]], window: Window) -> dict[datetime, ReachableShare]:
    starts = [row["at"] for row in rows]
    step = timedelta(seconds=window.step_s)
    length = max(step, MIN_WINDOW)
    shares: dict[datetime, ReachableShare] = {}
    for start in window.starts():
        end = min(start + step, window.end)
        bins = rows[bisect_left(starts, bin_start(end - length)) : bisect_left(starts, end)]
        row: dict[str, Any] = {
            name: sum(row[name] or 0 for row in bins) for name in BIN_SUMS if name.startswith("sum_")
        }
        if bins:
            row |= {"first": bins[0]["first"], "last": bins[-1]["last"]}
        if share := _share(row, Window(end - length, end, window.step_s)):
            shares[start] = share
    return shares


def _share(row: Mapping[str, Any], window: Window) -> ReachableShare | None:
    """The share from sums of bins; None where they have too few requests."""
    if not row["sum_requests"] or row["sum_requests"] < MIN_REQUESTS or not row["sum_prompt_tokens"]:
        return None
    sums = sums_of(row)
    error = reachable_error(sums)
    if error is None or error > MAX_REACHABLE_ERROR:
        return None
    return ReachableShare(
        ratio=sums.reachable_ratio,
        standard_error=error,
        requests=sums.requests,
        start=row["first"],
        end=min(row["last"] + BIN, window.end),
        delivered_ratio=sums.delivered / sums.reported_tokens if sums.reported_tokens else None,
    )


def sums_of(row: Mapping[str, Any]) -> Sums:
    return Sums(**{name: row[f"sum_{name}"] for name in SUM_FIELDS})
