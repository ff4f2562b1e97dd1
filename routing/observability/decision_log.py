"""The latest decisions, for whoever comes to read them.

Bounded in number and in bytes, because a record of a long prompt carries thousands of block hashes. A record enters
when its request has ended; a reader asks for what came after the last sequence number it saw, and learns how many
records it came too late for. What it gets at once is bounded too, because a page is held and encoded as a whole.

Whose shape is taken: a request a second of each task group, and no more than ``MAX_PER_S`` of all.

Describing one costs a millisecond, so a request that is not looked at asks nothing but whether it is time to look. Once
a request was looked at and its group had its turn, the next look is a moment later, at whoever comes then: each group
is met as often as its traffic is, and none can keep this router busy with describing.
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
    from routing.balancing.decision import Decision
    from routing.http.request import Request


MAX_RECORDS: Final = 20_000
MAX_BYTES: Final = 32 << 20
MAX_SHOWN_BLOCKS: Final = 16_384  # block hashes in an answer, or those of one record: writing so many takes 3 ms
_RECORD_UNITS: Final = 25  # of them that a record without its blocks takes as long as, and looking at a block
_LOOK_UNITS: Final = 0.2
_RECORD_BYTES: Final = 950  # of a record without its blocks
_CANDIDATE_BYTES: Final = 56


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the latest records, in order. They no longer change, so writing them out may take its time."""

    start: int  # sequence number of the first one
    records: list[Record]
    ratio: float
    next: int  # where to go on
    dropped: int  # before these, and gone for good

    def shown(self) -> Iterator[dict[str, Any]]:
        """Each as the admin port shows it."""
        return (record.as_json(seq, self.ratio) for seq, record in enumerate(self.records, self.start))

    def as_json(self, shown: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole page, once its records are written out."""
        return {"decisions": shown, "next": self.next, "dropped": self.dropped}


class DecisionRing:
    """The latest records, oldest first."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._records: deque[tuple[Record, int]] = deque()  # with the bytes that each takes
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._bytes = 0
        self.last = 0  # sequence number of the newest record; the first one ever is 1

    def __len__(self) -> int:
        return len(self._records)

    @property
    def first(self) -> int:
        """Sequence number of the oldest record that is there; of the next one where none is."""
        return self.last - len(self._records) + 1

    @property
    def bytes(self) -> int:
        """Roughly what the records take in memory."""
        return self._bytes

    def add(self, record: Record) -> None:
        """Enter a record, and drop the oldest ones that no longer fit."""
        blocks = sum(map(len, record.blocks))
        size = _RECORD_BYTES + 8 * blocks + _CANDIDATE_BYTES * len(record.candidates)
        if record.structure is not None:
            size += len(record.structure)
        self._records.append((record, size))
        self.last += 1
        self._bytes += size
        while len(self._records) > self._max_records or self._bytes > self._max_bytes:
            self._bytes -= self._records.popleft()[1]

    def page(self, seq: int, limit: int, ratio: float = 1.0) -> Page:
        """Records after ``seq``, with the part ``ratio`` of their blocks, not written out yet.

        At most ``limit``, and fewer where their prompts are long: of ``MAX_SHOWN_BLOCKS`` hashes at most, beside which
        a record counts as well where only a part of them is shown.
        """
        first = self.first
        start = max(seq + 1, first)
        records: list[Record] = []
        units = 0.0
        for record, _ in islice(self._records, start - first, start - first + limit):
            units += record.block_count if ratio >= 1 else _RECORD_UNITS + (_LOOK_UNITS + ratio) * record.block_count
            if records and units > MAX_SHOWN_BLOCKS:
                break
            records.append(record)
        next_ = start + len(records) - 1 if records else max(0, min(seq, self.last))
        return Page(start, records, ratio, next_, max(0, first - seq - 1))


GROUP_S = 1.0  # between two of one task group
MAX_PER_S = 8.0  # of all groups together
LOOK_S = 0.02  # between two looks that found nothing to do
MAX_BODY_BYTES = 1 << 20  # whose tools are read once more
MAX_GROUPS = 4096  # whose turns are remembered

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class StructureSampler:
    """One router's. Times are of the clock that requests arrive by."""

    __slots__ = ("_described_at", "due_at")

    def __init__(self) -> None:
        self.due_at = 0.0  # when a group is looked up next
        self._described_at: dict[tuple[str, str], float] = {}

    def should_sample(self, decision: Decision, now: float) -> bool:
        """Whether it is the turn of a request's group, which then has had it."""
        if now < self.due_at:
            return False
        group = (decision.pool, decision.group)
        if now - self._described_at.get(group, -GROUP_S) < GROUP_S:
            self.due_at = now + LOOK_S
            return False
        self.due_at = now + 1 / MAX_PER_S
        if len(self._described_at) >= MAX_GROUPS:
            self._described_at.clear()
        self._described_at[group] = now
        return True


def structure_json(decision: Decision, request: Request) -> bytes | None:
    """The JSON of a request's shape; None for a prompt without segments. A millisecond: for when it has been sent."""
    try:
        shape = decision.keys.structure(_tools(request))
    except Exception as error:  # noqa: BLE001 - a description that fails is no reason to fail a client
        defect(logger, error, "shape")
        return None
    return _encode(shape) if shape.segments else None


def _tools(request: Request) -> Any:
    """The tools as they were sent, which the canonical prompt does not keep; None without any."""
    body = request.body
    if b'"tools"' not in body or len(body) > MAX_BODY_BYTES:
        return None
    return getattr(parse_body(request.head.path.decode(), body), "tools", None)
