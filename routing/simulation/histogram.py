"""A histogram as Prometheus counts one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts by bucket. ``buckets[i]`` counts values <= ``edges[i]`` and above the edge before; the last is +Inf."""

    __slots__ = ("buckets", "count", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(float(edge) for edge in edges)
        self.buckets = [0] * (len(self.edges) + 1)
        self.count = 0
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self.buckets[bisect_left(self.edges, value)] += times
        self.count += times
        self.total += value * times
