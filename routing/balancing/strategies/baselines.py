"""Each replica in turn.

Theory of operation. A replica's next turn comes 1/weight after its last, and the earliest turn goes next (stride
scheduling), which for equal weights is plain rotation. A counter modulo the number of candidates would favour some
whenever that number changes. A replica that joins or comes back starts at the present turn: it makes up for nothing.
Source: Waldspurger and Weihl, "Stride Scheduling", 1995.

Any replica, by chance.

The replica with the least outstanding work.

Of two replicas drawn by chance the one with less outstanding work.

Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.balancing.candidates import Candidates, work_of
from routing.balancing.replicas import GroupReplicas
from routing.balancing.strategies.strategy import Keys
from routing.schema import LeastLoadSettings, PowerOfTwoSettings, RandomSettings, RoundRobinSettings
from routing.types import Choice, Reason, TargetId


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


@dataclass(frozen=True, slots=True)
class Random:
    """Draw among the candidates, each as likely as its weight says."""

    rng: random.Random

    @classmethod
    def build(cls, _settings: RandomSettings, _replicas: GroupReplicas, seed: int) -> Random:
        """The strategy for one group."""
        return cls(random.Random(seed))  # noqa: S311 - no secret

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """Whoever is drawn."""
        return Choice(candidates.drawn(self.rng.random()).target, Reason.RANDOM)


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Send each request to where the least work waits."""

    @classmethod
    def build(cls, _settings: LeastLoadSettings, _replicas: GroupReplicas, _seed: int) -> LeastLoad:
        """The strategy for one group."""
        return cls()

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """The least loaded candidate."""
        return Choice(candidates.order.least_loaded(), Reason.LEAST_LOAD)


AGAIN: Final = 4  # draws of a second one, while it is the first


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Draw two, and take the one with less work; of equal ones the first."""

    rng: random.Random

    @classmethod
    def build(cls, _settings: PowerOfTwoSettings, _replicas: GroupReplicas, seed: int) -> PowerOfTwo:
        """The strategy for one group."""
        return cls(random.Random(seed))  # noqa: S311 - no secret

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """The less loaded one of two, which are the same where one has nearly all weight."""
        draw = self.rng.random
        one = other = candidates.drawn(draw())
        for _ in range(AGAIN):
            other = candidates.drawn(draw())
            if other is not one:
                break
        return Choice((other if work_of(other) < work_of(one) else one).target, Reason.LESS_OF_TWO)
