"""Chains of blocks that always occur together, as runs: what makes a replay cost runs instead of blocks.

Theory of operation. An id stands for its block and everything before it, so the prompts of a trace form a forest.
Path compression leaves a node, a *run*, for each stretch in which no prompt ends and none branches off: a prompt of
25 blocks is two to four runs. All blocks of a run are held and released together, so a cache need only remember how
many of them, from the run's start, it still has. A run is cut where a prompt leaves it; the part nearer the root
becomes a new run, so whoever ends at the old one still does. A prompt of whole blocks only recomputes its last one,
so there its last block is a run of its own. Building costs O(runs) for each prompt, not O(blocks).

A replica's block cache that knows runs instead of blocks: the same hits and evictions as ``../blocks.py``.

Theory of operation. The blocks of a run are taken together and enter the free queue together, tail first, so in the
queue they are one segment, which eviction shortens from its tail. A run's blocks that are cached are therefore its
first ones, and a lookup ends at the first run that is not whole. What no other prompt can match, a run of one prompt
only and the generated blocks, enters the queue next to each other and is one segment too. The last block of a
request is never full (its last token's KV is not computed), so it caches nothing and goes to the head of the queue;
such blocks, and those never used, are only counted. A prompt of whole blocks recomputes its last block although it
may be cached: then the run, of that one block, has two segments; the older one is found until it is evicted.
``tests/routing/replay/test_run_cache.py`` holds it against the pool of single blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from routing.traffic.columns import Columns


class ForestError(ValueError):
    """Ids that do not stand for a block and everything before it; noticed where prompts part, not within a run."""


class Run:
    """Blocks that occur together in every prompt that has any of them."""

    __slots__ = ("_before", "above", "length", "start", "visits")

    def __init__(self, start: int, length: int, above: Run | None, visits: int) -> None:
        self.start = start  # where its ids are in the trace's column
        self.length = length  # blocks
        self.above = above  # the run before it in every prompt; None: prompts begin with it
        self.visits = visits  # prompts that have it
        self._before: tuple[Run, ...] | None = None  # all runs above; not itself, or it would never be freed

    @property
    def path(self) -> tuple[Run, ...]:
        """All runs of a prompt that ends with this one, in order; for use once the forest is whole."""
        if self._before is None:
            self._before = self.above.path if self.above else ()
        return (*self._before, self)


def shared_path(last: Run | None) -> tuple[Run, ...]:
    """The runs that a prompt which ends with ``last`` has in common with others, in order."""
    while last is not None and last.visits == 1:
        last = last.above
    return () if last is None else last.path


class Forest:
    """The runs of a trace, and the last one of each of its prompts."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._ids = columns.ids
        self._first: dict[int, Run] = {}  # a run by its first id
        self.last: list[Run | None] = []  # by request: the run that its full blocks end with; None without any
        block_tokens = columns.block_tokens
        for start, tokens in zip(columns.starts, columns.prompt_tokens, strict=False):
            full, rest = divmod(tokens, block_tokens)
            if not rest:
                self._enter(start, full - 1, 0)
            self.last.append(self._enter(start, full, 1))
        self._first.clear()

    def _enter(self, start: int, blocks: int, visits: int) -> Run | None:
        """Take in a prompt's first ``blocks`` blocks; its last run."""
        ids, first = self._ids, self._first
        above: Run | None = None
        end = start + blocks
        while start < end:
            run = first.get(ids[start])
            if run is None:
                run = first[ids[start]] = Run(start, end - start, above, visits)
                return run
            if run.above is not above:
                raise ForestError(f"block id {ids[start]} follows different blocks in different prompts")
            length = run.length
            if start + length > end or ids[run.start + length - 1] != ids[start + length - 1]:
                run = self._cut(run, self._common(run, start, end))
            run.visits += visits
            start += run.length
            above = run
        return above

    def _common(self, run: Run, start: int, end: int) -> int:
        """How many of a run's blocks the prompt has, at least the first."""
        ids = self._ids
        same, limit = 1, min(run.length, end - start)
        while same < limit:
            middle = (same + limit + 1) // 2
            if ids[run.start + middle - 1] == ids[start + middle - 1]:
                same = middle
            else:
                limit = middle - 1
        return same

    def _cut(self, run: Run, length: int) -> Run:
        """Cut off the first ``length`` blocks of a run, as a run above it."""
        upper = Run(run.start, length, run.above, run.visits)
        self._first[self._ids[upper.start]] = upper
        run.start += length
        run.length -= length
        run.above = upper
        self._first[self._ids[run.start]] = run
        return upper


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
