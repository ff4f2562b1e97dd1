"""What routers counted, step by step: requests, errors, tokens, and how long whole responses took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from datetime import datetime
from typing import Final

from telemetry.metrics.rates import total_known
from telemetry.metrics.windows import PointState, Series, Window
from telemetry.services.figures.overview import Pools, names_of
from telemetry.services.figures.series import NO_GROUP, Point, line_of, quantile_line, still_kept
from telemetry.storage import sums

QUANTILES: Final = (0.5, 0.95)
Steps = dict[datetime, list[sums.RouterSums]]
Value = Callable[[sums.RouterSums], int | None]

VALUES: Final[dict[str, Value]] = {
    "requests": lambda row: row.requests,
    "errors": lambda row: row.failed,
    "prompt_tokens": lambda row: row.prompt_tokens,
    "cached_tokens": lambda row: row.cached_tokens,
}


def by_group(pools: Pools, window: Window, what: str) -> list[Series]:
    """A line a task group: the sum of one of ``VALUES`` over each step.

    Tokens are those of responses that said how many were cached (H16).
    """
    several = pools is None or len(pools) > 1
    return _lines(pools, window, what, lambda row: _name(row, several=several))


def by_pool(pools: Pools, window: Window, what: str) -> list[Series]:
    """The same, a line a pool."""
    return _lines(pools, window, what, lambda row: row.pool)


def latency(pools: Pools, window: Window, *, streamed: bool) -> list[Series]:
    """p50 and p95 of seconds to the last byte of successful responses, by the routers' clock."""
    window = still_kept(window)
    merged = sums.merged_over_keys(sums.router_latency(names_of(pools), window, streamed=streamed))
    kind = "streamed" if streamed else "plain"
    return [quantile_line(f"p{q * 100:g} {kind} (router)", q, merged, window) for q in QUANTILES]


def _name(row: sums.RouterSums, *, several: bool) -> str:
    group = row.group or NO_GROUP
    return f"{row.pool}/{group}" if several else group


def _lines(pools: Pools, window: Window, what: str, key: Callable[[sums.RouterSums], Hashable]) -> list[Series]:
    window = still_kept(window)
    routed, coverage = sums.router_sums(names_of(pools), window)
    found: dict[str, Steps] = defaultdict(lambda: defaultdict(list))
    for row in routed:
        found[str(key(row))][row.start].append(row)
    quiet = {step.start: _quiet(step) for step in coverage}
    return [
        line_of(name, window, quiet | {start: _point(rows, VALUES[what]) for start, rows in steps.items()})
        for name, steps in sorted(found.items())
    ]


def _point(rows: Collection[sums.RouterSums], value: Value) -> Point:
    """Unknown where requests ended and none of them tells the figure."""
    known = total_known(map(value, rows))
    return (known, PointState.OK) if known is not None else (None, PointState.UNKNOWN)


def _quiet(step: sums.Coverage) -> Point:
    """0 where routers were read and counted nothing."""
    if step.covered_s > 0:
        return 0, PointState.OK
    return None, PointState.STALE if step.stale else PointState.UNKNOWN
