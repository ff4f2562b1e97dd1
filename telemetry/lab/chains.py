"""Prompts as chains of sampled block hashes, in columns, and estimates of how many leading blocks a cache has.

Theory of operation. Hashes are chained: a hash identifies its block and everything before it, so a cache always
contains a prefix of a prompt's blocks. Blocks are sampled by their hash, so a block is either always sampled or never.

If a cache has the first ``k`` sampled blocks of a prompt and not the next, the true depth is after the last of these
and at or before the next. The distances to both are geometric with the sampling ratio ``r``. From the last cached
block, the expected depth is ``its position + 1/r`` (0 if no block is cached); from the next block, it is ``its position
- (1 - r)/r`` (the whole prompt if there is no next one). The mean of both is unbiased at every depth, and its standard
error is about 0.7/r blocks for any length of prompt, while the error of counting hits and dividing by ``r`` grows with
the depth. A single estimate may be below 0 or beyond the prompt; only sums are used. Prompts that diverge at the same
block have the same error, so the error of a sum is that of its distinct points of divergence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HASHES = 1 << 64  # number of possible hashes


def parse_hash(text: str | None) -> int | None:
    """16 hex digits -> the signed integer of the same bits, as PostgreSQL stores it."""
    return None if text is None else (int(text, 16) ^ HASHES // 2) - HASHES // 2


def format_hash(stored: int) -> str:
    """The signed integer that PostgreSQL stores -> 16 hex digits."""
    return f"{stored & (HASHES - 1):016x}"


Hashes = NDArray[np.uint64]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class Coded(NamedTuple):
    """A dictionary-encoded column of names."""

    names: list[str]  # distinct
    codes: Integers  # index of each row's name

    def rows(self, name: str) -> Integers:
        """Rows with this name."""
        return np.flatnonzero(self.codes == (self.names.index(name) if name in self.names else -1))

    def take(self, rows: Integers) -> Coded:
        return Coded(self.names, self.codes[rows])


def coded(names: Iterable[str]) -> Coded:
    """Encode a column; names in order of first occurrence."""
    numbers: dict[str, int] = {}
    codes = [numbers.setdefault(name, len(numbers)) for name in names]
    return Coded(list(numbers), np.array(codes, np.int64))


@dataclass(frozen=True, slots=True)
class Requests:
    """Placed requests in order of time, as columns. NaN: not reported."""

    at_s: Floats  # unix
    groups: Coded
    replicas: Coded  # with the rank, for data-parallel replicas
    blocks: Hashes  # sampled blocks of all prompts, one prompt after another
    positions: Integers  # of each block in its prompt
    ends: Integers  # end of each prompt in ``blocks``
    block_counts: Floats  # of the whole prompt
    sample_ratios: Floats
    hash_tokens: Floats  # estimated tokens of a block
    estimates: Floats  # tokens of the whole prompt, which routers correct by what they know of its beginning
    prompt_tokens: Floats  # as the engine counted them
    cached_tokens: Floats  # as the engine reported them
    block_tokens: Floats  # of the engine

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def lengths(self) -> Integers:
        """Number of sampled blocks of each prompt."""
        return np.diff(self.ends, prepend=0)

    @property
    def byte_blocks(self) -> Floats:
        """Lengths of the prompts in blocks of bytes, with the part of a block at the end.

        An estimate that was corrected for the prompt while ``hash_tokens`` was not says nothing of that part.
        """
        ratio = self.estimates / self.hash_tokens
        is_exact = (ratio >= self.block_counts) & (ratio <= self.block_counts + 1)
        return np.where(is_exact, ratio, self.block_counts + 0.5)

    @classmethod
    def concatenated(cls, parts: Sequence[Requests]) -> Requests:
        """Consecutive parts as one; at least one part."""
        offsets = np.cumsum([0, *(len(part.blocks) for part in parts)])
        columns: dict[str, Any] = {}
        for column in fields(cls):
            values = [getattr(part, column.name) for part in parts]
            if column.name == "ends":
                values = [ends + offset for ends, offset in zip(values, offsets, strict=False)]
            if isinstance(values[0], Coded):
                columns[column.name] = coded(part.names[code] for part in values for code in part.codes.tolist())
            else:
                columns[column.name] = np.concatenate(values)
        return cls(**columns)

    def sampled(self, ratio: float) -> Requests:
        """The requests with only this share of all hashes, or the share that they have if that is smaller."""
        if ratio >= 1 or not len(self.blocks):
            return self
        is_sampled = self.blocks < np.uint64(round(ratio * HASHES))
        ends = np.concatenate(([0], np.cumsum(is_sampled)))[self.ends]
        return replace(self, blocks=self.blocks[is_sampled], positions=self.positions[is_sampled], ends=ends)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Converts numbers of cached sampled blocks into cached tokens, for many prompts as columns."""

    tokens: Floats
    block_tokens: Floats  # of a hashed block: those of the prompt / its length in blocks
    engine_block_tokens: Floats  # of a block of the engine's cache
    block_counts: Floats
    positions: Integers  # of sampled blocks, one prompt after another, plus one entry
    starts: Integers  # start of each prompt in ``positions``
    lengths: Integers
    ratio: float

    @classmethod
    def of(cls, requests: Requests, tokens: Floats, ratio: float) -> Prompts:
        """The prompts of sampled requests; ``tokens`` are the lengths of the prompts."""
        engine = requests.block_tokens
        lengths = requests.lengths
        return cls(
            tokens,
            tokens / np.maximum(1, requests.byte_blocks),
            np.where(engine > 0, engine, 1.0),
            requests.block_counts,
            np.append(requests.positions, 0),
            requests.ends - lengths,
            lengths,
            ratio,
        )

    def cached_tokens(self, matched: Integers) -> Floats:
        """Cached tokens of each prompt if its first ``matched`` sampled blocks are cached.

        Without sampling, the result is whole engine blocks before the last token. A hashed block that is larger
        than an engine block is partly cached where prompts diverge: about half of it, on average.
        """
        is_between = (matched > 0) & (matched < self.lengths)
        rest = self.block_tokens - self.engine_block_tokens
        partial = np.where(is_between & (rest > 0), rest / 2, 0)
        tokens = self.depth(matched) * self.block_tokens + partial
        if self.ratio < 1:
            return tokens
        whole_blocks = np.maximum(0, (self.tokens - 1) // self.engine_block_tokens * self.engine_block_tokens)
        return np.minimum(tokens, whole_blocks)

    def depth(self, matched: Integers) -> Floats:
        """Estimated number of leading blocks that are cached."""
        if self.ratio >= 1:
            return matched.astype(np.float64)
        at, ratio = self.starts + matched, self.ratio
        from_last = np.where(matched > 0, self.positions[at - 1] + 1 / ratio, 0)
        from_next = np.where(matched < self.lengths, self.positions[at] - (1 - ratio) / ratio, self.block_counts)
        return (from_last + from_next) / 2


def depth_error(ratio: float) -> float:
    """Standard error of a depth, in blocks."""
    return sqrt((1 - ratio) / 2) / ratio
