"""Many requests through caches of blocks at once, least recently used first out, as engines keep them.

Theory of operation. A prompt's blocks are used tail first, so that its head is always the more recent one and goes
last: what is held of a prompt is an opening of it, as with vLLM's block pool.

Write down every use of a block in order, after what the cache held before, the least recent first. What the cache has
forgotten is then a beginning of that list: a block is held if its last use lies behind it. So a replay is one walk in
which that beginning grows: a request's prompt is held as deep as last uses lie behind it, and where there are more
blocks than room it grows by as many uses as were the last ones of their blocks. Which use was the last one before, and
which is the next one, does not depend on the room, and is found for all uses at once by sorting.

So is what the best of several caches held: each use is remembered until some request, a block is held anywhere
if one of its uses is, and that is the greatest such request of the uses so far.

Only where the place depends on what caches hold, as with placement of our own, is each request placed by itself.
Blocks are numbered here, from 0 on, so that lists and arrays hold what is known of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from telemetry.lab.chains import Hashes, Integers

KEEP_RATIO = 0.5  # of a prompt that a replica holds: placement of our own goes there
NEVER = -1
NOTHING = np.empty(0, np.int64)
ANY = -1  # a mask of all caches


def distinct(*blocks: Hashes) -> Hashes:
    """Each of them once, in order."""
    found: Hashes = np.sort(np.concatenate(blocks))  # np.unique takes ten times as long
    is_new = np.ones(len(found), np.bool_)
    is_new[1:] = found[1:] != found[:-1]
    return found[is_new]


class Numbers:
    """Numbers of blocks, from 0 on, so that lists and arrays hold what is known of them."""

    def __init__(self, *blocks: Hashes) -> None:
        self._hashes = distinct(*blocks)

    def of(self, blocks: Hashes) -> Integers:
        """Numbers of blocks that are there."""
        return np.searchsorted(self._hashes, blocks)

    def hashes(self, numbers: Integers) -> Hashes:
        """The other way."""
        return self._hashes[numbers]


@dataclass(frozen=True, slots=True)
class Chains:
    """Prompts as numbers of blocks, one prompt after the other, each tail first and none empty."""

    blocks: Integers
    ends: Integers  # where in ``blocks`` each prompt's end

    @classmethod
    def tail_first(cls, blocks: Integers, ends: Integers) -> Chains:
        """Prompts whose blocks are told in their own order."""
        lengths = np.diff(ends, prepend=0)
        return cls(blocks[np.repeat(2 * ends - lengths - 1, lengths) - np.arange(len(blocks))], ends)

    @property
    def lengths(self) -> Integers:
        """Blocks of each."""
        return np.diff(self.ends, prepend=0)

    def take(self, rows: Integers) -> Chains:
        """Some of them."""
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        return Chains(self.blocks[np.repeat(self.ends[rows] - ends, lengths) + np.arange(lengths.sum())], ends)


def seen(
    before: tuple[Integers, Integers], chains: Chains, horizons: Integers
) -> tuple[Integers, tuple[Integers, Integers]]:
    """Prompts through a cache that forgets a block when two horizons began since its last use.

    ``before``, and what is there at the end: the blocks last used in the horizon before, and in the one of now.
    Returns (blocks of each prompt that were there, what is there now). Without any block nothing changes.
    """
    if not sum(map(len, (*before, chains.blocks))):
        return np.zeros(len(chains.ends), np.int64), before
    owners = np.repeat(np.arange(len(chains.ends)), chains.lengths)
    uses = np.concatenate((*before, chains.blocks))
    begun = np.concatenate((np.full(len(before[0]), -1), np.zeros(len(before[1]), np.int64), horizons[owners]))
    order = in_order(uses, np.arange(len(uses)))
    is_same, begun = np.diff(uses[order]) == 0, begun[order]
    is_held = is_same & (begun[:-1] >= begun[1:] - 1)
    matched = np.bincount(owners[order[1:][is_held] - len(uses) + len(owners)], minlength=len(chains.ends))
    lasts, when = uses[order][np.append(~is_same, True)], begun[np.append(~is_same, True)]
    now = horizons[-1] if len(horizons) else 0
    return matched, (lasts[when == now - 1], lasts[when == now])


@dataclass(frozen=True, slots=True)
class Passage:
    """What became of one cache."""

    matched: Integers  # blocks of each prompt that were held when it came
    uses: Integers  # what was held before, then the prompts' blocks
    lengths: Integers  # of the prompts
    forgotten: Integers  # how many uses, once each prompt was placed
    held: Integers  # at the end, the least recent first


def through(held: Integers, chains: Chains, room: int) -> Passage:
    """Prompts through a cache that holds these blocks, the least recent first."""
    held = held[max(0, len(held) - room) :]
    if not len(chains.ends):
        return Passage(NOTHING, held, NOTHING, NOTHING, held)
    uses = np.concatenate((held, chains.blocks))
    last, following = _neighbours(uses)
    ends = len(held) + chains.ends
    matched, forgotten = _walk(last.tolist(), following.tolist(), ends.tolist(), len(held), room)
    is_held = following[forgotten[-1] :] == len(uses)
    still = uses[forgotten[-1] :][is_held]
    return Passage(np.array(matched), uses, chains.lengths, np.array(forgotten), still)


def _neighbours(uses: Integers) -> tuple[Integers, Integers]:
    """(the use before of the same block, NEVER for none; the one after, as many as there are for none)."""
    last, following = np.full(len(uses), NEVER), np.full(len(uses), len(uses))
    order = in_order(uses, np.arange(len(uses)))
    is_same = np.diff(uses[order]) == 0
    earlier, later = order[:-1][is_same], order[1:][is_same]
    last[later], following[earlier] = earlier, later
    return last, following


def in_order(blocks: Integers, times: Integers) -> Integers:
    """What sorts uses by block and then by time, of numbers below 2**31."""
    return np.argsort(blocks << 32 | times)


def _walk(last: list[int], following: list[int], ends: list[int], size: int, room: int) -> tuple[list[int], list[int]]:
    """(blocks of each prompt that were held, uses forgotten then); the first ``size`` are what was held before."""
    matched, gone = [], []
    begin, forgotten = size, 0
    for end in ends:
        held = end - bisect_left(last, forgotten, begin, end)
        size += end - begin - held
        while size > room and forgotten < end:
            if following[forgotten] >= end:
                size -= 1
            forgotten += 1
        matched.append(held)
        gone.append(forgotten)
        begin = end
    return matched, gone


def best_of(passages: Iterable[tuple[Integers, Passage]], count: int) -> Integers:
    """Of ``count`` prompts, what the cache held that held most; each with the numbers of the prompts that it got."""
    told = [_remembered(numbers, one, count) for numbers, one in passages]
    blocks, times, until = (np.concatenate(parts) for parts in zip(*told, strict=True))
    order = in_order(blocks, times)
    of_block = blocks[order] * (count + 2)
    furthest = np.maximum.accumulate(of_block + until[order])
    times = times[order]
    is_held = (times[1:] > 0) & (furthest[:-1] >= (of_block + times)[1:])
    return np.bincount(times[1:][is_held] - 1, minlength=count)


def _remembered(numbers: Integers, one: Passage, count: int) -> tuple[Integers, Integers, Integers]:
    """(block, time, until when it is remembered) of each use. A prompt's time is 1 + its number; before all is 0."""
    until = np.append(numbers + 1, count + 1)[np.searchsorted(one.forgotten, np.arange(len(one.uses)), side="right")]
    times = np.zeros(len(one.uses), np.int64)
    times[len(one.uses) - one.lengths.sum() :] = np.repeat(numbers + 1, one.lengths)
    return one.uses, times, until


