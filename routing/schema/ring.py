"""How many points each replica owns on a hash ring, and which share of keys a change of weights or members moves.

The ring itself is in ``routing.balancing.hash_ring``, which places a replica's first ``points_of`` points. So a replica
that joins, leaves or changes its weight adds or removes points of its own and no others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

POINTS = 160  # of a replica of weight 1: shares of the ring differ by 1/sqrt(160), 8 %
MAX_ON_RING = 1 << 16  # replicas, each rank counted: a point of a ring stores its owner in this many bits
MAX_WEIGHT = 8.0  # the greatest weight that is used unscaled; see _weight_unit

NameT = TypeVar("NameT", bound=str)


def points_of(weights: Mapping[NameT, float]) -> dict[NameT, int]:
    """Number of points of each replica, by its weight (relative capacity, > 0)."""
    unit = _weight_unit(max(weights.values(), default=1.0))
    return {name: max(1, round(POINTS * weight / unit)) for name, weight in weights.items()}


def moved_ratio(before: Mapping[NameT, int], after: Mapping[NameT, int]) -> float | None:
    """Share of all keys whose preferred replica changes between two sets of points, 0 to 1; None if a set is empty.

    The first point behind a key, among the points of both rings, is either in both rings, and the replica stays; or it
    is in one ring only, and the other ring's replica is random by share, possibly the same one.
    """
    total_before, total_after = sum(before.values()), sum(after.values())
    if not total_before or not total_after:
        return None
    names = before.keys() | after.keys()
    pairs = [(before.get(name, 0), after.get(name, 0)) for name in names]
    moved = sum(
        (old - new) * (1 - new / total_after) if old > new else (new - old) * (1 - old / total_before)
        for old, new in pairs
    )
    return moved / sum(max(old, new) for old, new in pairs)


def moved_by_chance(points: Mapping[NameT, int]) -> float:
    """Share of keys whose preferred replica changes when every key gets a new hash, 0 to 1."""
    total = sum(points.values())
    return 1.0 - sum((own / total) ** 2 for own in points.values()) if total else 0.0


def _weight_unit(max_weight: float) -> float:
    """The weight that owns ``POINTS`` points: 1, unless a ring would become too large or too coarse.

    If ``max_weight`` is outside 0.5 to 8, it is the power of two that brings it into that range. Only a replica
    whose weight crosses such a step moves the keys of others.
    """
    if max_weight > MAX_WEIGHT:
        return float(2 ** math.ceil(math.log2(max_weight / MAX_WEIGHT)))
    return float(2 ** math.ceil(math.log2(max_weight))) if max_weight <= 0.5 else 1.0
