"""A replica's block cache that knows runs instead of blocks: the same hits and evictions as ``../blocks.py``.

Theory of operation. The blocks of a run are taken together and enter the free queue together, tail first, so in the
queue they are one segment, which eviction shortens from its tail. A run's blocks that are cached are therefore its
first ones, and a lookup ends at the first run that is not whole. What no other prompt can match, a run of one prompt
only and the generated blocks, enters the queue next to each other and is one segment too. The last block of a
request is never full (its last token's KV is not computed), so it caches nothing and goes to the head of the queue;
such blocks, and those never used, are only counted. A prompt of whole blocks recomputes its last block although it
may be cached: then the run, of that one block, has two segments; the older one is found until it is evicted.
``tests/routing/simulation/whatif/test_run_pool.py`` holds it against the pool of single blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from routing.simulation.whatif.forest import Run


class Segment:
    """The cached blocks of one run, or some that nobody can match."""

    __slots__ = ("blocks", "refs", "run")

    def __init__(self, run: Run | None, blocks: int) -> None:
        self.run = run
        self.blocks = blocks
        self.refs = 1  # running requests that hold it


class RunPool:
    """``capacity`` blocks, >= 1."""

    __slots__ = ("_blank", "_cached", "_duplicates", "_queue", "capacity", "evicted", "free")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a pool needs at least one block, not {capacity}")
        self.capacity = capacity
        self.free = capacity  # blocks that nobody holds
        self.evicted = 0  # cached blocks dropped so far
        self._blank = capacity  # of the free ones, those that cache nothing
        self._queue: OrderedDict[Segment, None] = OrderedDict()  # that nobody holds, next to go first
        self._cached: dict[Run, Segment] = {}  # what a lookup finds
        self._duplicates: dict[Run, list[Segment]] = {}  # further segments, oldest first

    def cached(self, run: Run) -> int:
        """The first blocks of a run that are cached."""
        segment = self._cached.get(run)
        return 0 if segment is None else segment.blocks

    def admit(self, path: Sequence[Run], blocks: int, *, recompute: bool) -> tuple[int, list[Segment]] | None:
        """Hold ``blocks`` for a request, cached ones first; the blocks that hit and what is held, None if too few.

        ``path`` is the runs that its prompt has in common with others; ``recompute``: the last one's single block is
        not looked up. One of the blocks is the request's last, which stays blank.
        """
        cached = self._cached
        held: list[Segment] = []
        hits = unheld = 0
        for run in path:
            segment = cached.get(run)
            if segment is None or (recompute and run is path[-1]):
                break
            held.append(segment)
            hits += segment.blocks
            if not segment.refs:
                unheld += segment.blocks
            if segment.blocks < run.length:
                break
        fresh = blocks - hits
        if fresh + unheld > self.free:
            return None
        self.free -= fresh + unheld
        for segment in held:
            if not segment.refs:
                del self._queue[segment]
            segment.refs += 1
        self._evict(fresh)
        self._fill(path, held, blocks - 1)
        return hits, held

    def release(self, held: Sequence[Segment]) -> None:
        """Give back what a request held; its last block, blank, is not among the segments."""
        queue = self._queue
        self._blank += 1
        free = 1
        for segment in reversed(held):
            segment.refs -= 1
            if not segment.refs:
                queue[segment] = None
                free += segment.blocks
        self.free += free

    def _fill(self, path: Sequence[Run], held: list[Segment], blocks: int) -> None:
        """Cache what the request will have computed, ``blocks`` full ones in all."""
        for number, run in enumerate(path):
            if number < len(held):
                held[number].blocks = run.length
            else:
                segment = Segment(run, run.length)
                if self._cached.setdefault(run, segment) is not segment:
                    self._duplicates.setdefault(run, []).append(segment)
                held.append(segment)
            blocks -= run.length
        if blocks:
            held.append(Segment(None, blocks))

    def _evict(self, blocks: int) -> None:
        """Take free blocks: the blank ones, then from the head of the queue."""
        if blocks <= self._blank:
            self._blank -= blocks
            return
        blocks -= self._blank
        self._blank = 0
        self.evicted += blocks
        queue = self._queue
        while blocks:
            segment = next(iter(queue))
            if segment.blocks > blocks:
                segment.blocks -= blocks
                return
            blocks -= segment.blocks
            del queue[segment]
            if segment.run is not None:
                self._forget(segment, segment.run)

    def _forget(self, segment: Segment, run: Run) -> None:
        """Nothing of a segment is left."""
        others = self._duplicates.get(run)
        if others is None:
            del self._cached[run]
            return
        if self._cached[run] is segment:
            self._cached[run] = others.pop(0)
        else:
            others.remove(segment)
        if not others:
            del self._duplicates[run]
