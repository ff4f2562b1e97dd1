"""The few replicas to compare if there are many: the least loaded, and those with the longest cached prefixes."""

from __future__ import annotations

from typing import Final

from routing.balancing.block_index import ALL_BITS
from routing.balancing.candidates import Candidate, Candidates
from routing.balancing.residency import Match

MAX_COMPARED: Final = 16  # candidates up to which all are compared
MAX_HOLDERS: Final = 4  # replicas compared of each of two prefix lengths


def shortlist(match: Match, key: int, candidates: Candidates, allowed: int = ALL_BITS) -> list[Candidate]:
    """The least loaded candidate, and holders of the two longest cached prefixes; may repeat. ``allowed``: a mask."""
    chosen = [candidates.by_name[candidates.order.least_loaded()]]
    unseen = candidates.mask & allowed
    for _blocks, holders, _tokens in match.levels[:-3:-1]:
        if new := holders & unseen:
            chosen += least_loaded_holders(new, key, candidates)
            unseen ^= new
    return chosen


def least_loaded_holders(holders: int, key: int, candidates: Candidates) -> list[Candidate]:
    """Up to ``MAX_HOLDERS`` of the candidates with these bits: those with the least work, within a factor of two."""
    by_bit = candidates.by_bit
    if holders.bit_count() <= MAX_HOLDERS:
        return [by_bit[bit] for bit in bits_of(holders)]
    chosen: list[int] = []
    for members in candidates.order.work_classes():
        if in_class := holders & members:
            chosen += consecutive_bits(in_class, MAX_HOLDERS - len(chosen), key)
            if len(chosen) == MAX_HOLDERS:
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


def consecutive_bits(mask: int, count: int, key: int) -> list[int]:
    """At most ``count`` consecutive bits of a mask, from the one with the rank ``key`` modulo their number."""
    total = mask.bit_count()
    if total <= count:
        return bits_of(mask)
    at = _position_of_rank(mask, key % total)
    bits = []
    above = mask >> at << at
    for _ in range(count):
        above = above or mask
        bit = above & -above
        bits.append(bit)
        above ^= bit
    return bits


def _position_of_rank(mask: int, rank: int) -> int:
    """The position of a mask's bit of this rank, counted from 0 at the lowest; by bisection."""
    position, width = 0, mask.bit_length()
    while width > 1:
        half = width >> 1
        low = mask & ((1 << half) - 1)
        count = low.bit_count()
        if rank < count:
            mask, width = low, half
        else:
            mask, width = mask >> half, width - half
            rank -= count
            position += half
    return position
