"""Histogram arithmetic: subtract two scrapes, merge histograms by addition, compute quantiles with their error.

Theory of operation. The cumulative ``le`` counts of a scrape become ``Buckets``: counts per bucket, sparse, by
position. Position ``i`` is the bucket that ends at ``edges[i]``; position ``len(edges)`` is the one above the last
edge. Edges are those of the exposition: vLLM's own (T2), those that its operator chose (T3), or the router's fixed ones
(T8). A quantile comes with the bucket that contains it, because its place inside the bucket is an interpolation (T5).
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

ROUTER_FIRST_EDGE_S = 0.001
ROUTER_GROWTH = 1.05  # 5 % a bucket: at most 2.5 % error (T8)
ROUTER_EDGES = tuple(ROUTER_FIRST_EDGE_S * ROUTER_GROWTH**index for index in range(275))


class HistogramError(ValueError):
    """Cumulative counts that form no histogram."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Observations per bucket. ``counts`` maps a bucket's position to a count above 0."""

    edges: tuple[float, ...]  # upper edges, ascending, the infinite one left out
    counts: Mapping[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile, and the bucket that holds it."""

    value: float
    low: float
    high: float  # math.inf in the top bucket
    at_least: bool = False  # it lies above the last finite edge, and ``value`` is that edge (T7)


@dataclass(frozen=True, slots=True)
class Merged:
    """The sum of several histograms. ``exact`` is False where edges differed and only common ones remain (T3)."""

    buckets: Buckets
    exact: bool = True


def from_cumulative(lines: Iterable[tuple[float, float]]) -> Buckets:
    """Buckets of dense ``(le, cumulative count)`` pairs; a decreasing count is raised to the previous one (T7)."""
    pairs = _sorted_pairs(lines)
    edges = tuple(edge for edge, _ in pairs[:-1])
    if len(set(edges)) != len(edges):
        raise HistogramError("two buckets have the same le")
    return Buckets(edges, _differences((index, count) for index, (_, count) in enumerate(pairs)))


def from_sparse(lines: Iterable[tuple[float, float]]) -> Buckets:
    """Buckets of the router's histogram, which has samples only for buckets with observations."""
    counts = _differences((_router_position(edge), count) for edge, count in _sorted_pairs(lines))
    return Buckets(ROUTER_EDGES, counts)


def _sorted_pairs(lines: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    pairs = sorted(lines)
    if not pairs or pairs[-1][0] != math.inf:
        raise HistogramError("a histogram needs a bucket with le=+Inf")
    return pairs


def _router_position(edge: float) -> int:
    if edge == math.inf:
        return len(ROUTER_EDGES)
    position = bisect.bisect_left(ROUTER_EDGES, edge * (1 - 1e-4))
    if position == len(ROUTER_EDGES) or not math.isclose(ROUTER_EDGES[position], edge, rel_tol=1e-4):
        raise HistogramError(f"le={edge:g} is not an edge of the router's histogram")
    return position


def _differences(cumulative: Iterable[tuple[int, float]]) -> dict[int, int]:
    counts: dict[int, int] = {}
    reached = 0
    for position, count in cumulative:
        if not (math.isfinite(count) and count >= 0):
            raise HistogramError("a bucket's count is negative or not finite")
        if count > reached:
            counts[position] = round(count) - reached
            reached = round(count)
    return {position: count for position, count in counts.items() if count}


def subtract(later: Buckets, earlier: Buckets) -> Buckets:
    """The observations between two scrapes with the same edges. A negative bucket of a torn scrape counts as 0 (T7)."""
    counts = {position: count - earlier.counts.get(position, 0) for position, count in later.counts.items()}
    return Buckets(later.edges, {position: count for position, count in counts.items() if count > 0})


def merge(parts: Sequence[Buckets]) -> Merged | None:
    """Add histograms up (T4); None for no parts. Different edges: on the common ones, marked as inexact (T3)."""
    if not parts:
        return None
    layouts = {part.edges for part in parts}
    if len(layouts) == 1:
        return Merged(_sum(parts, parts[0].edges))
    common = tuple(sorted(set.intersection(*(set(edges) for edges in layouts))))
    return Merged(_sum([_coarsen(part, common) for part in parts], common), exact=False)


def _sum(parts: Sequence[Buckets], edges: tuple[float, ...]) -> Buckets:
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update(part.counts)
    return Buckets(edges, dict(counts))


def _coarsen(part: Buckets, common: tuple[float, ...]) -> Buckets:
    """The same observations on fewer edges: each bucket is added to the wider one that contains it."""
    counts: Counter[int] = Counter()
    for position, count in part.counts.items():
        inside = position < len(part.edges)
        counts[bisect.bisect_left(common, part.edges[position]) if inside else len(common)] += count
    return Buckets(common, dict(counts))


def quantile(buckets: Buckets, q: float) -> Quantile | None:
    """The ``q`` quantile (0 to 1), interpolated linearly in its bucket; None for no observations."""
    if not 0 <= q <= 1:
        raise ValueError("expected 0 <= q <= 1")
    rank = q * buckets.total
    below = 0
    for position in sorted(buckets.counts):
        count = buckets.counts[position]
        if below + count >= rank:
            low = buckets.edges[position - 1] if position else 0.0
            if position == len(buckets.edges):
                return Quantile(low, low, math.inf, at_least=True)
            high = buckets.edges[position]
            return Quantile(low + (high - low) * (rank - below) / count, low, high)
        below += count
    return None


def share_at_most(buckets: Buckets, edge: float) -> float | None:
    """Observations at or below an edge / all: exact, unlike a quantile (T6). None for no edge or no observations."""
    if edge not in buckets.edges or not buckets.counts:
        return None
    last = buckets.edges.index(edge)
    return sum(count for position, count in buckets.counts.items() if position <= last) / buckets.total
