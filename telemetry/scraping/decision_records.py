"""Decisions as routers report them: bounded parsing of a page, and storing it together with the cursor.

Everything a router sends is checked here before it reaches a table. Block hashes are sampled so that no more are stored
than the budget allows. The sampled part is a power of two, so that it changes seldom, and a smaller sample is a subset
of a larger one. It falls at once when prompts grow, and rises when the peak has faded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, TypeVar

import msgspec
from django.conf import settings
from django.db import transaction

from controlplane.models import Router
from telemetry.lab.chains import parse_hash
from telemetry.models import Decision, DecisionCursor
from telemetry.storage.store import Row, Table, store_rows

MIN_SAMPLE_RATIO = 2.0**-12
FADE_S = 600.0  # time in which a peak falls to a third
MAX_BLOCKS = 4096  # of one prompt; a router hashes 2,048 at most
MAX_JSON_BYTES = 32 << 10  # of candidates, and of a prompt structure; routers send less
MAX_CLOCK_SKEW = timedelta(hours=1)  # by which a router's clock may be fast
CANDIDATES_PER_S = 20.0  # decisions per router stored with candidates, which are most of a row's bytes
MIN_ELAPSED_S = 1.0  # a rate is not measured over less

T = TypeVar("T", bound=msgspec.Struct)
Name = Annotated[str, msgspec.Meta(max_length=256, pattern="^[^\\x00]*$")]
Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
BigCount = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
SmallCount = Annotated[int, msgspec.Meta(ge=0, le=2**15 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class PageError(ValueError):
    """The response is not a page of decisions."""


class FailedReplica(msgspec.Struct, frozen=True):
    """A replica that failed during a stream, after so many tokens."""

    replica: Name
    tokens: BigCount


class DecisionRecord(msgspec.Struct, frozen=True):
    """One decision as a router reports it. Fields are columns of ``Decision``."""

    at: Annotated[datetime, msgspec.Meta(tz=True)]
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    request_id: Name
    pool: Name
    group: Name
    matched_by: Name
    policy: Name
    revision: Count
    strategy: Name
    replica: Name
    reason: Name
    prompt_tokens_estimate: BigCount
    hash_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    block_count: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
    blocks: Annotated[list[Hash], msgspec.Meta(max_length=MAX_BLOCKS)]
    retries: SmallCount
    positions: Annotated[list[SmallCount], msgspec.Meta(max_length=MAX_BLOCKS)] | None = None
    arm: Name | None = None
    rank: SmallCount | None = None
    prefix: Hash | None = None
    session: Hash | None = None
    block_tokens: Count | None = None
    hit_tokens: BigCount | None = None
    status: SmallCount | None = None
    outcome: Name | None = None
    streamed: bool | None = None
    ttft_s: Seconds | None = None
    prefill_s: Seconds | None = None
    latency_s: Seconds | None = None
    prompt_tokens: BigCount | None = None
    cached_tokens: BigCount | None = None
    generated_tokens: BigCount | None = None
    request_digest: Hash | None = None
    digest_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    continued_after: Annotated[list[FailedReplica], msgspec.Meta(max_length=64)] | None = None
    candidates: Any = None
    prompt_structure: Any = None

    def __post_init__(self) -> None:
        """Check that there is a position for each block, within the prompt."""
        positions = range(self.block_count) if self.positions is None else self.positions
        if len(positions) != len(self.blocks) or (positions and max(positions) >= self.block_count):
            raise ValueError("blocks and positions do not belong to one prompt")


TABLE = Table(
    Decision._meta.db_table,  # noqa: SLF001 - Django documents it
    (*DecisionRecord.__struct_fields__, "router_id", "boot", "sample_ratio"),
)


class Page(msgspec.Struct, frozen=True):
    """The decisions after a sequence number."""

    boot: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern="^[^\\x00]*$")]
    next: BigCount
    dropped: BigCount
    decisions: list[msgspec.Raw]


@dataclass(slots=True)
class Progress:
    """A router's cursor, and the decisions that one run has stored so far."""

    router: Router
    cursor: DecisionCursor
    rows_left: int  # rows that this run may still store
    candidates_left: int
    blocks: int = 0  # of all prompts, sampled or not
    oldest: datetime | None = None
    newest: datetime | None = None

    def add(self, records: list[DecisionRecord]) -> None:
        """Count the records of a page."""
        self.rows_left -= len(records)
        for record in records:
            self.blocks += record.block_count
            self.oldest = min(self.oldest or record.at, record.at)
            self.newest = max(self.newest or record.at, record.at)

    def blocks_per_s(self, elapsed_s: float) -> float:
        """Blocks per second, over the time of the decisions or since the previous run, whichever is longer."""
        span_s = (self.newest - self.oldest).total_seconds() if self.newest and self.oldest else 0.0
        return self.blocks / max(span_s, elapsed_s, MIN_ELAPSED_S)


