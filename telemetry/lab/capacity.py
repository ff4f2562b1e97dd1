"""Hit rate against capacity: one replica's, of N replicas as placed, and of one shared cache of the same room.

Theory of operation. ALGORITHMS L. A cache of so much room that drops the least recently used block first holds exactly
the blocks used most recently, so a block is a hit in every cache that has room for the distinct blocks used since its
last use, itself included: its reuse distance (Mattson et al., 1970). One pass finds the distances for all capacities;
a Fenwick tree over the times of last use counts the later ones. Blocks are sampled by their hash, so distances are
divided by the sampled part (SHARDS). Of a prompt the blocks are used tail first, so distances grow along it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_TIMES = 1024
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the room that replicas have


class Fenwick:
    """Sums of prefixes of 0/1 at places from 1 on."""

    __slots__ = ("_tree", "total")

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)
        self.total = 0

    def add(self, place: int, value: int) -> None:
        """Change the value at a place."""
        tree, size = self._tree, len(self._tree)
        self.total += value
        while place < size:
            tree[place] += value
            place += place & -place

    def up_to(self, place: int) -> int:
        """Sum of the values at this place and before it."""
        tree, found = self._tree, 0
        while place:
            found += tree[place]
            place &= place - 1
        return found


class Distances:
    """How far back blocks are used again, in tokens that hang on it."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}  # of a block's last use
        self._tree = Fenwick(FIRST_TIMES)
        self._room = FIRST_TIMES
        self._now = 0
        self.tokens: dict[int, float] = defaultdict(float)  # by distance, in sampled blocks

    def __len__(self) -> int:
        return len(self._times)

    def use(self, chain: Sequence[int], gains: Sequence[float] | None, base: float = 0.0) -> None:
        """Use a chain; ``gains``: tokens that each block adds to a hit, where they are to be counted.

        ``base`` is what a hit of no sampled block comes to, on average.
        """
        times = self._times
        if gains is not None:
            self.tokens[0] += base
            total = self._tree.total
            for block, tokens in zip(chain, gains, strict=True):
                used = times.get(block)
                if used is None:
                    break
                self.tokens[total - self._tree.up_to(used - 1)] += tokens
        for block in reversed(chain):
            self._touch(block)

    def hits(self, room: float) -> float:
        """Tokens found by a cache of this many sampled blocks."""
        return sum(tokens for distance, tokens in self.tokens.items() if distance <= room)

    def _touch(self, block: int) -> None:
        if self._now == self._room:
            self._compact()
        self._now += 1
        before = self._times.get(block)
        if before is not None:
            self._tree.add(before, -1)
        self._times[block] = self._now
        self._tree.add(self._now, 1)

    def _compact(self) -> None:
        """Number the times of last use anew, without those that nobody has any more."""
        order = sorted(self._times, key=self._times.__getitem__)
        self._room = max(FIRST_TIMES, 2 * len(order))
        self._tree, self._now = Fenwick(self._room), len(order)
        for time, block in enumerate(order, 1):
            self._times[block] = time
            self._tree.add(time, 1)


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """Hit rates, 0 to 1, where each replica has ``multiple`` times the room that it has."""

    multiple: float
    one: float  # all traffic on one replica
    split: float  # each replica its own cache, requests placed as they were
    shared: float  # one cache of all replicas' room


class CapacityCurve:
    """Distances of one pool's requests, on all replicas together and on each."""

    def __init__(self) -> None:
        self._together = Distances()
        self._each: dict[str, Distances] = defaultdict(Distances)
        self.prompt_tokens = 0.0
        self.requests = 0

    def use(
        self,
        replica: str,
        chain: Sequence[int],
        gains: Sequence[float],
        prompt_tokens: float | None,
        base: float = 0.0,
    ) -> None:
        """Place a request; its tokens count where ``prompt_tokens`` are given: the first ones only warm the caches."""
        counted = None if prompt_tokens is None else gains
        self._together.use(chain, counted, base)
        self._each[replica].use(chain, counted, base)
        if prompt_tokens is not None:
            self.prompt_tokens += prompt_tokens
            self.requests += 1

    def points(self, rooms: Mapping[str, float]) -> list[CapacityPoint]:
        """At multiples of each replica's room, in sampled blocks; none without traffic or room."""
        if not rooms or not self.prompt_tokens:
            return []
        mean = sum(rooms.values()) / len(rooms)
        return [
            CapacityPoint(
                multiple,
                self._together.hits(multiple * mean) / self.prompt_tokens,
                sum(distances.hits(multiple * rooms.get(name, mean)) for name, distances in self._each.items())
                / self.prompt_tokens,
                self._together.hits(multiple * mean * len(rooms)) / self.prompt_tokens,
            )
            for multiple in MULTIPLES
        ]
