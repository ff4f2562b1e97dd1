"""Caches of blocks, least recently used first out, as engines keep them.

Theory of operation. A prompt's blocks are used tail first, so that its head is always the more recent one and goes
last: what is held of a prompt is an opening of it, as with vLLM's block pool. So how much of a chain is held is found
by bisection. All blocks of a request are used at one tick; a cache remembers the latest tick of each block, and the
chains in the order of their ticks. To drop the least recent blocks is to go through the oldest chain from its tail for
as long as its blocks were not used since. A chain whose last block was used since has nothing left to drop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappush, heapreplace
from typing import NamedTuple

SPARE = 1024  # chains that may have nothing left to drop, beyond as many as there are blocks


class Use(NamedTuple):
    """A chain that is used, by one request."""

    chain: Sequence[int]
    tick: int  # later ones are larger
    ticks: Mapping[int, int]  # that tick, by block


def use(chain: Sequence[int], tick: int) -> Use:
    """A chain used at a tick."""
    return Use(chain, tick, dict.fromkeys(chain, tick))


def held_of(chain: Sequence[int], held: Mapping[int, int]) -> int:
    """How many blocks of a chain are in there, which are an opening of it."""
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high) // 2
        if chain[middle] in held:
            low = middle + 1
        else:
            high = middle
    return low


class Seen:
    """A cache that never forgets what was used within the last one or two spans of time."""

    __slots__ = ("_span_s", "lately", "of_old", "since_s")

    def __init__(self, span_s: float) -> None:
        self.lately: dict[int, int] = {}
        self.of_old: dict[int, int] = {}
        self._span_s = span_s
        self.since_s: float | None = None  # when ``lately`` began

    def __len__(self) -> int:
        return len(self.lately) + len(self.of_old)

    def use(self, used: Use, now_s: float) -> int:
        """How many blocks of the chain were seen; now all are."""
        if self.since_s is None or now_s >= self.since_s + self._span_s:
            self.lately, self.of_old, self.since_s = {}, self.lately, now_s
        matched = max(held_of(used.chain, self.lately), held_of(used.chain, self.of_old))
        self.lately.update(used.ticks)
        return matched

    def remember(self, lately: Iterable[int], of_old: Iterable[int], since_s: float | None) -> None:
        """Go on with these, the first of them used since then."""
        self.lately, self.of_old = dict.fromkeys(lately, 0), dict.fromkeys(of_old, 0)
        self.since_s = since_s

    def keep_below(self, below: int) -> None:
        """Forget all blocks whose hash is not below."""
        self.lately = _below(self.lately, below)
        self.of_old = _below(self.of_old, below)


class Cache:
    """One cache with room for so many blocks."""

    __slots__ = ("_chains", "room", "ticks")

    def __init__(self, room: int) -> None:
        self.room = room
        self.ticks: dict[int, int] = {}  # by block that it holds: when it was last used
        self._chains: deque[tuple[int, Sequence[int]]] = deque()

    def __len__(self) -> int:
        return len(self.ticks)

    def __iter__(self) -> Iterator[int]:
        """What it holds, the least recent first."""
        for tick, chain in self._chains:
            for block in reversed(chain):
                if self.ticks.get(block) != tick:
                    break
                yield block

    def match(self, chain: Sequence[int]) -> int:
        """How many blocks of the chain it holds."""
        return held_of(chain, self.ticks)

    def use(self, used: Use) -> list[int]:
        """It holds the chain now, as far as there is room; what was dropped for it."""
        ticks, chains = self.ticks, self._chains
        ticks.update(used.ticks)
        chains.append((used.tick, used.chain))
        if len(chains) > len(ticks) + SPARE:
            self._chains = deque(one for one in chains if ticks.get(one[1][-1]) == one[0])
        return self.shrink() if len(ticks) > self.room else []

    def shrink(self) -> list[int]:
        """Drop what there is no room for."""
        ticks, chains, dropped = self.ticks, self._chains, []
        excess = len(ticks) - self.room
        while excess > 0:
            tick, chain = chains[0]
            end = len(chain)
            while end and excess > 0 and ticks.get(chain[end - 1]) == tick:
                end -= 1
                excess -= 1
                del ticks[chain[end]]
                dropped.append(chain[end])
            if end and excess <= 0:
                chains[0] = (tick, chain[:end])
            else:
                chains.popleft()
        return dropped

    def keep_below(self, below: int) -> None:
        """Forget all blocks whose hash is not below."""
        self.remember([block for block in self if block < below])

    def remember(self, blocks: Iterable[int]) -> None:
        """Hold these instead, the least recent first, all used before any tick to come."""
        held = list(blocks)
        self.ticks = {block: tick for tick, block in enumerate(held, -len(held))}
        self._chains = deque((tick, (block,)) for block, tick in self.ticks.items())


class Match(NamedTuple):
    """Whoever holds the longest opening of a chain."""

    best: int  # blocks that the one with most holds
    chosen: int  # that the one asked about holds
    holders: int  # mask of those with most


class Replicas:
    """A cache for each replica, and who holds which block."""

    __slots__ = ("_holders", "_least", "_written", "caches", "places")

    def __init__(self) -> None:
        self.places: dict[str, int] = {}  # numbers, by name
        self.caches: list[Cache] = []
        self._holders: dict[int, int] = {}  # block -> mask of the replicas that hold it
        self._written: list[float] = []  # of each, how often its room was filled
        self._least: list[tuple[float, int]] = []  # a heap of the same, some of it old

    def set_room(self, name: str, room: int) -> None:
        """A replica has this much room; one that is new begins empty."""
        place = self.places.setdefault(name, len(self.places))
        if place == len(self.caches):
            self.caches.append(Cache(room))
            self._written.append(min(self._written, default=0.0))
            heappush(self._least, (self._written[place], place))
        self.caches[place].room = room
        self._let_go(place, self.caches[place].shrink())

    def match(self, chain: Sequence[int], place: int) -> Match:
        """How much of a chain the best one holds, and the one with this number."""
        best = held_of(chain, self._holders)
        holders = self._holders[chain[best - 1]] if best else 0
        chosen = best if holders >> place & 1 else self.caches[place].match(chain[:best])
        return Match(best, chosen, holders)

    def use(self, place: int, used: Use, matched: int) -> None:
        """A replica computes a chain of which it held so much: it holds it now, as far as there is room."""
        holders, bit, cache = self._holders, 1 << place, self.caches[place]
        fresh = used.chain[matched:] if matched else used.chain
        for block in fresh:
            holders[block] = holders.get(block, 0) | bit
        self._written[place] += len(fresh) / cache.room
        dropped = cache.use(used)
        if dropped:
            self._let_go(place, dropped)

    def least_written(self) -> int:
        """Whose room was filled least often: what it drops next was not used for longest."""
        least, written = self._least, self._written
        while least[0][0] != written[least[0][1]]:
            place = least[0][1]
            heapreplace(least, (written[place], place))
        return least[0][1]

    def keep_below(self, below: int) -> None:
        """Forget all blocks whose hash is not below."""
        for cache in self.caches:
            cache.keep_below(below)
        self._holders = _below(self._holders, below)

    def remember(self, name: str, blocks: Iterable[int]) -> None:
        """Fill an empty replica's cache, the least recent block first."""
        place = self.places[name]
        self.caches[place].remember(blocks)
        for block in self.caches[place].ticks:
            self._holders[block] = self._holders.get(block, 0) | 1 << place

    def _let_go(self, place: int, dropped: Iterable[int]) -> None:
        holders, bit = self._holders, 1 << place
        for block in dropped:
            left = holders.pop(block, 0) & ~bit
            if left:
                holders[block] = left


def _below(held: Mapping[int, int], below: int) -> dict[int, int]:
    return {block: value for block, value in held.items() if block < below}
