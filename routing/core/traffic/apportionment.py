"""How many replicas each of several shares of the traffic gets, and which ones.

Theory of operation. How many: a share of all requests asks for as large a part of the replicas, and what it has
changes only where it asks for clearly more or less, because every change makes somebody cold. Which ones: everybody
has a home order, and in turn picks the first replica there that fewest others have picked, until it has as many as it
gets. So the replicas of one are disjoint from those of others as long as there are enough for all. A number stands for
as much of all weight: who has that sooner stops, and who has the number without it takes what nobody has. Who gets one
more picks it last, so its others stay; who gets one less loses what it picked last. Who has no more than that has
picked before and loses nothing to who grows; those who have more exchange a quarter of a replica on average, all
together. All follows from the numbers and the names alone, so routers that see the same shares agree.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from routing.core.types import NameT

# Most of a fraction is rounded off, for what is shared hits, and the others are most of the prefill.
GAIN: Final = 0.75  # replicas that a share must be above its number to gain one
LOSE: Final = 0.5  # replicas that it must be below its number to lose one
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
    home_orders: Mapping[K, Sequence[NameT]],
    weights: Mapping[NameT, float],
    owners: Mapping[NameT, int],
) -> dict[K, list[NameT]]:
    """Who gets which replicas, each in the order of picking; a size counts replicas of mean weight.

    ``owners`` counts who has a replica before anybody picks; those with fewer are picked first. O(keys * replicas).
    """
    mean = sum(weights.values()) / max(1, len(weights))
    enough = {key: size * mean * (1 - 1e-9) for key, size in sizes.items()}
    counts = {replica: owners.get(replica, 0) for replica in weights}
    picks = {key: _Picks(home_orders[key], counts, weights) for key, size in sizes.items() if size}
    hungry = list(picks)
    while hungry:
        for key in hungry:
            picks[key].pick()
        left = {key: min(sizes[key], len(weights)) - len(picks[key].chosen) for key in hungry}
        hungry = [key for key in hungry if picks[key].held < enough[key] and left[key]]
    hungry = [key for key, mine in picks.items() if mine.held < enough[key]]  # light ones; what nobody has is for them
    while hungry:
        hungry = [key for key in hungry if picks[key].pick(free=True) and picks[key].held < enough[key]]
    return {key: list(mine.chosen) for key, mine in picks.items()}


class _Picks(Generic[NameT]):
    """What one has picked."""

    __slots__ = ("_at", "_counts", "_level", "_order", "_weights", "chosen", "held")

    def __init__(self, order: Sequence[NameT], counts: dict[NameT, int], weights: Mapping[NameT, float]) -> None:
        self.chosen: dict[NameT, None] = {}  # in the order of picking
        self.held = 0.0  # weight
        self._order = order
        self._weights = weights
        self._counts = counts
        self._level = 0  # owners of what is looked for; they only become more, so nobody looks back
        self._at = 0

    def pick(self, *, free: bool = False) -> bool:
        """Take the first in order of those with the fewest owners that are not mine; there is one.

        ``free``: that nobody owns; whether there was one.
        """
        while not (free and self._level):
            while self._at < len(self._order):
                replica = self._order[self._at]
                self._at += 1
                if self._counts[replica] <= self._level and replica not in self.chosen:
                    self._counts[replica] += 1
                    self.chosen[replica] = None
                    self.held += self._weights[replica]
                    return True
            self._at, self._level = 0, self._level + 1
        return False
