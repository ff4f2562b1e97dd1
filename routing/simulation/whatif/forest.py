"""Chains of blocks that always occur together, as runs: what makes a replay cost runs instead of blocks.

Theory of operation. An id stands for its block and everything before it, so the prompts of a trace form a forest.
Path compression leaves a node, a *run*, for each stretch in which no prompt ends and none branches off: a prompt of
25 blocks is two to four runs. All blocks of a run are held and released together, so a cache need only remember how
many of them, from the run's start, it still has. A run is cut where a prompt leaves it; the part nearer the root
becomes a new run, so whoever ends at the old one still does. A prompt of whole blocks only recomputes its last one,
so there its last block is a run of its own. Building costs O(runs) for each prompt, not O(blocks).
"""

from __future__ import annotations

from routing.workload.columns import Columns


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
