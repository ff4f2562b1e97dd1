"""The workers' decisions, as one sequence.

Theory of operation. Records stay in the worker that decided; the parent learns how many there are by now and notes
which of its own numbers stand for which of the worker's. A reader's numbers are looked up there, and only the records
that it asks for cross over. The records of a worker that is restarted in good order are taken over by the parent, up to
``MAX_RECORDS`` and ``MAX_BYTES``; those of one that was killed are gone, and count as dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from routing.observability.decision_log import MAX_BYTES, MAX_RECORDS
from routing.observability.decision_record import with_block_sample

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.decode


class Book(Protocol):
    """Where records are. Numbers are the book's own, from 1 on."""

    @property
    def first(self) -> int:
        """The oldest record that may still be there."""
        ...

    @property
    def last(self) -> int:
        """The newest one known of."""
        ...

    async def read(self, first: int, last: int, ratio: float) -> list[dict[str, Any]]:
        """What is left of these, in order, each with its number in ``seq`` and this part of its block hashes."""
        ...


class KeptBook:
    """Records of a worker that has ended."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self._records = {record["seq"]: _encode(record) for record in records}
        self.first = min(self._records, default=1)
        self.last = max(self._records, default=0)
        self.bytes = sum(map(len, self._records.values()))

    def __len__(self) -> int:
        return len(self._records)

    async def read(self, first: int, last: int, ratio: float = 1.0) -> list[dict[str, Any]]:
        """What is there of these."""
        records = self._records
        return [
            with_block_sample(_decode(records[number]), ratio) for number in range(first, last + 1) if number in records
        ]


@dataclass(slots=True)
class Stretch:
    """Numbers in a row, and the book's numbers that they stand for."""

    start: int  # the sequence's
    first: int  # the book's
    count: int
    book: Book | None  # None: gone

    @property
    def end(self) -> int:
        """The last of them."""
        return self.start + self.count - 1

    @property
    def oldest(self) -> int:
        """The first one that may still be there."""
        return self.start + max(0, self.book.first - self.first) if self.book else self.end + 1


class DecisionSequence:
    """One numbering over all books."""

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []
        self._last = 0
        self._kept: list[KeptBook] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._stretches)

    def note(self, book: Book, since: int) -> None:
        """Number what a book holds beyond its record ``since``, and let go of what it dropped."""
        count = book.last - since
        if count > 0:
            latest = self._stretches[-1] if self._stretches else None
            if latest is not None and latest.book is book:
                latest.count += count
            else:
                self._stretches.append(Stretch(self._last + 1, since + 1, count, book))
            self._last += count
        self._stretches = [one for one in self._stretches if one.book is not book or one.first + one.count > book.first]

    def replace(self, book: Book, kept: KeptBook | None) -> None:
        """Go on with what was kept of a book, or without it."""
        kept = kept or None  # nothing was
        for stretch in self._stretches:
            if stretch.book is book:
                stretch.book = kept
        if kept is not None:
            self._kept.append(kept)
        while sum(map(len, self._kept)) > MAX_RECORDS or sum(one.bytes for one in self._kept) > MAX_BYTES:
            oldest = self._kept.pop(0)
            self.replace(oldest, None)
        self._stretches = [one for one in self._stretches if one.book is not None]

    async def after(self, seq: int, limit: int, ratio: float = 1.0) -> dict[str, Any]:
        """Records after ``seq``, at most ``limit``; ``next`` is where to go on, ``dropped`` what is gone for good."""
        found: list[dict[str, Any]] = []
        reached = self._last  # and no further, though more may be noted while records are read
        for stretch in list(self._stretches):
            start, end = max(stretch.oldest, seq + 1), min(stretch.end, reached)
            while start <= end and len(found) < limit:
                last = min(end, start + limit - len(found) - 1)
                found += await _read(stretch, start, last, ratio)
                start = last + 1
            if start <= end:  # the limit
                reached = max(start - 1, seq)
                break
        return {"decisions": found, "next": reached, "dropped": max(0, reached - seq - len(found))}


async def _read(stretch: Stretch, start: int, end: int, ratio: float) -> list[dict[str, Any]]:
    """Records of a stretch, under the sequence's numbers."""
    if stretch.book is None:
        return []
    offset = stretch.start - stretch.first
    records = await stretch.book.read(start - offset, end - offset, ratio)
    return [record | {"seq": record["seq"] + offset} for record in records]
