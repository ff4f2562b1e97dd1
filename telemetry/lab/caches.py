"""Caches of blocks, least recently used first out, as engines keep them.

Theory of operation. A prompt's blocks are used tail first, so that its head is always the more recent one and goes
last: what is held of a prompt is an opening of it, as with vLLM's block pool. Of the blocks whose last use was one
request, later requests with the same opening take over blocks from the front, and what there is no room for goes from
the back: they are always one **run** of that request's chain. A cache is its runs in the order of their use, and finds
them by their first block. To use a chain is to follow it from run to run, of which it takes over what it shares; that
costs as much as there are places where prompts part, however long they are. To make room is to cut the oldest run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from heapq import heappush, heapreplace
from typing import Any

SPARE = 1024  # runs that may be empty, beyond as many as there are blocks
Run = list[Any]  # [a chain, start, end]: its blocks from start to before end; a list, because there are very many


def held_of(chain: Sequence[int], held: Container[int], low: int, high: int) -> int:
    """How many blocks of a chain are in there, which are an opening of it; at least ``low``, at most ``high``."""
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
        self.lately: set[int] = set()
        self.of_old: set[int] = set()
        self._span_s = span_s
        self.since_s: float | None = None  # when ``lately`` began

    def __len__(self) -> int:
        return len(self.lately) + len(self.of_old)

    def use(self, chain: Sequence[int], now_s: float, low: int) -> int:
        """How many blocks of the chain were seen, which were ``low`` at least; now all are."""
        if self.since_s is None or now_s >= self.since_s + self._span_s:
            self.lately, self.of_old, self.since_s = set(), self.lately, now_s
        length = len(chain)
        seen = lately = held_of(chain, self.lately, 0 if self.of_old else low, length)
        if self.of_old:
            seen = held_of(chain, self.of_old, low, length)
        if lately < length:
            self.lately.update(chain[lately:])
        return max(seen, lately)

    def remember(self, lately: Iterable[int], of_old: Iterable[int], since_s: float | None) -> None:
        """Go on with these, the first of them used since then."""
        self.lately, self.of_old = set(lately), set(of_old)
        self.since_s = since_s

    def keep_below(self, below: int) -> None:
        """Forget all blocks whose hash is not below."""
        self.lately = {block for block in self.lately if block < below}
        self.of_old = {block for block in self.of_old if block < below}


def _parting(chain: Sequence[int], at: int, blocks: Sequence[int], start: int, count: int) -> int:
    """How many of the first ``count`` blocks there are the same, which the first ones are and the last one is not."""
    low, high = 1, count - 1
    while low < high:
        middle = (low + high) // 2
        if chain[at + middle] == blocks[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low


class Cache:
    """One cache with room for so many blocks."""

    __slots__ = ("_first", "_runs", "_size", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        self._size = 0
        self._runs: deque[Run] = deque()  # the least recent first; some are empty by now
        self._first: dict[int, Run] = {}  # those that are not, by their first block

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """What it holds, the least recent first."""
        for blocks in self.runs():
            yield from reversed(blocks)

    def use(self, chain: Sequence[int]) -> tuple[int, list[int]]:
        """It holds the chain now, as far as there is room. (Blocks that it held before, what it dropped)."""
        first, held, length = self._first, 0, len(chain)
        run = first.pop(chain[0], None)
        while run is not None:
            blocks, start, end = run
            count = min(length - held, end - start)
            if chain[held + count - 1] != blocks[start + count - 1]:
                count = _parting(chain, held, blocks, start, count)
            held += count
            start = run[1] = start + count
            if start < end:
                first[blocks[start]] = run
            run = first.pop(chain[held], None) if held < length else None
        first[chain[0]] = run = [chain, 0, length]
        self._runs.append(run)
        self._size += length - held
        if len(self._runs) > self._size + SPARE:
            self._runs = deque(run for run in self._runs if run[1] < run[2])
        return held, self.shrink() if self._size > self.room else []

    def shrink(self) -> list[int]:
        """Drop what there is no room for; what was dropped."""
        dropped: list[int] = []
        first, runs, excess = self._first, self._runs, self._size - self.room
        while excess > 0:
            blocks, start, end = run = runs[0]
            kept = max(start, end - excess)
            if kept < end:
                dropped += blocks[kept:end]
                excess -= end - kept
                run[2] = kept
            if kept == start:
                runs.popleft()
                if start < end and first.get(blocks[start]) is run:
                    del first[blocks[start]]
        self._size -= len(dropped)
        return dropped

    def runs(self) -> Iterator[Sequence[int]]:
        """What it holds, as ``remember`` takes it."""
        return (blocks[start:end] for blocks, start, end in self._runs if start < end)

    def remember(self, runs: Iterable[Sequence[int]]) -> None:
        """Hold these instead: openings of chains, or what follows one, the least recent first."""
        self._runs = deque([blocks, 0, len(blocks)] for blocks in runs)
        self._first = {run[0][0]: run for run in self._runs}
        self._size = sum(run[2] for run in self._runs)

    def keep_below(self, below: int) -> None:
        """Forget all blocks whose hash is not below."""
        kept = ([block for block in blocks if block < below] for blocks in self.runs())
        self.remember([blocks for blocks in kept if blocks])


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

    def best(self, chain: Sequence[int], high: int) -> tuple[int, int]:
        """(blocks of a chain that the one with most holds, mask of those with most); at most ``high`` blocks."""
        best = held_of(chain, self._holders, 0, high)
        return best, self._holders[chain[best - 1]] if best else 0

    def use(self, place: int, chain: Sequence[int], low: int, high: int) -> tuple[int, int]:
        """A replica computes a chain: it holds it now, as far as there is room.

        (blocks that it held before, that the one with most held): of the latter ``low`` at least, ``high`` at most.
        """
        holders, bit, cache = self._holders, 1 << place, self.caches[place]
        held, dropped = cache.use(chain)
        best = held_of(chain, holders, max(low, held), high) if held < high else held
        if held < best:
            for block in chain[held:best]:
                holders[block] = holders.get(block, 0) | bit
        if best < len(chain):
            holders.update(dict.fromkeys(chain[best:], bit))
        self._written[place] += (len(chain) - held) / cache.room
        if dropped:
            self._let_go(place, dropped)
        return held, best

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
        self._holders = {block: holders for block, holders in self._holders.items() if block < below}

    def remember(self, name: str, runs: Iterable[Sequence[int]]) -> None:
        """Fill an empty replica's cache, with what ``Cache.runs`` told."""
        place = self.places[name]
        self.caches[place].remember(runs)
        for block in self.caches[place]:
            self._holders[block] = self._holders.get(block, 0) | 1 << place

    def _let_go(self, place: int, dropped: Iterable[int]) -> None:
        holders, bit = self._holders, 1 << place
        for block in dropped:
            left = holders.pop(block, 0) & ~bit
            if left:
                holders[block] = left
