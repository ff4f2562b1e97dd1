"""What weights come to on a hash ring, so that whoever reads a configuration can say which keys a change moves.

The ring itself is the router's (``routing.balancing.hash_ring``): it puts a replica's first ``points_of`` points on the
circle. So a replica that joins, leaves or changes its weight adds or takes away points of its own and no others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

POINTS = 160  # of a replica of weight 1: shares of the circle differ by 1/sqrt(160), 8 %
MAX_ON_RING = 1 << 16  # replicas, each rank counted: a point of a ring says in so few bits whose it is
MAX_WEIGHT = 8.0  # the greatest weight that is taken as it is; see _unit

NameT = TypeVar("NameT", bound=str)


def points_of(weights: Mapping[NameT, float]) -> dict[NameT, int]:
    """How many points each owns, by its weight (relative capacity, > 0)."""
    unit = _unit(max(weights.values(), default=1.0))
    return {name: max(1, round(POINTS * weight / unit)) for name, weight in weights.items()}


def moved_ratio(before: Mapping[NameT, int], after: Mapping[NameT, int]) -> float | None:
    """The part of all keys whose home changes between two sets of points, 0 to 1; None where there is no home.

    The first point behind a key, among those of either ring, is in both rings, and the home stays; or it is in one
    alone, and the other ring's home is somebody's by its share, perhaps the same one's.
    """
    owned, owns = sum(before.values()), sum(after.values())
    if not owned or not owns:
        return None
    names = before.keys() | after.keys()
    either = sum(max(before.get(name, 0), after.get(name, 0)) for name in names)
    return sum(_moved(before.get(name, 0), after.get(name, 0), owned, owns) for name in names) / either


def moved_by_chance(points: Mapping[NameT, int]) -> float:
    """The part of keys that get another home when every key is hashed anew, 0 to 1."""
    total = sum(points.values())
    return 1.0 - sum((mine / total) ** 2 for mine in points.values()) if total else 0.0


def _moved(before: int, after: int, owned: int, owns: int) -> float:
    """Points of one replica that are in one ring alone, each by the chance that the key ends elsewhere."""
    return (before - after) * (1 - after / owns) if before > after else (after - before) * (1 - before / owned)


def _unit(greatest: float) -> float:
    """The weight that owns ``POINTS`` points: 1, unless a ring would become too large or too coarse.

    Where the greatest weight lies outside 0.5 to 8 it is the power of two that brings it there. Only a replica
    whose weight crosses such a step moves the keys of others.
    """
    if greatest > MAX_WEIGHT:
        return float(2 ** math.ceil(math.log2(greatest / MAX_WEIGHT)))
    return float(2 ** math.ceil(math.log2(greatest))) if greatest <= 0.5 else 1.0
