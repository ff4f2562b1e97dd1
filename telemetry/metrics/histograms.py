"""Histograms as differences of buckets, merged by addition, read as quantiles with their error.

Edges are whatever a text has: vLLM's own (T2) or those that its operator chose (T3); the router's are known (T8).

Theory of operation. A scrape's cumulative ``le`` counts become ``Buckets``: counts per bucket, sparse, by position.
Position ``i`` is the bucket that ends at ``edges[i]``; position ``len(edges)`` is the one above the last edge. Buckets
subtract (a later scrape minus an earlier one), add (over time, replicas and routers: T4), and give a quantile together
with the bucket it lies in, because inside a bucket any answer is a guess (T5).

Cumulative counters of one source, and what was added between two looks at them.

Theory of operation. A ``Mark`` is everything that one source (an engine of a replica, or one label set of a router)
had counted at one moment. All counters of a source live and die together, so they share an epoch: when its process
says it is another one, or when ANY of its counters has fallen, a new epoch starts for all of them (H8). Within an
epoch the addition is the difference; in a new epoch it is the whole count, since the source began at 0.
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
    """Cumulative counts that are no histogram."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Observations per bucket. ``counts`` maps a bucket's position to a count above 0."""

    edges: tuple[float, ...]  # upper edges, ascending, the infinite one left out
    counts: Mapping[int, int] = field(default_factory=dict)
    sum: float | None = None  # of the observations, in the unit of the edges

    @property
    def total(self) -> int:
        """How many observations."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile, and the bucket that holds it."""

    value: float
    low: float
    high: float  # math.inf in the top bucket
    at_least: bool = False  # True: it lies above the last finite edge, and ``value`` is that edge (T7)


@dataclass(frozen=True, slots=True)
class Merged:
    """Several histograms as one. ``exact`` is False where edges differed and only common ones were kept (T3)."""

    buckets: Buckets
    exact: bool = True


def from_cumulative(lines: Iterable[tuple[float, float]], total_sum: float | None = None) -> Buckets:
    """Buckets of dense ``(le, cumulative count)`` pairs; counts that fall are raised to the one before (T7)."""
    pairs = sorted(lines)
    if not pairs or pairs[-1][0] != math.inf:
        raise HistogramError("a histogram ends with le=+Inf")
    edges = tuple(edge for edge, _ in pairs[:-1])
    if len(set(edges)) != len(edges):
        raise HistogramError("an edge is given twice")
    return Buckets(edges, _differences((index, count) for index, (_, count) in enumerate(pairs)), total_sum)


def from_sparse(lines: Iterable[tuple[float, float]], total_sum: float | None = None) -> Buckets:
    """Buckets of the router's histogram, which names only the edges of buckets that hold something."""
    pairs = sorted(lines)
    if not pairs or pairs[-1][0] != math.inf:
        raise HistogramError("a histogram ends with le=+Inf")
    return Buckets(ROUTER_EDGES, _differences((_router_position(edge), count) for edge, count in pairs), total_sum)


def _router_position(edge: float) -> int:
    if edge == math.inf:
        return len(ROUTER_EDGES)
    position = bisect.bisect_left(ROUTER_EDGES, edge * (1 - 1e-4))
    if position == len(ROUTER_EDGES) or not math.isclose(ROUTER_EDGES[position], edge, rel_tol=1e-4):
        raise HistogramError(f"le={edge:g} is no edge of the router's histogram")
    return position


def _differences(cumulative: Iterable[tuple[int, float]]) -> dict[int, int]:
    counts: dict[int, int] = {}
    reached = 0
    for position, count in cumulative:
        if not (math.isfinite(count) and count >= 0):
            raise HistogramError("a bucket's count is no number of observations")
        if count > reached:
            counts[position] = round(count) - reached
            reached = round(count)
    return {position: count for position, count in counts.items() if count}


def subtract(later: Buckets, earlier: Buckets) -> Buckets | None:
    """What was observed in between; None where the edges differ. A torn scrape's negative bucket is none (T7)."""
    if later.edges != earlier.edges:
        return None
    counts = {position: count - earlier.counts.get(position, 0) for position, count in later.counts.items()}
    added = None if later.sum is None or earlier.sum is None else max(later.sum - earlier.sum, 0.0)
    return Buckets(later.edges, {position: count for position, count in counts.items() if count > 0}, added)


