"""The decisions of all workers as one numbered sequence.

Theory of operation. Records stay in the worker that made them. The parent learns how many there are, and records which
of its own numbers stand for which of the worker's. A reader's numbers are mapped to workers, and only the requested
records are transferred. The parent retains the records of a worker that is replaced in good order, up to
``MAX_RECORDS`` and ``MAX_BYTES``; those of a killed worker are lost and count as dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from routing.observability.decision_log import MAX_BYTES, MAX_RECORDS, with_block_sample

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.decode


class DecisionSource(Protocol):
    """A worker's records. Numbers are the source's own, from 1 on."""

    first: int  # oldest record that may be available
    last: int  # newest known record

    async def read(self, first: int, last: int, ratio: float) -> list[dict[str, Any]]:
        """The available records ``first`` to ``last``, each with its ``seq`` and a sample of its block hashes."""
        ...


class RetainedDecisions:
    """Records of a worker that has exited."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._records = {row["seq"]: _encode(row) for row in rows}
        self.first = min(self._records, default=1)
        self.last = max(self._records, default=0)
        self.bytes = sum(map(len, self._records.values()))

    def __len__(self) -> int:
        return len(self._records)

    async def read(self, first: int, last: int, ratio: float = 1.0) -> list[dict[str, Any]]:
        """The available records ``first`` to ``last``."""
        records = self._records
        numbers = (number for number in range(first, last + 1) if number in records)
        return [with_block_sample(_decode(records[number]), ratio) for number in numbers]


@dataclass(slots=True)
class Segment:
    """Consecutive numbers of the sequence, and the source's numbers that they stand for."""

    start: int  # the first number in the sequence
    first: int  # the same record's number at the source
    count: int
    source: DecisionSource | None  # None: lost

    @property
    def end(self) -> int:
        """The last number in the sequence."""
        return self.start + self.count - 1

    @property
    def oldest(self) -> int:
        """The number of the oldest record that may still be available; the one after ``end`` if none is."""
        return self.start + max(0, self.source.first - self.first) if self.source else self.end + 1

    async def read(self, start: int, end: int, ratio: float) -> list[dict[str, Any]]:
        """Records with the sequence's numbers."""
        if self.source is None:
            return []
        offset = self.start - self.first
        rows = await self.source.read(start - offset, end - offset, ratio)
        return [row | {"seq": row["seq"] + offset} for row in rows]


class DecisionSequence:
    """One numbering over all sources."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._last = 0
        self._retained: list[RetainedDecisions] = []  # oldest first

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, source: DecisionSource, since: int) -> None:
        """Number a source's records after ``since``, and drop segments whose records the source has dropped."""
        count = source.last - since
        if count > 0:
            latest = self._segments[-1] if self._segments else None
            if latest is not None and latest.source is source:
                latest.count += count
            else:
                self._segments.append(Segment(self._last + 1, since + 1, count, source))
            self._last += count
        self._segments = [
            segment
            for segment in self._segments
            if segment.source is not source or segment.first + segment.count > source.first
        ]

    def replace(self, source: DecisionSource, retained: RetainedDecisions | None) -> None:
        """Replace a source by its retained records, or mark its records as lost."""
        retained = retained or None  # empty records count as none
        for segment in self._segments:
            if segment.source is source:
                segment.source = retained
        if retained is not None:
            self._retained.append(retained)
        while (
            sum(map(len, self._retained)) > MAX_RECORDS or sum(records.bytes for records in self._retained) > MAX_BYTES
        ):
            self.replace(self._retained.pop(0), None)
        self._segments = [segment for segment in self._segments if segment.source is not None]

    async def after(self, seq: int, limit: int, ratio: float = 1.0) -> dict[str, Any]:
        """At most ``limit`` records after ``seq``; ``next`` is where to continue, ``dropped`` counts lost records."""
        rows: list[dict[str, Any]] = []
        reached = self._last  # the end, even if records are added while others are read
        for segment in list(self._segments):
            start, end = max(segment.oldest, seq + 1), min(segment.end, reached)
            while start <= end and len(rows) < limit:
                page_end = min(end, start + limit - len(rows) - 1)
                rows += await segment.read(start, page_end, ratio)
                start = page_end + 1
            if start <= end:  # the limit
                reached = max(start - 1, seq)
                break
        return {"decisions": rows, "next": reached, "dropped": max(0, reached - seq - len(rows))}
