"""Estimated cached blocks of each replica: an LRU of block runs, grouped by the prompt that last used them.

Theory of operation. A *use* is one prompt that was sent to the replica: its runs from the first block to the tail. A
run belongs to the use that contained it last, so an older use retains only its last runs. Uses are ordered by time, and
of the oldest one the last run is evicted first. A prompt also uses all runs before a run, so these belong to the same
use or to a later one: no run outlives the run before it. If a run is split, its new head is inserted before it in its
use.

A replica's bit in the masks of runs is its number here. A number is reused when its replica was removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf
from typing import Final

from routing.balancing.block_index import BlockIndex, BlockRun, Tail
from routing.types import TargetId

FULL_RATIO: Final = 0.9  # of the capacity: what a full cache has at least, because whole runs are evicted
COMPACT_AT: Final = 8  # runs at the start of a use's list that later uses own before the list is compacted


class Use:
    """One prompt at one replica; the runs that no later prompt used are ``path[first:]``."""

    __slots__ = ("evicted", "first", "path", "used_s")

    def __init__(self, path: list[BlockRun], used_s: float) -> None:
        self.path = path  # from the prompt's first block on; it may end with a Tail
        self.first = 0
        self.evicted = 0  # blocks that were removed from the end of ``path``; tails not counted
        self.used_s = used_s


class ReplicaBlocks:
    """The estimated cached blocks of one replica."""

    def __init__(self, target: TargetId, bit: int, index: BlockIndex, block_tokens: int) -> None:
        self.target = target
        self.bit = bit
        self._index = index
        self.capacity = 0  # blocks
        self.capacity_tokens = 0  # as the engine counts them
        self.block_tokens = block_tokens  # estimated, of a block: converts the capacity from tokens to blocks
        self.blocks = 0  # of all runs
        self.runs: dict[BlockRun, Use] = {}  # with their last use
        self.uses: OrderedDict[Use, None] = OrderedDict()  # the oldest first, each with at least one run
        self.uses_tails = False  # set by the first response that reports its generated tokens
        self.misses = 0  # wrong predictions in a row
        self.suspect_s = 0.0  # latest earlier use of the blocks that were missed

    def stale_s(self, now_s: float) -> float:
        """Blocks last used before this time are closer to eviction than to their last use; -inf if not full."""
        if self.blocks < FULL_RATIO * self.capacity or not self.uses:
            return -inf
        return (self.oldest_s + now_s) / 2

    @property
    def oldest_s(self) -> float:
        """The time of the oldest use; there must be one."""
        return next(iter(self.uses)).used_s

    def add_use(self, path: list[BlockRun], now_s: float) -> Use:
        """Record that a prompt with these runs, each with this replica's bit, is sent now. Keeps the list."""
        use, runs = Use(path, now_s), self.runs
        for run in path:
            if (before := runs.get(run)) is not None:
                before.first += 1  # a later use owns its first run
                if before.first == len(before.path):
                    del self.uses[before]
                elif before.first >= COMPACT_AT and 2 * before.first >= len(before.path):
                    del before.path[: before.first]
                    before.first = 0
            runs[run] = use
        if path:
            self.uses[use] = None
        return use

    def on_split(self, head: BlockRun, tail: BlockRun) -> None:
        """A cached run was split: its new head belongs to the same use, before it."""
        use = self.runs[head] = self.runs[tail]
        use.path.insert(use.path.index(tail, use.first), head)

    def evict(self) -> None:
        """Evict the last run of the oldest use; there must be one."""
        self._evict_last(next(iter(self.uses)))

    def evict_until(self, used_s: float) -> None:
        """Evict everything that was last used at this time or before."""
        while self.uses and self.oldest_s <= used_s:
            self.evict()

    def roll_back(self, use: Use, new_blocks: int) -> None:
        """Remove a prompt's tail and its last ``new_blocks``, except those that later prompts used."""
        new_blocks -= use.evicted
        while use in self.uses and (new_blocks > 0 or isinstance(use.path[-1], Tail)):
            run = use.path[-1]
            new_blocks -= 0 if isinstance(run, Tail) else run.length
            self._evict_last(use)

    def drop(self, tail: BlockRun) -> None:
        """Remove a tail, which is the last run of its use, if it is cached."""
        use = self.runs.get(tail)
        if use is not None:
            self._evict_last(use)

    def set_tail_length(self, tail: BlockRun, blocks: int) -> None:
        """Set the length of a tail that only this replica has."""
        if tail.mask == self.bit:
            self.blocks += blocks - tail.length
            tail.length = blocks

    def _evict_last(self, use: Use) -> None:
        run = use.path.pop()
        del self.runs[run]
        if use.first == len(use.path):
            del self.uses[use]
        if not isinstance(run, Tail):
            use.evicted += run.length
        self.blocks -= run.length
        self._index.remove(run, self.bit)


class ReplicaBlockTables:
    """The cached blocks of all replicas, by replica and by bit."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self.by_target: dict[TargetId, ReplicaBlocks] = {}  # read-only for others
        self._by_number: list[ReplicaBlocks | None] = []
        self._free: list[int] = []  # numbers of removed replicas
        self._turn = 0
        self.capacity = 0  # of all, in blocks

    def of_mask(self, mask: int) -> list[ReplicaBlocks]:
        """The replicas with these bits. 0.2 us each; 100 us for most of a thousand."""
        if 4 * mask.bit_count() > len(self._by_number):
            return [replica for replica in self._by_number if replica and replica.bit & mask]
        replicas = []
        while mask:
            bit = mask & -mask
            if replica := self._by_number[bit.bit_length() - 1]:
                replicas.append(replica)
            mask ^= bit
        return replicas

    def next(self) -> ReplicaBlocks | None:
        """Each replica in turn; None for a removed one. There must be a replica."""
        self._turn = turn = (self._turn + 1) % len(self._by_number)
        return self._by_number[turn]

    def expire(self, used_s: float) -> None:
        """At the next replica in turn, evict what was last used before this time."""
        replica = self.next()
        if replica is not None:
            while replica.uses and replica.oldest_s < used_s:
                replica.evict()

    def add(self, target: TargetId, tokens: int, block_tokens: int) -> ReplicaBlocks:
        """Add a replica, initially without blocks, or change the capacity of one, in tokens.

        ``block_tokens`` is used for a new replica until ``resize`` is called.
        """
        replica = self.by_target.get(target)
        if replica is None:
            if not self._free:
                self._free.append(len(self._by_number))
                self._by_number.append(None)
            number = self._free.pop()
            replica = ReplicaBlocks(target, 1 << number, self._index, block_tokens)
            self.by_target[target] = self._by_number[number] = replica
        replica.capacity_tokens = tokens
        self.resize(replica, replica.block_tokens)
        return replica

    def resize(self, replica: ReplicaBlocks, block_tokens: int) -> None:
        """Compute the capacity of a replica in blocks of ``block_tokens``."""
        blocks = max(1, replica.capacity_tokens // block_tokens)
        self.capacity += blocks - replica.capacity
        replica.capacity, replica.block_tokens = blocks, block_tokens

    def remove_all_but(self, targets: Iterable[TargetId]) -> None:
        """Remove all other replicas and their blocks. O(their runs)."""
        for target in self.by_target.keys() - set(targets):
            replica = self.by_target.pop(target)
            replica.evict_until(inf)
            self.capacity -= replica.capacity
            number = replica.bit.bit_length() - 1
            self._by_number[number] = None
            self._free.append(number)