class Placed(NamedTuple):
    """What became of prompts and caches with placement of our own."""

    best: Integers  # blocks of each prompt that the one held that held most
    held: list[Integers]  # by each cache at the end, the least recent first
    written: list[float]  # of each, how often its room was filled


def place(held: Sequence[Integers], rooms: Sequence[int], written: Sequence[float], chains: Chains) -> Placed:
    """Prompts to caches that hold these blocks, one after the other.

    The one that holds most gets it where that is half of it, else the one whose room was filled least often: what it
    drops next was not used for longest.
    """
    holders = [0] * (1 + max((int(blocks.max(initial=-1)) for blocks in (*held, chains.blocks)), default=-1))
    caches = [Filled(number, *one, holders) for number, one in enumerate(zip(held, rooms, written, strict=True))]
    least = [(cache.written, cache.number) for cache in caches]
    heapify(least)
    blocks, found, begin = chains.blocks.tolist(), [], 0
    for end in chains.ends.tolist():
        best = _depth(blocks, end, end - begin, holders, ANY)
        mask = holders[blocks[end - best]] if best else 0
        while least[0][0] != (often := caches[least[0][1]].written):
            heapreplace(least, (often, least[0][1]))
        number = least[0][1]
        is_there = mask >> number & 1
        if not is_there and best >= KEEP_RATIO * (end - begin):
            number, is_there = (mask & -mask).bit_length() - 1, 1
        there = best if is_there else _depth(blocks, end, best, holders, 1 << number)
        caches[number].use(blocks[begin:end], best, there)
        found.append(best)
        begin = end
    return Placed(np.array(found, np.int64), [one.held() for one in caches], [one.written for one in caches])


