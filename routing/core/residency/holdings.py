"""What each replica is believed to hold: runs of blocks, the least recently used first.

A replica's bit, in the masks of runs, is its number here. A number is given anew when its replica has gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf
from typing import Final

from routing.core.residency.runs import Chain, Run, Runs
from routing.core.types import TargetId

FULL_RATIO: Final = 0.9  # of its capacity: what a full cache holds at least, for runs go as a whole


class Holding:
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
    )

    def __init__(self, target: TargetId, bit: int, index: Runs) -> None:
        self.target = target
        self.bit = bit
        self._index = index
        self.capacity = 0  # blocks
        self.capacity_tokens = 0  # as the engine counts them
        self.block_tokens = 1  # estimated, of a block: by it the capacity in blocks follows from that in tokens
        self.blocks = 0  # of all runs
        self.runs: OrderedDict[Run, float] = OrderedDict()  # with the time of their last use
        self.keeps_tails = False  # since a response told how many tokens it has
        self.misses = 0  # predictions in a row that were wrong
        self.suspect_s = 0.0  # latest use of what those missed

    def stale_s(self, now_s: float) -> float:
        """What was last used before this time is nearer to its eviction than to its last use; of a full cache alone."""
        if self.blocks < FULL_RATIO * self.capacity:
            return -inf
        return (next(iter(self.runs.values())) + now_s) / 2

    def evict(self) -> None:
        """Let go of the run that was used longest ago; there must be one."""
        run, _used_s = self.runs.popitem(last=False)
        self._gone(run)

    def evict_until(self, used_s: float) -> None:
        """Let go of what was last used at this time or before. O(runs): heads that were parted stand out of order."""
        self._drop([run for run, at_s in self.runs.items() if at_s <= used_s])

    def take_back(self, chain: Chain, known: int, used_s: float) -> None:
        """Let go of a prompt behind its first ``known`` blocks, as far as it was last used at this time."""
        brought = (run for at, run in self._index.met(chain) if at >= known)
        self._drop([run for run in brought if self.runs.get(run) == used_s])

    def drop(self, run: Run) -> None:
        """Let go of a run, if it is held."""
        if run in self.runs:
            self._drop([run])

    def lengthen(self, tail: Run, blocks: int) -> None:
        """Let a tail be so long, unless others hold it too or nobody does."""
        if tail.mask == self.bit:
            self.blocks += blocks - tail.length
            tail.length = blocks

    def _drop(self, runs: Iterable[Run]) -> None:
        for run in runs:
            del self.runs[run]
            self._gone(run)

    def _gone(self, run: Run) -> None:
        self.blocks -= run.length
        self._index.let_go(run, self.bit)


class Holdings:
    """Everybody's, by replica and by bit."""

    __slots__ = ("_by_number", "_free", "_index", "_turn", "by_target", "capacity")

    def __init__(self, index: Runs) -> None:
        self._index = index
        self.by_target: dict[TargetId, Holding] = {}  # to read; settle and remove write it
        self._by_number: list[Holding | None] = []
        self._free: list[int] = []  # numbers that nobody has
        self._turn = 0  # whose number it is
        self.capacity = 0  # of all, in blocks

    def of_bit(self, bit: int) -> Holding | None:
        """Whose bit it is; None for nobody's."""
        number = bit.bit_length() - 1
        return self._by_number[number] if number < len(self._by_number) else None

    def of_mask(self, mask: int) -> list[Holding]:
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

    def next(self) -> Holding | None:
        """Everybody's in turn; None where a replica has gone. There must be somebody."""
        self._turn = turn = (self._turn + 1) % len(self._by_number)
        return self._by_number[turn]

    def expire(self, used_s: float) -> None:
        """Let go of what was last used before this time, at the next in turn."""
        holding = self.next()
        if holding is not None:
            while (runs := holding.runs) and next(iter(runs.values())) < used_s:
                holding.evict()

    def settle(self, target: TargetId, tokens: int, block_tokens: int) -> Holding:
        """A replica's, which begins empty, with room for so many tokens from now on.

        ``block_tokens`` are those of a block until ``resize`` says more.
        """
        holding = self.by_target.get(target)
        if holding is None:
            if not self._free:
                self._free.append(len(self._by_number))
                self._by_number.append(None)
            number = self._free.pop()
            holding = self.by_target[target] = self._by_number[number] = Holding(target, 1 << number, self._index)
            holding.block_tokens = block_tokens
        holding.capacity_tokens = tokens
        self.resize(holding, holding.block_tokens)
        return holding

    def resize(self, holding: Holding, block_tokens: int) -> None:
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
