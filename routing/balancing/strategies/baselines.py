"""Strategies without cache affinity: round robin, random, least load, and the power of two choices.

Round robin is stride scheduling: a replica's next turn comes 1/weight after its last, and the earliest turn is next,
which for equal weights is plain rotation. A counter modulo the number of candidates would favour some replicas whenever
that number changes. A replica that joins or returns starts at the current turn and does not catch up. Source:
Waldspurger and Weihl, "Stride Scheduling", 1995.

The power of two choices is from Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from heapq import heapify, heapreplace
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.balancing.candidates import Candidates, Choice, work_of
from routing.balancing.strategies.strategy import Keys, Strategy
from routing.types import Reason, TargetId


class RoundRobin(Strategy):
    """Sends requests to all candidates in turn."""

    def __init__(self, seed: int = 0, names: Collection[TargetId] = ()) -> None:
        self._seed = seed
        self._names = names  # all configured targets
        self._candidates: Candidates | None = None
        self._turns: list[tuple[float, int, TargetId]] = []  # heap of (next turn, order of the last turn, target)
        self._last_turns: dict[TargetId, tuple[float, int]] = {}  # the same by target, including unavailable ones
        self._count = 0

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """The next replica in turn."""
        if candidates is not self._candidates:
            self._set_candidates(candidates)
        turn, _, target = self._turns[0]
        self._count += 1
        next_turn = (turn + 1.0 / candidates.weights[target], self._count)
        self._last_turns[target] = next_turn
        heapreplace(self._turns, (*next_turn, target))
        return Choice(target, Reason.ROUND_ROBIN)

    def choose_fallback(self, _keys: Keys, candidates: Candidates) -> Choice:
        """The least loaded replica."""
        return Choice(candidates.order.least_loaded(), Reason.ROUND_ROBIN)

    def carry_over(self, before: RoundRobin) -> None:
        """Continue with the turns of targets that are still configured."""
        self._turns, self._count = before._turns, before._count
        self._last_turns = {name: turn for name, turn in before._last_turns.items() if name in self._names}

    def _set_candidates(self, candidates: Candidates) -> None:
        """Build the heap for other candidates. O(replicas)."""
        now = self._turns[0][0] if self._turns else 0.0
        for name in sorted(candidates, key=lambda name: xxh3_64_intdigest(name.encode(), self._seed)):
            self._count += 1
            turn, order = self._last_turns.get(name, (now, self._count))
            self._last_turns[name] = (max(turn, now), order)
        self._turns = [(*self._last_turns[name], name) for name in candidates]
        heapify(self._turns)
        self._candidates = candidates


class Random(Strategy):
    """Draws one of the candidates, with probabilities by weight."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """A random candidate."""
        return Choice(candidates.draw(self._rng.random()).target, Reason.RANDOM)


class LeastLoad(Strategy):
    """Sends each request to the replica with the least outstanding work."""

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """The least loaded candidate."""
        return Choice(candidates.order.least_loaded(), Reason.LEAST_LOAD)


SECOND_DRAWS: Final = 4  # attempts to draw a second candidate that differs from the first


class PowerOfTwo(Strategy):
    """Draws two candidates and takes the one with less work; the first if they are equal."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, _keys: Keys, candidates: Candidates) -> Choice:
        """The less loaded of two candidates, which may be the same if one has nearly all weight."""
        draw = self._rng.random
        first = second = candidates.draw(draw())
        for _ in range(SECOND_DRAWS):
            second = candidates.draw(draw())
            if second is not first:
                break
        return Choice((second if work_of(second) < work_of(first) else first).target, Reason.LESS_OF_TWO)
