"""Whom to compare where there are too many to compare all of them.

Theory of operation. The cost of a request grows with a replica's load and falls with what it holds of the prompt, so
the least is found among few: the least loaded of all, and of those who hold its longest known prefix, and of those who
hold the next shorter one, up to ``HOLDERS`` with the least work. Work is known in classes by its power of two, each a
mask of replicas, so the lightest holders are found by a few conjunctions, however many hold the prefix. Where a class
has more of them than are wanted, they are taken in the order of their bits from one on that the key names by its rank,
so that each has the same chance, and routers look at the same ones.
"""

from __future__ import annotations

from typing import Final

from routing.core.loads.candidate import Candidate
from routing.core.loads.candidates import Candidates
from routing.core.residency.residency import Match
from routing.core.residency.runs import EVERYBODY

MOST_COMPARED: Final = 16  # candidates up to which all are compared
HOLDERS: Final = 4  # compared of each of two depths


def shortlist(match: Match, key: int, candidates: Candidates, among: int = EVERYBODY) -> list[Candidate]:
    """Whom to compare, some perhaps twice; of holders only those with their bits in ``among``."""
    chosen = [candidates.by_name[candidates.order.least_loaded()]]
    unseen = candidates.mask & among
    for _blocks, holders in match.levels[:-3:-1]:
        if found := holders & unseen:
            chosen += lightest(found, key, candidates)
            unseen ^= found
    return chosen


def lightest(holders: int, key: int, candidates: Candidates) -> list[Candidate]:
    """Up to ``HOLDERS`` of the candidates with these bits: those with the least work, within a factor of two."""
    by_bit = candidates.by_bit
    if holders.bit_count() <= HOLDERS:
        return [by_bit[bit] for bit in bits_of(holders)]
    chosen: list[int] = []
    for members in candidates.order.classes():
        if found := holders & members:
            chosen += some_bits(found, HOLDERS - len(chosen), key)
            if len(chosen) == HOLDERS:
                break
    return [by_bit[bit] for bit in chosen]


def bits_of(mask: int) -> list[int]:
    """The bits of a mask, the lowest first."""
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits


def some_bits(mask: int, count: int, key: int) -> list[int]:
    """So many bits of a mask, or all: consecutive ones from one on that the key names by its rank, and around."""
    has = mask.bit_count()
    if has <= count:
        return bits_of(mask)
    at = _place(mask, key % has)
    bits = []
    above = mask >> at << at
    for _ in range(count):
        above = above or mask
        bit = above & -above
        bits.append(bit)
        above ^= bit
    return bits


def _place(mask: int, rank: int) -> int:
    """The place of a mask's bit of this rank, counted from 0 at the lowest; found by halves."""
    place, width = 0, mask.bit_length()
    while width > 1:
        half = width >> 1
        low = mask & ((1 << half) - 1)
        count = low.bit_count()
        if rank < count:
            mask, width = low, half
        else:
            mask, width = mask >> half, width - half
            rank -= count
            place += half
    return place
