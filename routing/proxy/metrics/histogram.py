"""Histograms of seconds: one with buckets that are 5 % wide, for quantiles, one with few that PromQL adds up.

A quantile read from the first is off by 2.5 % at most.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, compress
from typing import Final

EDGES: Final = [0.001 * 1.05**i for i in range(275)]  # seconds, 1 ms to 10.7 minutes; inclusive upper edges
_LABELS: Final = [repr(edge) for edge in EDGES]
PLAIN_EDGES: Final = EDGES[28::14]  # seconds, 4 ms to 7 minutes, each about twice the one before
# By the bucket among ``EDGES``.
_PLAIN_BUCKETS: Final = [bisect_left(PLAIN_EDGES, edge) for edge in (*EDGES, float("inf"))]


def bucket_of(seconds: float) -> int:
    """Number of the bucket that a value falls into: looked for once, for all histograms that it enters."""
    return bisect_left(EDGES, seconds)


class Histogram:
    """Counts per bucket, with the last one for what is longer than every edge."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * (len(EDGES) + 1)))
        self._sum = 0.0

    def observe(self, seconds: float, bucket: int | None = None) -> None:
        """Count one value; ``bucket`` is its ``bucket_of``, where that is known."""
        self._counts[bucket_of(seconds) if bucket is None else bucket] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Prometheus text; only buckets that hold something, cumulative as the format wants it."""
        counts, total, cumulative = self._counts[:], self._sum, 0  # of one moment
        for index in compress(range(len(EDGES)), counts):
            cumulative += counts[index]
            yield f'{name}_bucket{{{labels},le="{_LABELS[index]}"}} {cumulative}'
        cumulative += counts[-1]
        yield f'{name}_bucket{{{labels},le="+Inf"}} {cumulative}'
        yield f"{name}_sum{{{labels}}} {total!r}"
        yield f"{name}_count{{{labels}}} {cumulative}"


class PlainHistogram:
    """Few buckets that are all shown, as PromQL needs them: it adds series up by edge, so each must have every edge."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(PLAIN_EDGES) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, bucket: int | None = None) -> None:
        """Count one value; ``bucket`` is its ``bucket_of``, where that is known."""
        self._counts[_PLAIN_BUCKETS[bucket_of(seconds) if bucket is None else bucket]] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Prometheus text."""
        counts, total = self._counts[:], self._sum  # of one moment
        for edge, cumulative in zip(PLAIN_EDGES, accumulate(counts), strict=False):
            yield f'{name}_bucket{{{labels},le="{edge!r}"}} {cumulative}'
        yield f'{name}_bucket{{{labels},le="+Inf"}} {sum(counts)}'
        yield f"{name}_sum{{{labels}}} {total!r}"
        yield f"{name}_count{{{labels}}} {sum(counts)}"