def faded_peak(peak: float, rate: float, elapsed_s: float) -> float:
    """The recent peak of a rate: ``rate``, or an earlier peak that fades with time."""
    return max(rate, peak * math.exp(-max(elapsed_s, 0.0) / FADE_S))


def sample_ratio(blocks_per_s: float, budget_per_s: float) -> float:
    """The largest power of two, at most 1, with which ``blocks_per_s`` stay within the budget."""
    if blocks_per_s <= budget_per_s:
        return 1.0
    return max(MIN_SAMPLE_RATIO, 2.0 ** math.floor(math.log2(budget_per_s / blocks_per_s)))


def read_page(body: bytes) -> Page:
    """Parse a page, but not its decisions yet; PageError for anything else."""
    try:
        return msgspec.json.decode(body, type=Page)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PageError(str(error)) from None


def _read_records(page: Page) -> list[DecisionRecord]:
    """The valid records of a page. An invalid one is skipped, so that a router never gets stuck at it."""
    records = []
    for raw in page.decisions:
        try:
            records.append(msgspec.json.decode(raw, type=DecisionRecord))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
    return records


@transaction.atomic
def record_page(progress: Progress, page: Page, *, ratio: float, now: datetime) -> bool:
    """Store the new decisions of a page and advance the cursor; whether there may be more.

    A page of another boot was requested with a sequence number of the former one, so it is requested again from 0.
    """
    cursor = progress.cursor
    if page.boot != cursor.boot:
        is_first = cursor.seq == 0
        cursor.boot, cursor.seq = page.boot, 0
        if not is_first:
            cursor.save()
            return True
    valid = _read_records(page)
    oldest, newest = now - timedelta(hours=settings.DECISIONS_RETENTION_H), now + MAX_CLOCK_SKEW
    records = [record for record in valid if record.seq > cursor.seq and oldest <= record.at <= newest]
    store_rows(TABLE, _rows(progress, records, ratio))
    has_advanced = page.next > cursor.seq
    duplicates = sum(record.seq <= cursor.seq for record in valid)
    cursor.dropped += page.dropped + len(page.decisions) - len(records) - duplicates
    cursor.collected += len(records)
    cursor.seq = max(cursor.seq, page.next)
    cursor.save()
    progress.add(records)
    return has_advanced and progress.rows_left > 0


def finish(progress: Progress, *, budget_per_s: float, now: datetime) -> None:
    """End a successful run: choose the part of the blocks that the next run requests."""
    cursor = progress.cursor
    elapsed_s = (now - cursor.at).total_seconds() if cursor.at else 0.0
    cursor.blocks_per_s = faded_peak(cursor.blocks_per_s, progress.blocks_per_s(elapsed_s), elapsed_s)
    cursor.sample_ratio = sample_ratio(cursor.blocks_per_s, budget_per_s)
    cursor.at, cursor.reason = now, ""
    cursor.save()


def fail(progress: Progress, reason: str) -> None:
    """Store why a router gave no page."""
    progress.cursor.reason = reason[:200]
    progress.cursor.save(update_fields=["reason"])


def _rows(progress: Progress, records: list[DecisionRecord], ratio: float) -> list[Row]:
    """Rows of a page. Candidates are stored with some of them, spread evenly, within what is left of the budget."""
    budget = min(progress.candidates_left, len(records))
    progress.candidates_left -= budget
    rows = []
    for index, record in enumerate(records):
        keeps_candidates = (index + 1) * budget // len(records) > index * budget // len(records)
        values = msgspec.structs.asdict(record) | {
            "arm": record.arm or "",
            "outcome": record.outcome or "",
            "prefix": parse_hash(record.prefix),
            "session": parse_hash(record.session),
            "request_digest": parse_hash(record.request_digest),
            "blocks": [parse_hash(block) for block in record.blocks],
            "prompt_structure": _bounded_json(record.prompt_structure),
            "continued_after": _bounded_json(msgspec.to_builtins(record.continued_after) or None),
            "candidates": _bounded_json(
                record.candidates if keeps_candidates or record.prompt_structure is not None else None
            ),
            "router_id": progress.router.pk,
            "boot": progress.cursor.boot,
            "sample_ratio": 1.0 if record.positions is None else ratio,
        }
        rows.append(tuple(values[column] for column in TABLE.columns))
    return rows


def _bounded_json(value: Any) -> str | None:
    """JSON that the column accepts; None for no value, or one that is too long."""
    if value is None:
        return None
    text = msgspec.json.encode(value)
    return None if len(text) > MAX_JSON_BYTES or b"\\u0000" in text else text.decode()
