"""Bounded load: keep to the home order, but never push a replica past its share.

Theory of operation. A replica has room while it holds fewer than ``load_factor`` times its share, by weight, of all
requests that the candidates would hold with this one, or fewer than ``min_bound``. The first in home order that has
room gets the request, so a hot key spills to the same second and third home every time, and those become warm too.
Somebody always has room, for the shares of all add up to at least all requests.
Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from routing.core.loads.candidates import Candidates
from routing.core.types import Choice, Reason, TargetId


class Room:
    """Who has room for one more request, by the loads of this moment."""

    __slots__ = ("_all_weights", "_loads", "_min_bound", "_requests", "_weights")

    def __init__(self, candidates: Candidates, load_factor: float, min_bound: int) -> None:
        self._loads = candidates.loads
        self._weights = candidates.weights
        self._all_weights = candidates.weight
        self._requests = load_factor * (candidates.order.running + 1)
        self._min_bound = min_bound

    def at(self, target: TargetId) -> bool:
        """Whether a candidate has room: with this request it holds no more than ``bound``."""
        running = self._loads[target].running
        return running < self._min_bound or running < self._share(target)

    def bound(self, target: TargetId) -> int:
        """Requests that a candidate may hold, this one included."""
        return max(self._min_bound, math.ceil(self._share(target)))

    def _share(self, target: TargetId) -> float:
        return self._requests * self._weights[target] / self._all_weights


def bounded_choice(
    home_order: Iterable[TargetId], candidates: Candidates, load_factor: float, min_bound: int
) -> Choice:
    """The first home with room; ``home_order`` may name replicas that are no candidates.

    Of an order that leaves candidates out, where nobody has room, the least loaded of all.
    """
    room = Room(candidates, load_factor, min_bound)
    refused: list[TargetId] = []
    for target in home_order:
        if target not in candidates.loads:
            continue
        if room.at(target):
            return Choice(target, Reason.SPILL if refused else Reason.AFFINITY, tuple(refused), room.bound(target))
        refused.append(target)
    return Choice(candidates.order.least_loaded(), Reason.SPILL, tuple(refused))
