"""The latest decisions of a router process, and the choice of requests whose prompt structure is recorded.

The log is bounded in records and in bytes, because a record of a long prompt has thousands of block hashes. A record is
added when its request has ended. A reader asks for the records after the last sequence number it has seen, and learns
how many were dropped before it came. Pages are bounded too, because a page is built and encoded as a whole.

Describing a prompt structure costs a millisecond. So one request per second and task group is described, at most
``MAX_PER_S`` of all groups; other requests only compare the time. After a request whose group was described recently,
the next lookup is a moment later, so that each group is sampled as often as its traffic allows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from routing.log import defect
from routing.observability.decision_record import Record
from routing.prompt.parsing import parse_body

if TYPE_CHECKING:
    from routing.balancing.placement import Decision
    from routing.http.request import Request


MAX_RECORDS: Final = 20_000
MAX_BYTES: Final = 32 << 20
MAX_SHOWN_BLOCKS: Final = 16_384  # block hashes of a page with several records: encoding so many takes 3 ms
_RECORD_UNITS: Final = 25  # time to encode a record without blocks, in units of that of one block hash
_SCAN_UNITS: Final = 0.2  # time to compare a block hash with the limit of a sample
_RECORD_BYTES: Final = 950  # of a record without its blocks
_CANDIDATE_BYTES: Final = 56

GROUP_S = 1.0  # between two described requests of one task group
MAX_PER_S = 8.0  # described requests of all groups together
LOOKUP_S = 0.02  # between two lookups that found a recently described group
MAX_BODY_BYTES = 1 << 20  # of a request whose tools are described
MAX_GROUPS = 4096  # whose times are remembered

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the latest records, in order. They no longer change, so encoding them may take its time."""

    start: int  # sequence number of the first one
    records: list[Record]
    ratio: float
    next: int  # where the next page starts
    dropped: int  # records before these that are no longer available

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each record in the format of the admin port."""
        return (record.as_json(seq, self.ratio) for seq, record in enumerate(self.records, self.start))

    def as_json(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole page with its ``rows``."""
        return {"decisions": rows, "next": self.next, "dropped": self.dropped}


class DecisionRing:
    """The latest records, oldest first."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self.bytes = 0  # approximate memory of the records
        self.last = 0  # sequence number of the newest record; the first one ever is 1
        self._records: deque[tuple[Record, int]] = deque()  # with the bytes of each
        self._max_records = max_records
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._records)

    @property
    def first(self) -> int:
        """Sequence number of the oldest available record; of the next one if there is none."""
        return self.last - len(self._records) + 1

    def add(self, record: Record) -> None:
        """Add a record, and drop the oldest ones beyond the limits."""
        size = _RECORD_BYTES + 8 * record.block_count + _CANDIDATE_BYTES * len(record.candidates)
        if record.structure is not None:
            size += len(record.structure)
        self._records.append((record, size))
        self.last += 1
        self.bytes += size
        while len(self._records) > self._max_records or self.bytes > self._max_bytes:
            self.bytes -= self._records.popleft()[1]

    def page(self, seq: int, limit: int, ratio: float = 1.0) -> Page:
        """At most ``limit`` records after ``seq``, with a sample ``ratio`` of their blocks.

        A page has at most ``MAX_SHOWN_BLOCKS`` hashes, or one record. Sampled pages have more records, as many as take
        the same time to encode.
        """
        first = self.first
        start = max(seq + 1, first)
        records: list[Record] = []
        units = 0.0
        for record, _ in islice(self._records, start - first, start - first + limit):
            units += record.block_count if ratio >= 1 else _RECORD_UNITS + (_SCAN_UNITS + ratio) * record.block_count
            if records and units > MAX_SHOWN_BLOCKS:
                break
            records.append(record)
        next_ = start + len(records) - 1 if records else max(0, min(seq, self.last))
        return Page(start, records, ratio, next_, max(0, first - seq - 1))


class StructureSampler:
    """Chooses the requests to describe. Times are of the clock of ``Request.arrived_at``."""

    __slots__ = ("_described_at", "due_at")

    def __init__(self) -> None:
        self.due_at = 0.0  # when the next request's group is looked up
        self._described_at: dict[tuple[str, str], float] = {}

    def should_sample(self, decision: Decision, now: float) -> bool:
        """Whether to describe this request; if so, the time of its group is recorded."""
        if now < self.due_at:
            return False
        group = (decision.pool, decision.group)
        if now - self._described_at.get(group, -GROUP_S) < GROUP_S:
            self.due_at = now + LOOKUP_S
            return False
        self.due_at = now + 1 / MAX_PER_S
        if len(self._described_at) >= MAX_GROUPS:
            self._described_at.clear()
        self._described_at[group] = now
        return True


def structure_json(decision: Decision, request: Request) -> bytes | None:
    """The prompt structure of a request as JSON; None for a prompt without segments. Takes 1 ms: call after sending."""
    try:
        structure = decision.keys.structure(_tools(request))
    except Exception as error:  # noqa: BLE001 - a failed description must not fail the request
        defect(logger, error, "prompt structure")
        return None
    return _encode(structure) if structure.segments else None


def _tools(request: Request) -> Any:
    """The tools as they were sent, which the canonical prompt does not contain; None without any."""
    body = request.body
    if b'"tools"' not in body or len(body) > MAX_BODY_BYTES:
        return None
    return getattr(parse_body(request.head.path.decode(), body), "tools", None)