def _depth(blocks: list[int], end: int, high: int, holders: list[int], mask: int) -> int:
    """How many blocks of the prompt that ends there are held by one of the mask, at most ``high``."""
    if high and holders[blocks[end - high]] & mask:
        return high
    low, high = 0, high - 1
    while low < high:
        middle = (low + high + 1) // 2
        if holders[blocks[end - middle]] & mask:
            low = middle
        else:
            high = middle - 1
    return low


class Filled:
    """One of the caches to which prompts come one by one, and its part in who holds which block, as masks."""

    __slots__ = ("_bit", "_holders", "_last", "_oldest", "_room", "_size", "_uses", "number", "written")

    def __init__(self, number: int, held: Integers, room: int, written: float, holders: list[int]) -> None:
        self.number, self.written = number, written  # how often its room was filled
        self._bit, self._room, self._holders = 1 << number, room, holders
        self._uses: list[int] = held[max(0, len(held) - room) :].tolist()
        self._last = {block: at for at, block in enumerate(self._uses)}  # use of each block
        self._oldest = enumerate(self._uses)  # goes on where it was left, also when uses came since
        self._size = len(self._uses)
        for block in self._uses:
            holders[block] |= self._bit

    def use(self, chain: list[int], best: int, there: int) -> None:
        """A prompt's blocks, tail first: the last ``best`` of them are held somewhere, the last ``there`` here."""
        uses, last, length = self._uses, self._last, len(chain)
        first = len(uses)
        uses += chain
        last.update(zip(chain, range(first, first + length), strict=True))
        if there == length:
            return
        holders, bit = self._holders, self._bit
        for block in chain[: length - best]:
            holders[block] = bit
        for block in chain[length - best : length - there]:
            holders[block] |= bit
        self.written += (length - there) / self._room
        self._size += length - there
        if self._size > self._room:
            self._forget(self._size - self._room)

    def held(self) -> Integers:
        """The least recent first; nothing can be used after that."""
        last = self._last
        return np.array([block for at, block in self._oldest if last.get(block) == at], np.int64)

    def _forget(self, excess: int) -> None:
        """Forget the oldest uses, and with them so many blocks."""
        last, holders, others = self._last, self._holders, ~self._bit
        for at, block in self._oldest:
            if last[block] == at:
                del last[block]
                holders[block] &= others
                excess -= 1
                if not excess:
                    break
        self._size = self._room
