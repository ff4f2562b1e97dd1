"""What each replica is believed to hold: runs of blocks, grouped by the prompt that last used them.

Theory of operation. A *use* is one prompt that was sent to the replica: its runs from the first block to the tail. A
run belongs to the use that was there last, so what is left of an older use are its last runs. Uses are kept in order,
and of the oldest one the last run is evicted first. A prompt uses all runs in front of a run as well, so these belong
to the same use or to a later one: no run outlives the one before it. A run that is split stays in its use, with its new
head in front of it.

A replica's bit, in the masks of runs, is its number here. A number is given anew when its replica has gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf
from typing import Final

from routing.balancing.block_index import BlockIndex, BlockRun, Tail
from routing.types import TargetId

FULL_RATIO: Final = 0.9  # of its capacity: what a full cache holds at least, for runs go as a whole
FORGOTTEN: Final = 8  # runs that later uses took over, at most half of a use's list, before they leave the list


class Use:
    """One prompt at one replica; of its runs those that no later prompt used are ``path[first:]``."""

    __slots__ = ("evicted", "first", "path", "used_s")

    def __init__(self, path: list[BlockRun], used_s: float) -> None:
        self.path = path  # from the prompt's first block on; it may end with a Tail
        self.first = 0
        self.evicted = 0  # blocks that are no longer in ``path``, from its end; tails not counted
        self.used_s = used_s


class ReplicaBlocks:
    """What one replica is believed to hold."""

    __slots__ = (
        "_index",
        "bit",
        "block_tokens",
        "blocks",
        "capacity",
        "capacity_tokens",
        "keeps_tails",
        "misses",
        "runs",
        "suspect_s",
        "target",
        "uses",
    )

    def __init__(self, target: TargetId, bit: int, index: BlockIndex) -> None:
        self.target = target
        self.bit = bit
        self._index = index
        self.capacity = 0  # blocks
        self.capacity_tokens = 0  # as the engine counts them
        self.block_tokens = 1  # estimated, of a block: by it the capacity in blocks follows from that in tokens
        self.blocks = 0  # of all runs
        self.runs: dict[BlockRun, Use] = {}  # with their last use
        self.uses: OrderedDict[Use, None] = OrderedDict()  # the oldest first, each with a run at least
        self.keeps_tails = False  # since a response told how many tokens it has
        self.misses = 0  # predictions in a row that were wrong
        self.suspect_s = 0.0  # latest use of what those missed

    def stale_s(self, now_s: float) -> float:
        """What was last used before this time is nearer to its eviction than to its last use; of a full cache alone."""
        if self.blocks < FULL_RATIO * self.capacity or not self.uses:
            return -inf
        return (self.oldest_s + now_s) / 2

    @property
    def oldest_s(self) -> float:
        """When the oldest use was; there must be one."""
        return next(iter(self.uses)).used_s

    def enter(self, path: list[BlockRun], now_s: float) -> Use:
        """Note that a prompt with these runs, each of which has this replica's bit, was sent now. Keeps the list."""
        use, runs = Use(path, now_s), self.runs
        for run in path:
            if (before := runs.get(run)) is not None:
                self._take_over(before)
            runs[run] = use
        if path:
            self.uses[use] = None
        return use

    def split(self, head: BlockRun, tail: BlockRun) -> None:
        """A run that is held was split: its new head belongs to the same use, in front of it."""
        use = self.runs[head] = self.runs[tail]
        use.path.insert(use.path.index(tail, use.first), head)

    def evict(self) -> None:
        """Let go of the last run of the oldest use; there must be one."""
        self._let_go_of_last(next(iter(self.uses)))

    def evict_until(self, used_s: float) -> None:
        """Let go of what was last used at this time or before."""
        while self.uses and self.oldest_s <= used_s:
            self.evict()

    def take_back(self, use: Use, brought: int) -> None:
        """Let go of a prompt's tail and its last ``brought`` blocks, as far as no later prompt used them."""
        brought -= use.evicted
        while use in self.uses and (brought > 0 or isinstance(use.path[-1], Tail)):
            run = use.path[-1]
            brought -= 0 if isinstance(run, Tail) else run.length
            self._let_go_of_last(use)

    def drop(self, tail: BlockRun) -> None:
        """Let go of a tail, if it is held; it is the last of its use."""
        use = self.runs.get(tail)
        if use is not None:
            self._let_go_of_last(use)

    def lengthen(self, tail: BlockRun, blocks: int) -> None:
        """Let a tail be so long, unless others hold it too or nobody does."""
        if tail.mask == self.bit:
            self.blocks += blocks - tail.length
            tail.length = blocks

    def _take_over(self, use: Use) -> None:
        """The first run of a use belongs to a later one now."""
        use.first += 1
        if use.first == len(use.path):
            del self.uses[use]
        elif use.first >= FORGOTTEN and 2 * use.first >= len(use.path):
            del use.path[: use.first]
            use.first = 0

    def _let_go_of_last(self, use: Use) -> None:
        run = use.path.pop()
        del self.runs[run]
        if use.first == len(use.path):
            del self.uses[use]
        if not isinstance(run, Tail):
            use.evicted += run.length
        self.blocks -= run.length
        self._index.let_go(run, self.bit)


