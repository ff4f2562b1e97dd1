"""A trace's requests as a strategy sees them: the ids of their blocks stand in for the hashes of a prompt."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from routing.core.types import BYTES_PER_TOKEN, PrefixHash
from routing.schema import Boundary, Settings, Tier1Settings
from routing.workload.columns import Columns

TIER2_TOKENS = 512  # behind the opening, a block of Mooncake's: a trace does not say where its first message ends

_PIECE = 65_536  # ids that are spread at once


class NotInTracesError(ValueError):
    """A setting that asks for something which a trace does not tell."""


class TraceKeys:
    """What a strategy may ask about one request."""

    __slots__ = ("_book", "_chain", "_end", "_start", "block_tokens", "prompt_tokens")

    session: PrefixHash | None = None  # a trace knows no sessions

    def __init__(self, book: KeyBook, start: int, end: int, prompt_tokens: int) -> None:
        self._book = book
        self._start = start  # of its ids
        self._end = end
        self._chain: array[int] | None = None
        self.block_tokens = book.block_tokens
        self.prompt_tokens = prompt_tokens

    @property
    def tier1(self) -> PrefixHash | None:
        """Key of the opening: of its last block, which stands for all before it."""
        return PrefixHash(self._book.hashes[min(self._start + self._book.depth, self._end) - 1])

    @property
    def tier2(self) -> PrefixHash | None:
        """Key of the conversation: of the block that ends ``TIER2_TOKENS`` behind the opening."""
        return PrefixHash(self._book.hashes[min(self._start + self._book.conversation, self._end) - 1])

    @property
    def chain(self) -> Sequence[int]:
        """Hashes of the whole blocks."""
        if self._chain is None:
            whole = self.prompt_tokens // self._book.block_tokens
            self._chain = self._book.hashes[self._start : self._start + whole]
        return self._chain


class KeyBook:
    """The keys of all requests under one policy."""

    def __init__(self, settings: Settings, columns: Columns) -> None:
        self.depth = tier1_depth(settings, columns.block_tokens)  # blocks of the opening
        self.conversation = self.depth + -(-TIER2_TOKENS // columns.block_tokens)  # blocks that name a conversation
        self.block_tokens = columns.block_tokens
        self._columns = columns
        self._hashes: array[int] | None = None

    @property
    def hashes(self) -> array[int]:
        """The ids of all requests, spread over 64 bits as hashes are."""
        if self._hashes is None:
            self._hashes = _spread(self._columns.ids)
        return self._hashes

    def of(self, index: int) -> TraceKeys:
        """The keys of one request."""
        columns = self._columns
        return TraceKeys(self, columns.starts[index], columns.starts[index + 1], columns.prompt_tokens[index])


def _spread(ids: array[int]) -> array[int]:
    """Each id with its lower 32 bits once more over its upper ones, bytes in reverse: no two ids come to the same.

    Ids are counted up from 0, so what changes most stands first and last: where a ring and where a dict look. In
    columns of half a number, because that takes 10 ns an id, and a product that wraps around 230.
    """
    hashes = ids[:]
    halves = memoryview(hashes).cast("B").cast("I")
    lower = int(sys.byteorder == "big")
    for start in range(0, len(halves), 2 * _PIECE):
        piece = halves[start : start + 2 * _PIECE]
        reverse = array("I", piece[lower::2].tobytes())
        reverse.byteswap()
        upper = piece[1 - lower :: 2].tobytes()
        piece[1 - lower :: 2] = _xor(reverse, upper) if upper.strip(b"\0") else reverse
    return hashes


def _xor(values: array[int], others: bytes) -> array[int]:
    both = int.from_bytes(values.tobytes(), "little") ^ int.from_bytes(others, "little")
    return array("I", both.to_bytes(len(others), "little"))


def tier1_depth(settings: Settings, block_tokens: int) -> int:
    """The block in which a policy's tier-1 prefix ends, counted from 1; NotInTracesError for ends in the text."""
    if not isinstance(settings, Tier1Settings) or settings.boundary is Boundary.SYSTEM:
        return 1
    if settings.boundary in {Boundary.MESSAGES, Boundary.MARKER}:
        raise NotInTracesError(f"boundary {settings.boundary}: a trace has no text; use bytes with boundary_bytes")
    return -(-settings.boundary_bytes // (block_tokens * BYTES_PER_TOKEN))
