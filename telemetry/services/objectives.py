"""What share of requests got its first token in time: exact at a histogram's edge, unlike a quantile (T6)."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from telemetry.metrics.histograms import Buckets, share_at_most
from telemetry.metrics.windows import Window
from telemetry.services.overview import Pools, names_of, replicas_of
from telemetry.storage import sums


@dataclass(frozen=True, slots=True)
class Share:
    """Requests within a time / all. The true share lies between the two ratios, which are exact at their edges.

    At an edge both are the same. Beyond the last edge nothing is known: ``high_ratio`` is 1 there.
    """

    low_ratio: float  # within the greatest edge that is not above the time: what may be promised
    high_ratio: float  # within the least edge that is not below it
    low_edge_s: float | None  # None: the time lies below the first edge
    high_edge_s: float | None  # None: it lies beyond the last
    requests: int
    clock: str  # "router" or "engine" (T1)
    is_exact: bool  # False where replicas with different edges were merged on the common ones (T3)


def share_within(pools: Pools, window: Window, seconds: float, *, clock: str | None = None) -> Share | None:
    """Of TTFT over a window; None where nothing was observed.

    By the routers' clock, or by the engines' where no router observed anything; ``clock`` asks for one of them.
    """
    if seconds <= 0:
        raise ValueError("a time to be within is above 0 s")
    merged = None
    if clock != "engine":
        merged = sums.remerged(sums.router_ttft(names_of(pools), window, whole=True).values())
    if merged is None and clock != "router":
        ids = [replica.pk for replica in replicas_of(pools)]
        merged, clock = sums.remerged(sums.engine_ttft(ids, window, whole=True).values()), "engine"
    if merged is None or not merged.buckets.total:
        return None
    return _share(merged.buckets, seconds, clock or "router", exact=merged.exact)


def _share(buckets: Buckets, seconds: float, clock: str, *, exact: bool) -> Share:
    below = bisect.bisect_right(buckets.edges, seconds * (1 + 1e-9))
    low = buckets.edges[below - 1] if below else None
    is_edge = low is not None and abs(low - seconds) <= 1e-9 * seconds
    high = low if is_edge else next(iter(buckets.edges[below : below + 1]), None)
    return Share(
        low_ratio=0.0 if low is None else share_at_most(buckets, low) or 0.0,
        high_ratio=1.0 if high is None else share_at_most(buckets, high) or 0.0,
        low_edge_s=low,
        high_edge_s=high,
        requests=buckets.total,
        clock=clock,
        is_exact=exact,
    )