class ReplicaBlockTables:
    """Everybody's, by replica and by bit."""

    __slots__ = ("_by_number", "_free", "_index", "_turn", "by_target", "capacity")

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self.by_target: dict[TargetId, ReplicaBlocks] = {}  # to read; settle and remove write it
        self._by_number: list[ReplicaBlocks | None] = []
        self._free: list[int] = []  # numbers that nobody has
        self._turn = 0  # whose number it is
        self.capacity = 0  # of all, in blocks

    def of_bit(self, bit: int) -> ReplicaBlocks | None:
        """Whose bit it is; None for nobody's."""
        number = bit.bit_length() - 1
        return self._by_number[number] if number < len(self._by_number) else None

    def of_mask(self, mask: int) -> list[ReplicaBlocks]:
        """Those with these bits, all of them somebody's. 0.2 us each; of most of a thousand 100 us."""
        if 4 * mask.bit_count() > len(self._by_number):
            return [holding for holding in self._by_number if holding and holding.bit & mask]
        found = []
        while mask:
            bit = mask & -mask
            if holding := self.of_bit(bit):
                found.append(holding)
            mask ^= bit
        return found

    def next(self) -> ReplicaBlocks | None:
        """Everybody's in turn; None where a replica has gone. There must be somebody."""
        self._turn = turn = (self._turn + 1) % len(self._by_number)
        return self._by_number[turn]

    def expire(self, used_s: float) -> None:
        """Let go of what was last used before this time, at the next in turn."""
        holding = self.next()
        if holding is not None:
            while holding.uses and holding.oldest_s < used_s:
                holding.evict()

    def settle(self, target: TargetId, tokens: int, block_tokens: int) -> ReplicaBlocks:
        """A replica's, which begins empty, with room for so many tokens from now on.

        ``block_tokens`` are those of a block until ``resize`` says more.
        """
        holding = self.by_target.get(target)
        if holding is None:
            if not self._free:
                self._free.append(len(self._by_number))
                self._by_number.append(None)
            number = self._free.pop()
            holding = self.by_target[target] = self._by_number[number] = ReplicaBlocks(target, 1 << number, self._index)
            holding.block_tokens = block_tokens
        holding.capacity_tokens = tokens
        self.resize(holding, holding.block_tokens)
        return holding

    def resize(self, holding: ReplicaBlocks, block_tokens: int) -> None:
        """Let a block of what a replica holds stand for so many tokens from now on."""
        blocks = max(1, holding.capacity_tokens // block_tokens)
        self.capacity += blocks - holding.capacity
        holding.capacity, holding.block_tokens = blocks, block_tokens

    def remove(self, target: TargetId) -> None:
        """Let go of a replica and all that it holds. O(its own runs)."""
        holding = self.by_target.pop(target, None)
        if holding is None:
            return
        holding.evict_until(inf)
        self.capacity -= holding.capacity
        number = holding.bit.bit_length() - 1
        self._by_number[number] = None
        self._free.append(number)

    def remove_all_but(self, targets: Iterable[TargetId]) -> None:
        """Let go of all others."""
        for target in self.by_target.keys() - set(targets):
            self.remove(target)
