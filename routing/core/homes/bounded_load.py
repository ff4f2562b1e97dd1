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

    __slots__ = ("_loads", "_min_bound", "_per_weight", "_weights")

    def __init__(self, candidates: Candidates, load_factor: float, min_bound: int) -> None:
        self._loads = candidates.loads
        self._weights = candidates.weights
        self._min_bound = min_bound
        self._per_weight = load_factor * (candidates.order.running + 1) / candidates.weight

    def at(self, target: TargetId) -> bool:
        """Whether a candidate has room."""
        running = self._loads[target].running
        return running < self._min_bound or running < self._per_weight * self._weights[target]

    def bound(self, target: TargetId) -> int:
        """Requests that a candidate may hold, this one included."""
        return max(self._min_bound, math.ceil(self._per_weight * self._weights[target]))


def bounded_choice(
    home_order: Iterable[TargetId], candidates: Candidates, load_factor: float, min_bound: int
) -> Choice:
    """The first home with room; ``home_order`` may name replicas that are no candidates."""
    loads, weights, all_weights = candidates.loads, candidates.weights, candidates.weight
    requests = load_factor * (candidates.order.running + 1)
    refused: list[TargetId] = []
    for target in home_order:
        load = loads.get(target)
        if load is None:
            continue
        share = requests * weights[target] / all_weights
        if load.running < share or load.running < min_bound:  # running + 1 <= max(min_bound, ceil(share))
            reason = Reason.SPILL if refused else Reason.AFFINITY
            return Choice(target, reason, tuple(refused), max(min_bound, math.ceil(share)))
        refused.append(target)
    return Choice(candidates.order.least_loaded(), Reason.ALL_FULL, tuple(refused))
