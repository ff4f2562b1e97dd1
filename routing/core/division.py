"""How many replicas each of several shares of the traffic gets, and which ones.

Theory of operation. How many: a share of all requests asks for as large a part of the replicas, and what it has changes
only where it asks for clearly more or less, because every change makes somebody cold. Which ones: everybody has a home
order, and in turn picks the first replica there that fewest others have picked, until it has as many as it gets. So
the replicas of one are disjoint from those of others as long as there are enough for all. Who gets one more picks it
last, so its others stay; who gets one less loses what it picked last. Who has no more than that has picked before and
loses nothing to who grows; those who have more exchange a quarter of a replica on average, all together. All follows
from the numbers and the names alone, so routers that see the same shares agree.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final, TypeVar

from routing.core.types import ReplicaId

GAIN: Final = 0.75  # replicas that a share must be above its number to gain one, so most of a fraction is rounded off:
LOSE: Final = 0.5  # what is shared hits, and the others are most of the prefill; and below its number, to lose one
FEW: Final = 0.1  # replicas' worth of traffic below which nobody needs any of its own

K = TypeVar("K", bound=Hashable)


def stepped(before: int, wanted: float) -> int:
    """How many replicas who had so many (0 for none) gets when its share is ``wanted`` replicas' worth; 1 at least."""
    if before and before - LOSE <= wanted < before + GAIN:
        return before
    return max(1, int(wanted + 1 - GAIN))


def trimmed(sizes: Mapping[K, int], floors: Mapping[K, int], replicas: int) -> dict[K, int]:
    """The sizes, taken from the largest until all fit, but from nobody below its floor, or below 1 where it has any."""
    fitting = dict(sizes)
    excess = sum(fitting.values()) - replicas
    while excess > 0:
        largest = max(
            (key for key in fitting if fitting[key] > max(1, floors.get(key, 0))), key=fitting.__getitem__, default=None
        )
        if largest is None:
            break
        fitting[largest] -= 1
        excess -= 1
    return fitting


def divided(
    sizes: Mapping[K, int],
    home_orders: Mapping[K, Sequence[ReplicaId]],
    weights: Mapping[ReplicaId, float],
    owners: Mapping[ReplicaId, int],
) -> dict[K, list[ReplicaId]]:
    """Who gets which replicas, each in the order of picking; a size counts replicas of mean weight.

    ``owners`` counts who has a replica before anybody picks; those with fewer are picked first. O(keys * replicas).
    """
    mean = sum(weights.values()) / max(1, len(weights))
    counts = {replica: owners.get(replica, 0) for replica in weights}
    picks = {key: _Picks(home_orders[key], counts) for key, size in sizes.items() if size}
    hungry = dict(picks)
    while hungry:
        for mine in hungry.values():
            mine.held += weights[mine.pick()]
        hungry = {
            key: mine
            for key, mine in hungry.items()
            if mine.held < sizes[key] * mean * (1 - 1e-9) and len(mine.chosen) < len(mine.order)
        }
    return {key: list(mine.chosen) for key, mine in picks.items()}


class _Picks:
    """What one has picked."""

    __slots__ = ("_at", "_counts", "_level", "chosen", "held", "order")

    def __init__(self, order: Sequence[ReplicaId], counts: dict[ReplicaId, int]) -> None:
        self.order = order
        self.chosen: dict[ReplicaId, None] = {}  # in the order of picking
        self.held = 0.0  # weight
        self._counts = counts
        self._level = 0  # owners of what is looked for; they only become more, so nobody looks back
        self._at = 0

    def pick(self) -> ReplicaId:
        """The first in order of those with the fewest owners that are not mine; there is one."""
        while True:
            while self._at < len(self.order):
                replica = self.order[self._at]
                self._at += 1
                if self._counts[replica] <= self._level and replica not in self.chosen:
                    self._counts[replica] += 1
                    self.chosen[replica] = None
                    return replica
            self._at, self._level = 0, self._level + 1
