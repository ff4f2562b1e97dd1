"""Each replica in turn.

Theory of operation. A replica's next turn comes 1/weight after its last, and the earliest turn goes next (stride
scheduling), which for equal weights is plain rotation. A counter modulo the number of candidates would favour some
whenever that number changes. A replica that joins or comes back starts at the present turn: it makes up for nothing.
Source: Waldspurger and Weihl, "Stride Scheduling", 1995.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heapreplace

from xxhash import xxh3_64_intdigest

from routing.core.group_replicas import GroupReplicas
from routing.core.loads.candidates import Candidates
from routing.core.types import Choice, Reason, TargetId
from routing.schema import RoundRobinSettings
from routing.strategies.strategy import Keys


class RoundRobin:
    """Give the candidates their turns."""

    def __init__(self, seed: int = 0, names: Collection[TargetId] = ()) -> None:
        self._seed = seed
        self._names = names  # all that are configured
        self._candidates: Candidates | None = None
        self._turns: list[tuple[float, int, TargetId]] = []  # heap of (turn, order of the last one, replica)
        self._known: dict[TargetId, tuple[float, int]] = {}  # the same by replica, also of those that are away
        self._count = 0

    @classmethod
    def build(cls, _settings: RoundRobinSettings, replicas: GroupReplicas, seed: int) -> RoundRobin:
        """The strategy for one group."""
        return cls(seed, replicas.targets.keys())

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """The replica whose turn it is."""
        if candidates is not self._candidates:
            self._line_up(candidates)
        turn, _, target = self._turns[0]
        place = (turn + 1.0 / candidates.weights[target], self._next_place())
        self._known[target] = place
        heapreplace(self._turns, (*place, target))
        return Choice(target, Reason.ROUND_ROBIN)

    def carry_over(self, before: RoundRobin) -> None:
        """Go on with whose turn it was, of those who are still configured."""
        self._turns, self._count = before._turns, before._count
        self._known = {name: place for name, place in before._known.items() if name in self._names}

    def _next_place(self) -> int:
        self._count += 1
        return self._count

    def _line_up(self, candidates: Candidates) -> None:
        """Enter the turns of another set of candidates. O(replicas)."""
        now = self._turns[0][0] if self._turns else 0.0
        for name in sorted(candidates, key=lambda name: xxh3_64_intdigest(name.encode(), self._seed)):
            turn, order = self._known.get(name, (now, self._next_place()))
            self._known[name] = (max(turn, now), order)
        self._turns = [(*self._known[name], name) for name in candidates]
        heapify(self._turns)
        self._candidates = candidates
