"""Vectorized LRU caches of blocks: one cache, a cache per replica, and near-optimal placement over several caches.

Theory of operation. The blocks of a prompt are used tail first, so its head is more recent and evicted last: a cache
contains a prefix of each prompt, as in vLLM's block pool.

List all uses of blocks in order, after the cache's initial content (least recent first). The evicted uses are always a
prefix of this list, and a block is cached if its last use is after that prefix. A replay therefore is one walk in which
the prefix grows: a prompt is cached as deep as the last uses of its blocks are after the prefix, and when the cache is
over its capacity, the prefix grows until enough uses were the last of their blocks. The previous and next use of the
same block do not depend on the capacity and are found for all uses at once by sorting.

The best of several caches is vectorized as well: each use is remembered until some request, and a block is cached
anywhere if the maximum of these requests over its uses so far has not passed.

Only near-optimal placement, which depends on the content of the caches, processes requests one by one. Blocks are
numbered from 0 here, so that arrays can be indexed by them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np

from telemetry.lab.chains import Hashes, Integers

AFFINITY_RATIO = 0.5  # of a prompt: near-optimal placement chooses a cache that has at least this share
NO_PREVIOUS_USE = -1
EMPTY = np.empty(0, np.int64)
ALL_CACHES = -1  # as a bit mask


def distinct(*blocks: Hashes) -> Hashes:
    """Distinct blocks, sorted."""
    found: Hashes = np.sort(np.concatenate(blocks))  # np.unique takes ten times as long
    is_new = np.ones(len(found), np.bool_)
    is_new[1:] = found[1:] != found[:-1]
    return found[is_new]


class BlockNumbers:
    """Maps block hashes to numbers from 0 on."""

    def __init__(self, *blocks: Hashes) -> None:
        self._hashes = distinct(*blocks)

    def of(self, blocks: Hashes) -> Integers:
        """Numbers of known blocks."""
        return np.searchsorted(self._hashes, blocks)

    def hashes(self, numbers: Integers) -> Hashes:
        """Hashes of numbers."""
        return self._hashes[numbers]


@dataclass(frozen=True, slots=True)
class Chains:
    """Prompts as block numbers, one prompt after another, each tail first and not empty."""

    blocks: Integers
    ends: Integers  # end of each prompt in ``blocks``

    @classmethod
    def tail_first(cls, blocks: Integers, ends: Integers) -> Chains:
        """From prompts with blocks in prompt order."""
        lengths = np.diff(ends, prepend=0)
        return cls(blocks[np.repeat(2 * ends - lengths - 1, lengths) - np.arange(len(blocks))], ends)

    @property
    def lengths(self) -> Integers:
        """Blocks of each prompt."""
        return np.diff(self.ends, prepend=0)

    def take(self, rows: Integers) -> Chains:
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        return Chains(self.blocks[np.repeat(self.ends[rows] - ends, lengths) + np.arange(lengths.sum())], ends)


def unbounded(
    before: tuple[Integers, Integers], chains: Chains, horizons: Integers
) -> tuple[Integers, tuple[Integers, Integers]]:
    """Replay prompts through an unbounded cache that drops a block once two horizons began since its last use.

    ``before`` and the second result: blocks last used in the previous horizon, and in the current one. The first
    result: number of cached blocks of each prompt.
    """
    if not sum(map(len, (*before, chains.blocks))):
        return np.zeros(len(chains.ends), np.int64), before
    owners = np.repeat(np.arange(len(chains.ends)), chains.lengths)
    uses = np.concatenate((*before, chains.blocks))
    begun = np.concatenate((np.full(len(before[0]), -1), np.zeros(len(before[1]), np.int64), horizons[owners]))
    order = sort_order(uses, np.arange(len(uses)))
    is_same, begun = np.diff(uses[order]) == 0, begun[order]
    is_cached = is_same & (begun[:-1] >= begun[1:] - 1)
    matched = np.bincount(owners[order[1:][is_cached] - len(uses) + len(owners)], minlength=len(chains.ends))
    lasts, when = uses[order][np.append(~is_same, True)], begun[np.append(~is_same, True)]
    now = horizons[-1] if len(horizons) else 0
    return matched, (lasts[when == now - 1], lasts[when == now])


@dataclass(frozen=True, slots=True)
class CacheRun:
    """Result of a replay through one cache."""

    matched: Integers  # cached blocks of each prompt on its arrival
    uses: Integers  # initial content, then the prompts' blocks
    lengths: Integers  # of the prompts
    evicted: Integers  # number of evicted uses after each prompt
    content: Integers  # at the end, least recent first


def run_lru(content: Integers, chains: Chains, capacity: int) -> CacheRun:
    """Replay prompts through an LRU cache with this initial content, least recent first."""
    content = content[max(0, len(content) - capacity) :]
    if not len(chains.ends):
        return CacheRun(EMPTY, content, EMPTY, EMPTY, content)
    uses = np.concatenate((content, chains.blocks))
    last, following = _neighbours(uses)
    ends = len(content) + chains.ends
    matched, evicted = _count_hits_and_evictions(
        last.tolist(), following.tolist(), ends.tolist(), len(content), capacity
    )
    is_cached = following[evicted[-1] :] == len(uses)
    content = uses[evicted[-1] :][is_cached]
    return CacheRun(np.array(matched), uses, chains.lengths, np.array(evicted), content)


def _neighbours(uses: Integers) -> tuple[Integers, Integers]:
    """(previous use of the same block or NO_PREVIOUS_USE, next use or the number of uses)."""
    last, following = np.full(len(uses), NO_PREVIOUS_USE), np.full(len(uses), len(uses))
    order = sort_order(uses, np.arange(len(uses)))
    is_same = np.diff(uses[order]) == 0
    earlier, later = order[:-1][is_same], order[1:][is_same]
    last[later], following[earlier] = earlier, later
    return last, following


def sort_order(blocks: Integers, times: Integers) -> Integers:
    """Indices that sort uses by block and then by time; both below 2**31."""
    return np.argsort(blocks << 32 | times)


def _count_hits_and_evictions(
    last: list[int], following: list[int], ends: list[int], size: int, capacity: int
) -> tuple[list[int], list[int]]:
    """(cached blocks, evicted uses) of each prompt; the first ``size`` uses are the initial content."""
    matched, evicted_by_prompt = [], []
    begin, evicted = size, 0
    for end in ends:
        hits = end - bisect_left(last, evicted, begin, end)
        size += end - begin - hits
        while size > capacity and evicted < end:
            if following[evicted] >= end:
                size -= 1
            evicted += 1
        matched.append(hits)
        evicted_by_prompt.append(evicted)
        begin = end
    return matched, evicted_by_prompt


def best_of(runs: Iterable[tuple[Integers, CacheRun]], count: int) -> Integers:
    """Most cached blocks in any cache, for each of ``count`` prompts; ``runs``: (a cache's prompts, its run)."""
    lifetimes = [_lifetimes(numbers, run, count) for numbers, run in runs]
    blocks, times, until = (np.concatenate(parts) for parts in zip(*lifetimes, strict=True))
    order = sort_order(blocks, times)
    # The offsets separate blocks: an earlier block's furthest eviction is always before a later block's first use.
    block_offsets = blocks[order] * (count + 2)
    furthest = np.maximum.accumulate(block_offsets + until[order])
    times = times[order]
    is_cached = (times[1:] > 0) & (furthest[:-1] >= (block_offsets + times)[1:])
    return np.bincount(times[1:][is_cached] - 1, minlength=count)


def _lifetimes(numbers: Integers, run: CacheRun, count: int) -> tuple[Integers, Integers, Integers]:
    """(block, time, time of eviction) of each use. A prompt's time is 1 + its number; initial content has 0."""
    until = np.append(numbers + 1, count + 1)[np.searchsorted(run.evicted, np.arange(len(run.uses)), side="right")]
    times = np.zeros(len(run.uses), np.int64)
    times[len(run.uses) - run.lengths.sum() :] = np.repeat(numbers + 1, run.lengths)
    return run.uses, times, until


class IdealPlacement(NamedTuple):
    """Result of near-optimal placement."""

    best: Integers  # most cached blocks of each prompt in any cache
    contents: list[Integers]  # of each cache at the end, least recent first
    written: list[float]  # by each cache, as multiples of its capacity


def place_ideally(
    contents: Sequence[Integers], capacities: Sequence[int], written: Sequence[float], chains: Chains
) -> IdealPlacement:
    """Place prompts one by one on caches with these contents.

    A prompt goes to the cache with most of it if that is at least half, else to the cache that was refilled least
    often, whose least recent blocks are the oldest.
    """
    holders = [0] * (1 + max((int(blocks.max(initial=-1)) for blocks in (*contents, chains.blocks)), default=-1))
    states = zip(contents, capacities, written, strict=True)
    caches = [PlacementCache(number, *state, holders) for number, state in enumerate(states)]
    least = [(cache.written, cache.number) for cache in caches]
    heapify(least)
    blocks, most, begin = chains.blocks.tolist(), [], 0
    for end in chains.ends.tolist():
        best = _depth(blocks, end, end - begin, holders, ALL_CACHES)
        mask = holders[blocks[end - best]] if best else 0
        while least[0][0] != (current := caches[least[0][1]].written):
            heapreplace(least, (current, least[0][1]))
        number = least[0][1]
        has_best = mask >> number & 1
        if not has_best and best >= AFFINITY_RATIO * (end - begin):
            number, has_best = (mask & -mask).bit_length() - 1, 1
        hits = best if has_best else _depth(blocks, end, best, holders, 1 << number)
        caches[number].use(blocks[begin:end], best, hits)
        most.append(best)
        begin = end
    return IdealPlacement(
        np.array(most, np.int64), [cache.content() for cache in caches], [cache.written for cache in caches]
    )


def _depth(blocks: list[int], end: int, high: int, holders: list[int], mask: int) -> int:
    """Number of leading blocks, at most ``high``, of the prompt ending at ``end`` that a cache of the mask has."""
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


class PlacementCache:
    """One LRU cache of near-optimal placement; ``holders`` is the bit mask of caches by block, shared by all.

    ``written`` is how much was written to it, as a multiple of its capacity.
    """

    __slots__ = ("_bit", "_capacity", "_holders", "_last", "_oldest", "_size", "_uses", "number", "written")

    def __init__(self, number: int, content: Integers, capacity: int, written: float, holders: list[int]) -> None:
        self.number, self.written = number, written
        self._bit, self._capacity, self._holders = 1 << number, capacity, holders
        self._uses: list[int] = content[max(0, len(content) - capacity) :].tolist()
        self._last = {block: at for at, block in enumerate(self._uses)}  # last use of each block
        self._oldest = enumerate(self._uses)  # continues after the last eviction, also over uses added since
        self._size = len(self._uses)
        for block in self._uses:
            holders[block] |= self._bit

    def use(self, chain: list[int], best: int, hits: int) -> None:
        """Use a prompt's blocks, tail first; the last ``best`` are in some cache, the last ``hits`` in this one."""
        uses, last, length = self._uses, self._last, len(chain)
        first = len(uses)
        uses += chain
        last.update(zip(chain, range(first, first + length), strict=True))
        if hits == length:
            return
        holders, bit = self._holders, self._bit
        for block in chain[: length - best]:
            holders[block] = bit
        for block in chain[length - best : length - hits]:
            holders[block] |= bit
        self.written += (length - hits) / self._capacity
        self._size += length - hits
        if self._size > self._capacity:
            self._evict(self._size - self._capacity)

    def content(self) -> Integers:
        """Blocks, least recent first. The cache cannot be used afterwards."""
        last = self._last
        return np.array([block for at, block in self._oldest if last.get(block) == at], np.int64)

    def _evict(self, excess: int) -> None:
        """Evict ``excess`` blocks."""
        last, holders, others = self._last, self._holders, ~self._bit
        for at, block in self._oldest:
            if last[block] == at:
                del last[block]
                holders[block] &= others
                excess -= 1
                if not excess:
                    break
        self._size = self._capacity