def merge(parts: Sequence[Buckets]) -> Merged | None:
    """Add histograms up (T4). Different edges: on the edges that all share, marked as inexact (T3); None for none."""
    if not parts:
        return None
    layouts = {part.edges for part in parts}
    if len(layouts) == 1:
        return Merged(_added(parts, parts[0].edges))
    common = tuple(sorted(set.intersection(*(set(edges) for edges in layouts))))
    return Merged(_added([_coarsened(part, common) for part in parts], common), exact=False)


def _added(parts: Sequence[Buckets], edges: tuple[float, ...]) -> Buckets:
    counts: Counter[int] = Counter()
    for part in parts:
        counts.update(part.counts)
    sums = [part.sum for part in parts if part.sum is not None]
    return Buckets(edges, dict(counts), sum(sums) if len(sums) == len(parts) else None)


def _coarsened(part: Buckets, common: tuple[float, ...]) -> Buckets:
    """The same observations on fewer edges: a bucket goes whole into the wider one that contains it."""
    counts: Counter[int] = Counter()
    for position, count in part.counts.items():
        inside = position < len(part.edges)
        counts[bisect.bisect_left(common, part.edges[position]) if inside else len(common)] += count
    return Buckets(common, dict(counts), part.sum)


def quantile(buckets: Buckets, q: float) -> Quantile | None:
    """The ``q`` quantile (0 to 1), interpolated linearly in its bucket; None for no observations."""
    if not 0 <= q <= 1:
        raise ValueError("a quantile is asked for with 0 <= q <= 1")
    rank = q * buckets.total
    below = 0
    for position in sorted(buckets.counts):
        count = buckets.counts[position]
        if below + count >= rank:
            return _within(buckets.edges, position, (rank - below) / count)
        below += count
    return None


def _within(edges: tuple[float, ...], position: int, share: float) -> Quantile | None:
    low = edges[position - 1] if position else 0.0
    if position == len(edges):
        return Quantile(low, low, math.inf, at_least=True)
    high = edges[position]
    return Quantile(low + (high - low) * share, low, high)


def share_at_most(buckets: Buckets, edge: float) -> float | None:
    """Observations at or below an edge / all: exact, unlike a quantile (T6). None where it is no edge, or for none."""
    if edge not in buckets.edges or not buckets.counts:
        return None
    last = buckets.edges.index(edge)
    return sum(count for position, count in buckets.counts.items() if position <= last) / buckets.total


CLOCK_SLACK_S = 1.0  # a start time is derived from a boot time that may wobble


@dataclass(frozen=True, slots=True)
class Mark:
    """What a source had counted when it was scraped. A counter it does not have is absent, not 0."""

    at_s: float  # Unix time at which the scrape was due
    taken_s: float  # Unix time at which the answer came
    counters: Mapping[str, float]
    histograms: Mapping[str, Buckets] = field(default_factory=dict)
    started_s: float | None = None  # process_start_time_seconds; absent behind several API servers (H9)
    created_s: float | None = None  # when the counters were created; likewise
    boot: str | None = None  # a router's own name for one life of its process


def is_new_epoch(before: Mark, now: Mark) -> bool:
    """Whether the source began to count anew in between."""
    return (
        _moved(before.started_s, now.started_s)
        or _moved(before.created_s, now.created_s)
        or (before.boot is not None and now.boot is not None and before.boot != now.boot)
        or any(now.counters[name] < value for name, value in before.counters.items() if name in now.counters)
        or any(
            _fell(value, now.histograms[name]) for name, value in before.histograms.items() if name in now.histograms
        )
    )


def _moved(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and abs(now - before) > CLOCK_SLACK_S


def _fell(before: Buckets, now: Buckets) -> bool:
    return before.edges != now.edges or now.total < before.total  # edges are chosen at start (T3)


def added_counters(before: Mark, now: Mark, *, absent_is_zero: bool) -> dict[str, float]:
    """What was counted within one epoch. A counter that was absent before is unknown, unless absence means 0."""
    return {
        name: value - before.counters.get(name, 0.0)
        for name, value in now.counters.items()
        if absent_is_zero or name in before.counters
    }


def added_buckets(before: Mark, now: Mark, *, absent_is_zero: bool) -> dict[str, Buckets]:
    """What histograms observed within one epoch, by the same rule."""
    added: dict[str, Buckets] = {}
    for name, later in now.histograms.items():
        earlier = before.histograms.get(name)
        if earlier is None and absent_is_zero:
            added[name] = later
        elif earlier is not None and (difference := subtract(later, earlier)) is not None:
            added[name] = difference
    return added
