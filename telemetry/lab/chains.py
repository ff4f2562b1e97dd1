"""A prompt as a chain of block hashes of which only a sample is known, and how deep into it a cache reached.

Theory of operation. Hashes are chained, so one names its block and everything before it, and what a cache holds of a
prompt is always an opening of it. Blocks are sampled by their hash, so a sampled one is known wherever it comes back.

Of a cache that holds the first ``k`` known blocks and not the next one, the true depth lies behind the last of these
and at or before the next. How far behind, and how far before, is geometric with the sampled part ``r``: looking back,
``position of the last one held + 1/r`` is the depth on average, exactly, with 0 where none is held; looking ahead it is
``position of the next one - (1 - r)/r``, with the whole prompt where there is no next one. Their mean is free of bias
whatever the depth, and its standard error is about 0.7/r blocks however long the prompt, while that of counting the
hits and dividing by ``r`` grows with the depth. A single estimate may be below 0 or beyond the prompt; sums are what
counts. Prompts that part at the same block err alike, so the error of a sum is that of its distinct partings.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

HASHES = 1 << 64


class Request(NamedTuple):
    """One placed request, as a replay needs it. Tokens; None is what nobody said."""

    at_s: float  # unix
    group: str
    replica: str  # with its rank, where it has ranks
    blocks: Sequence[int]  # unsigned hashes, in the order of the prompt
    positions: Sequence[int] | None  # of each; None: all of the prompt's blocks are there
    block_count: int
    sample_ratio: float
    hash_tokens: int  # estimated tokens of a block
    estimate_tokens: int  # of the whole prompt
    prompt_tokens: int | None  # as the engine counted it
    cached_tokens: int | None  # of those, as the engine reported
    block_tokens: int | None  # of the engine


def thinned(request: Request, ratio: float) -> tuple[Sequence[int], Sequence[int]]:
    """(blocks, their positions) with this part of all hashes, at most the part that is there."""
    positions = range(request.block_count) if request.positions is None else request.positions
    if request.sample_ratio <= ratio:
        return request.blocks, positions
    below = round(ratio * HASHES)
    kept: list[int] = []
    kept_at: list[int] = []
    for block, at in zip(request.blocks, positions, strict=False):
        if block < below:
            kept.append(block)
            kept_at.append(at)
    return kept, kept_at


def depth(positions: Sequence[int], matched: int, block_count: int, ratio: float) -> float:
    """Blocks from the beginning that are estimated to be held, where the first ``matched`` known ones are."""
    if ratio >= 1:
        return float(matched)
    behind = positions[matched - 1] + 1 / ratio if matched else 0.0
    ahead = positions[matched] - (1 - ratio) / ratio if matched < len(positions) else block_count
    return (behind + ahead) / 2


def error(ratio: float) -> float:
    """Standard error of a depth, in blocks."""
    return sqrt((1 - ratio) / 2) / ratio


def signed(shown: str | None) -> int | None:
    """A hash as people see it -> as PostgreSQL stores it: the signed integer of the same bits."""
    return None if shown is None else (int(shown, 16) ^ HASHES // 2) - HASHES // 2


def shown(stored: int) -> str:
    """The other way."""
    return f"{stored & (HASHES - 1):016x}"
