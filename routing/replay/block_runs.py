"""Runs of blocks that always occur together, and a replica's block cache that works on runs instead of blocks.

Theory of operation, forest. An id identifies its block and everything before it, so the prompts of a trace form a
forest. Path compression merges blocks into a *run* where no prompt ends or branches off: a prompt of 25 blocks is two
to four runs. All blocks of a run are allocated and released together, so a cache only counts how many of its leading
blocks are cached. A run is split where a prompt leaves it; the part nearer the root becomes a new run, so prompts that
ended with the old run still end with it. A prompt that ends at a block boundary recomputes its last block, so that
block is a run of its own. Building costs O(runs) per prompt, not O(blocks).

Theory of operation, cache. It has the same hits and evictions as ``routing/simulation/blocks.py``. The blocks of a run
enter the free queue together, tail first, so they are one segment of the queue, which eviction shortens from its tail.
The cached blocks of a run are therefore its first ones, and a lookup ends at the first incomplete run. Blocks that no
other prompt can match (a run of a single prompt, generated blocks) also form one segment. A request's last block is
never full, because its last token's KV is not computed, so it caches nothing and goes to the head of the queue; such
blocks and unused ones are only counted. When a prompt recomputes a cached last block, that run has two segments;
lookups find the older one until it is evicted. ``tests/routing/replay/test_fast_engine.py`` compares the hits of this
cache with those of one of single blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from routing.traffic.columns import Columns


class ForestError(ValueError):
    """An id follows different blocks in different prompts; detected where prompts branch, not inside a run."""


class Run:
    """Blocks that occur together in every prompt that contains any of them."""

    __slots__ = ("_ancestors", "length", "parent", "start", "visits")

    def __init__(self, start: int, length: int, parent: Run | None, visits: int) -> None:
        self.start = start  # position of its ids in the trace's column
        self.length = length  # blocks
        self.parent = parent  # the run before it in every prompt; None: the first
        self.visits = visits  # number of prompts that contain it
        self._ancestors: tuple[Run, ...] | None = (
            None  # all runs before it, from the first; without itself, to avoid a reference cycle
        )

    @property
    def path(self) -> tuple[Run, ...]:
        """All runs of a prompt that ends with this one, in order; valid once the forest is complete."""
        if self._ancestors is None:
            self._ancestors = self.parent.path if self.parent else ()
        return (*self._ancestors, self)


def shared_path(last: Run | None) -> tuple[Run, ...]:
    """The runs that a prompt ending with ``last`` shares with other prompts, in order."""
    while last is not None and last.visits == 1:
        last = last.parent
    return () if last is None else last.path


class Forest:
    """The runs of a trace, and the last run of each prompt.

    ``has_output_ids``: a request's ids continue with blocks of generated tokens that later prompts contain.
    """

    def __init__(self, columns: Columns, *, has_output_ids: bool = False) -> None:
        self.columns = columns
        self._ids = columns.ids
        self._by_first_id: dict[int, Run] = {}  # by the run's first id
        self.last_runs: list[Run | None] = []  # by request: the last run of its full blocks; None: no full block
        self.last_generated: dict[int, Run] = {}  # by request with ids of generated tokens: the last run of these
        block_tokens = columns.block_tokens
        for start, tokens in zip(columns.starts, columns.prompt_tokens, strict=False):
            full, rest = divmod(tokens, block_tokens)
            if not rest:
                self._add(start, full - 1, 0)
            self.last_runs.append(self._add(start, full, 0 if has_output_ids else 1))
        if has_output_ids:
            self._add_generated()
        self._by_first_id.clear()

    def _add_generated(self) -> None:
        """Add each request with its known blocks of generated tokens, the last of which is never full."""
        columns, block_tokens = self.columns, self.columns.block_tokens
        for index, (tokens, output_tokens) in enumerate(zip(columns.prompt_tokens, columns.output_tokens, strict=True)):
            start = columns.starts[index]
            known = columns.starts[index + 1] - start
            whole = min(known, (tokens + output_tokens - 1) // block_tokens)
            generated = self._add(start, max(tokens // block_tokens, whole), 1)
            if generated is not None:
                self.last_generated[index] = generated

    def _add(self, start: int, blocks: int, visits: int) -> Run | None:
        """Add the first ``blocks`` blocks of a prompt; returns its last run."""
        ids, first = self._ids, self._by_first_id
        parent: Run | None = None
        end = start + blocks
        while start < end:
            run = first.get(ids[start])
            if run is None:
                run = first[ids[start]] = Run(start, end - start, parent, visits)
                return run
            if run.parent is not parent:
                raise ForestError(f"block id {ids[start]} follows different blocks in different prompts")
            length = run.length
            if start + length > end or ids[run.start + length - 1] != ids[start + length - 1]:
                run = self._split(run, self._count_common_blocks(run, start, end))
            run.visits += visits
            start += run.length
            parent = run
        return parent

    def _count_common_blocks(self, run: Run, start: int, end: int) -> int:
        """Number of leading blocks of a run that the prompt contains, at least 1."""
        ids = self._ids
        common, limit = 1, min(run.length, end - start)
        while common < limit:
            middle = (common + limit + 1) // 2
            if ids[run.start + middle - 1] == ids[start + middle - 1]:
                common = middle
            else:
                limit = middle - 1
        return common

    def _split(self, run: Run, length: int) -> Run:
        """Split off the first ``length`` blocks of a run as a new run, its parent."""
        head = Run(run.start, length, run.parent, run.visits)
        self._by_first_id[self._ids[head.start]] = head
        run.start += length
        run.length -= length
        run.parent = head
        self._by_first_id[self._ids[run.start]] = run
        return head


class Segment:
    """Cached blocks of one run, or blocks that no other prompt can match."""

    __slots__ = ("blocks", "ready_s", "refs", "run")

    def __init__(self, run: Run | None, blocks: int) -> None:
        self.run = run
        self.blocks = blocks
        self.refs = 1  # running requests that use it
        self.ready_s = 0.0  # until then a request is fetching blocks from lower cache tiers


Evicted = tuple[Run | None, int, int]  # blocks of a run: the first, the one after the last; the last is evicted first


class RunPool:
    """A block pool of ``capacity`` >= 1 blocks."""

    __slots__ = ("_cached", "_duplicates", "_empty", "_queue", "capacity", "evicted", "evicted_parts", "free")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a pool needs at least one block, not {capacity}")
        self.capacity = capacity
        self.free = capacity  # blocks without a running request
        self.evicted = 0  # cached blocks dropped so far
        self.evicted_parts: list[Evicted] | None = None  # a list collects what is evicted, in order
        self._empty = capacity  # free blocks without cached content
        self._queue: OrderedDict[Segment, None] = OrderedDict()  # free segments, next to evict first
        self._cached: dict[Run, Segment] = {}  # found by lookups
        self._duplicates: dict[Run, list[Segment]] = {}  # further segments, oldest first

    def cached(self, run: Run) -> int:
        """Number of leading blocks of a run that are cached."""
        segment = self._cached.get(run)
        return 0 if segment is None else segment.blocks

    def admit(
        self, path: Sequence[Run], blocks: int, *, prompt_runs: int, recompute: bool
    ) -> tuple[int, list[Segment]] | None:
        """Allocate ``blocks`` for a request, cached ones first: (hits in blocks, segments), None if too few are free.

        ``path``: runs that the request shares with others; the first ``prompt_runs`` of them are looked up, the others
        are generated. ``recompute``: do not look up the single block of the last of them. One of the blocks is the
        request's last, which caches nothing.
        """
        cached = self._cached
        segments: list[Segment] = []
        hits = from_queue = 0
        if recompute:
            prompt_runs -= 1
        for number in range(prompt_runs):
            run = path[number]
            segment = cached.get(run)
            if segment is None:
                break
            segments.append(segment)
            hits += segment.blocks
            if not segment.refs:
                from_queue += segment.blocks
            if segment.blocks < run.length:
                break
        new_blocks = blocks - hits
        if new_blocks + from_queue > self.free:
            return None
        self.free -= new_blocks + from_queue
        for segment in segments:
            if not segment.refs:
                del self._queue[segment]
            segment.refs += 1
        self._evict(new_blocks)
        self._fill(path, segments, blocks - 1)
        return hits, segments

    def release(self, segments: Sequence[Segment]) -> None:
        """Release a request's segments and its last block, which is in none of them."""
        queue = self._queue
        self._empty += 1
        free = 1
        for segment in reversed(segments):
            segment.refs -= 1
            if not segment.refs:
                queue[segment] = None
                free += segment.blocks
        self.free += free

    def _fill(self, path: Sequence[Run], segments: list[Segment], blocks: int) -> None:
        """Mark the request's ``blocks`` full blocks as cached."""
        for number, run in enumerate(path):
            if number < len(segments):
                segments[number].blocks = run.length
            else:
                segment = Segment(run, run.length)
                if self._cached.setdefault(run, segment) is not segment:
                    self._duplicates.setdefault(run, []).append(segment)
                segments.append(segment)
            blocks -= run.length
        if blocks:
            segments.append(Segment(None, blocks))

    def _evict(self, blocks: int) -> None:
        """Use free blocks: those without content first, then from the head of the queue."""
        if blocks <= self._empty:
            self._empty -= blocks
            return
        blocks -= self._empty
        self._empty = 0
        self.evicted += blocks
        queue = self._queue
        while blocks:
            segment = next(iter(queue))
            if self.evicted_parts is not None:
                self.evicted_parts.append((segment.run, max(0, segment.blocks - blocks), segment.blocks))
            if segment.blocks > blocks:
                segment.blocks -= blocks
                return
            blocks -= segment.blocks
            del queue[segment]
            if segment.run is not None:
                self._remove_segment(segment, segment.run)

    def _remove_segment(self, segment: Segment, run: Run) -> None:
        """Remove a segment whose blocks are all evicted."""
        duplicates = self._duplicates.get(run)
        if duplicates is None:
            del self._cached[run]
            return
        if self._cached[run] is segment:
            self._cached[run] = duplicates.pop(0)
        else:
            duplicates.remove(segment)
        if not duplicates:
            del self._duplicates[run]
