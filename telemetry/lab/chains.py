"""Hashes of blocks: 64 bits, as people, PostgreSQL and Python write them.

Prompts as chains of block hashes of which only a sample is known, and how deep into them a cache reached.

Theory of operation. Hashes are chained, so one names its block and everything before it, and what a cache holds of a
prompt is always an opening of it. Blocks are sampled by their hash, so a sampled one is known wherever it comes back.

Of a cache that holds the first ``k`` known blocks and not the next one, the true depth lies behind the last of these
and at or before the next. How far behind, and how far before, is geometric with the sampled part ``r``: looking back,
``position of the last one held + 1/r`` is the depth on average, exactly, with 0 where none is held; looking ahead it is
``position of the next one - (1 - r)/r``, with the whole prompt where there is no next one. Their mean is free of bias
whatever the depth, and its standard error is about 0.7/r blocks however long the prompt, while that of counting the
hits and dividing by ``r`` grows with the depth. A single estimate may be below 0 or beyond the prompt; sums are what
counts. Prompts that part at the same block err alike, so the error of a sum is that of its distinct partings.

Requests are many and alike, so they come as columns: a number of each in an array, all their blocks in another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HASHES = 1 << 64  # as many there are


def signed(shown: str | None) -> int | None:
    """A hash as people see it -> as PostgreSQL stores it: the signed integer of the same bits."""
    return None if shown is None else (int(shown, 16) ^ HASHES // 2) - HASHES // 2


def shown(stored: int) -> str:
    """The other way."""
    return f"{stored & (HASHES - 1):016x}"


Hashes = NDArray[np.uint64]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


class Coded(NamedTuple):
    """A column of names that come back often: each once, and which one every row has."""

    names: list[str]
    codes: Integers

    def rows(self, name: str) -> Integers:
        """Which rows have it."""
        return np.flatnonzero(self.codes == (self.names.index(name) if name in self.names else -1))

    def take(self, rows: Integers) -> Coded:
        """Some of the rows."""
        return Coded(self.names, self.codes[rows])


def coded(names: Iterable[str]) -> Coded:
    """Names in the order in which they first come."""
    numbers: dict[str, int] = {}
    codes = [numbers.setdefault(name, len(numbers)) for name in names]
    return Coded(list(numbers), np.array(codes, np.int64))


@dataclass(frozen=True, slots=True)
class Requests:
    """Placed requests in the order of time, as a replay needs them. Tokens; NaN is what nobody said."""

    at_s: Floats  # unix
    groups: Coded
    replicas: Coded  # with their ranks, where they have ranks
    blocks: Hashes  # of all prompts, each in the order of the prompt
    positions: Integers  # of each block in its prompt
    ends: Integers  # where in ``blocks`` each prompt's end
    block_counts: Floats  # of whole prompts
    sample_ratios: Floats
    hash_tokens: Floats  # estimated tokens of a block
    estimates: Floats  # tokens of the whole prompt
    prompt_tokens: Floats  # as the engine counted them
    cached_tokens: Floats  # of those, as the engine reported
    block_tokens: Floats  # of the engine

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def lengths(self) -> Integers:
        """How many blocks of each prompt are known."""
        return np.diff(self.ends, prepend=0)

    @classmethod
    def together(cls, parts: Sequence[Requests]) -> Requests:
        """Some and those that were placed after them; one part at least."""
        begins = np.cumsum([0, *(len(part.blocks) for part in parts)])
        told: dict[str, Any] = {}
        for column in fields(cls):
            every = [getattr(part, column.name) for part in parts]
            if column.name == "ends":
                every = [ends + begin for ends, begin in zip(every, begins, strict=False)]
            if isinstance(every[0], Coded):
                told[column.name] = coded(one.names[code] for one in every for code in one.codes.tolist())
            else:
                told[column.name] = np.concatenate(every)
        return cls(**told)

    def thinned(self, ratio: float) -> Requests:
        """With this part of all hashes, at most the part that is there."""
        if ratio >= 1 or not len(self.blocks):
            return self
        kept = self.blocks < np.uint64(round(ratio * HASHES))
        ends = np.concatenate(([0], np.cumsum(kept)))[self.ends]
        return replace(self, blocks=self.blocks[kept], positions=self.positions[kept], ends=ends)


@dataclass(frozen=True, slots=True)
class Prompts:
    """What prompts' tokens come to when openings of their sampled blocks are held. Columns."""

    tokens: Floats
    of_block: Floats  # tokens
    engine_block: Floats  # tokens
    block_counts: Floats
    positions: Integers  # of sampled blocks, of one prompt after the other, and one more
    starts: Integers  # where each prompt's begin
    lengths: Integers
    ratio: float

    @classmethod
    def of(cls, requests: Requests, tokens: Floats, ratio: float) -> Prompts:
        """Those of thinned requests, whose prompts have so many tokens."""
        engine = requests.block_tokens
        lengths = requests.lengths
        return cls(
            tokens,
            requests.hash_tokens * tokens / np.maximum(1, requests.estimates),
            np.where(engine > 0, engine, 1.0),
            requests.block_counts,
            np.append(requests.positions, 0),
            requests.ends - lengths,
            lengths,
            ratio,
        )

    def take(self, rows: Integers) -> Prompts:
        """Some of them, or some of them several times."""
        columns = (self.tokens, self.of_block, self.engine_block, self.block_counts)
        tokens, of_block, engine, counts = (column[rows] for column in columns)
        return Prompts(
            tokens, of_block, engine, counts, self.positions, self.starts[rows], self.lengths[rows], self.ratio
        )

    def held(self, matched: Integers) -> Floats:
        """Tokens where the first ``matched`` of each one's blocks are held.

        Where a block is met in part, half of it on average; whole engine blocks before the last token (H7).
        """
        is_between = (matched > 0) & (matched < self.lengths)
        in_part = np.where(is_between & (self.of_block > self.engine_block), (self.of_block - self.engine_block) / 2, 0)
        tokens = self.depth(matched) * self.of_block + in_part
        if self.ratio < 1:
            return tokens
        return np.minimum(tokens, np.maximum(0, (self.tokens - 1) // self.engine_block * self.engine_block))

    def gains(self) -> Floats:
        """Tokens that each of all blocks adds, where those before it are held."""
        each = self.take(np.repeat(np.arange(len(self.lengths)), self.lengths))
        before = np.arange(len(each.starts)) - each.starts
        return each.held(before + 1) - each.held(before)

    def depth(self, matched: Integers) -> Floats:
        """Blocks from the beginning that are estimated to be held."""
        if self.ratio >= 1:
            return matched.astype(np.float64)
        at, ratio = self.starts + matched, self.ratio
        behind = np.where(matched > 0, self.positions[at - 1] + 1 / ratio, 0)
        ahead = np.where(matched < self.lengths, self.positions[at] - (1 - ratio) / ratio, self.block_counts)
        return (behind + ahead) / 2


def error(ratio: float) -> float:
    """Standard error of a depth, in blocks."""
    return sqrt((1 - ratio) / 2) / ratio
