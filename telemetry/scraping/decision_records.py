"""Which part of the blocks to ask a router for, so that no more are stored than there is room for.

A part is a power of two, so that it changes seldom and what was stored before and after has a common part: a smaller
one is a subset of a larger one. It falls at once when prompts grow, and rises when the peak of before has faded.

A page of ``/admin/decisions``, read with care: what a router says is bounded here before it reaches a table.

One page of decisions into the database: rows, and how far they go, in one transaction.
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
from telemetry.lab.chains import signed
from telemetry.models import Decision, DecisionCursor
from telemetry.storage.store import Row, Table, store_rows

SMALLEST = 2.0**-12
FADE_S = 600.0  # in which a peak falls to a third


def faded_peak(peak: float, rate: float, elapsed_s: float) -> float:
    """The highest rate of late; one of long ago counts less and less."""
    return max(rate, peak * math.exp(-max(elapsed_s, 0.0) / FADE_S))


def sample_ratio(blocks_per_s: float, budget_per_s: float) -> float:
    """The largest power of two, at most 1, with which ``blocks_per_s`` stay within the budget."""
    if blocks_per_s <= budget_per_s:
        return 1.0
    return max(SMALLEST, 2.0 ** math.floor(math.log2(budget_per_s / blocks_per_s)))


MOST_BLOCKS = 4096  # of one prompt; a router hashes 2,048 at most
MOST_JSON_BYTES = 32 << 10  # of candidates, and of an opening: routers describe fewer

T = TypeVar("T", bound=msgspec.Struct)

Name = Annotated[str, msgspec.Meta(max_length=256, pattern="^[^\\x00]*$")]
Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Small = Annotated[int, msgspec.Meta(ge=0, le=2**15 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class PageError(ValueError):
    """An answer that no router gives."""


class Told(msgspec.Struct, frozen=True):
    """One decision, as a router tells it."""

    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    at: Annotated[datetime, msgspec.Meta(tz=True)]
    request_id: Name
    pool: Name
    group: Name
    matched_by: Name
    policy: Name
    revision: Whole
    strategy: Name
    replica: Name
    reason: Name
    prompt_tokens_estimate: Count
    hash_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    block_count: Annotated[int, msgspec.Meta(ge=0, le=MOST_BLOCKS)]
    blocks: Annotated[list[Hash], msgspec.Meta(max_length=MOST_BLOCKS)]
    retries: Small
    positions: Annotated[list[Small], msgspec.Meta(max_length=MOST_BLOCKS)] | None = None
    arm: Name | None = None
    rank: Small | None = None
    prefix: Hash | None = None
    block_tokens: Whole | None = None
    hit_tokens: Count | None = None
    status: Small | None = None
    streamed: bool | None = None
    ttft_s: Seconds | None = None
    latency_s: Seconds | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    candidates: Any = None
    opening: Any = None

    def __post_init__(self) -> None:
        """The places are as many as the blocks, and within the prompt."""
        places = range(self.block_count) if self.positions is None else self.positions
        if len(places) != len(self.blocks) or (places and max(places) >= self.block_count):
            raise ValueError("blocks and positions are not those of one prompt")


class Page(msgspec.Struct, frozen=True):
    """What came after a number."""

    boot: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern="^[^\\x00]*$")]
    next: Count
    dropped: Count
    decisions: list[msgspec.Raw]


def read_page(body: bytes) -> Page:
    """The page, its decisions not looked at yet; PageError for anything else."""
    try:
        return _read(body, Page)
    except msgspec.MsgspecError as error:
        raise PageError(str(error)) from None


def read_decisions(page: Page) -> list[Told]:
    """Those that can be read; one that cannot is left out, so that a router is never stuck with it."""
    found = []
    for raw in page.decisions:
        try:
            found.append(_read(raw, Told))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
    return found


def bounded_json(value: Any) -> str | None:
    """JSON as a column takes it; None where there is none, or too much."""
    if value is None:
        return None
    text = msgspec.json.encode(value)
    return None if len(text) > MOST_JSON_BYTES or b"\\u0000" in text else text.decode()


def _read(text: bytes | msgspec.Raw, kind: type[T]) -> T:
    return msgspec.json.decode(text, type=kind)


COLUMNS = (
    *("at", "router_id", "boot", "seq", "pool", "group", "matched_by", "policy", "revision", "arm", "strategy"),
    *("replica", "rank", "reason", "status", "streamed", "ttft_s", "latency_s"),
    *("prompt_tokens_estimate", "prompt_tokens", "cached_tokens"),
    *("hit_tokens", "block_tokens", "hash_tokens", "prefix", "blocks", "positions", "block_count", "sample_ratio"),
    *("request_id", "retries", "candidates", "opening"),
)
TABLE = Table(Decision._meta.db_table, COLUMNS)  # noqa: SLF001 - Django documents it
AHEAD = timedelta(hours=1)  # that a router's clock may be
CANDIDATES_PER_S = 20.0  # of a router that keep their candidates, most of a row's bytes; those described come on top
LEAST_S = 1.0  # a rate is not measured over less


@dataclass(slots=True)
class Progress:
    """A router's cursor, and what one run has seen of it."""

    router: Router
    cursor: DecisionCursor
    rows_left: int  # that this run may still store
    candidates_left: int
    blocks: int = 0  # of all prompts seen, sampled or not
    oldest: datetime | None = None
    newest: datetime | None = None

    def see(self, told: list[Told]) -> None:
        """Count what a page brought."""
        self.rows_left -= len(told)
        for one in told:
            self.blocks += one.block_count
            self.oldest = min(self.oldest or one.at, one.at)
            self.newest = max(self.newest or one.at, one.at)

    def blocks_per_s(self, elapsed_s: float) -> float:
        """Blocks a second of the time that the decisions cover, or that went by since the run before."""
        span_s = (self.newest - self.oldest).total_seconds() if self.newest and self.oldest else 0.0
        return self.blocks / max(span_s, elapsed_s, LEAST_S)


@transaction.atomic
def record_page(progress: Progress, page: Page, *, ratio: float, now: datetime) -> bool:
    """Store what is new on a page and move the cursor; whether there may be more.

    The page of another life of the router was asked for with a number of the former one: it is asked for anew.
    """
    cursor = progress.cursor
    if page.boot != cursor.boot:
        is_new = cursor.seq == 0
        cursor.boot, cursor.seq = page.boot, 0
        if not is_new:
            cursor.save()
            return True
    readable = read_decisions(page)
    told = [one for one in readable if one.seq > cursor.seq and _is_credible(one.at, now)]
    store_rows(TABLE, _rows(progress, told, ratio))
    has_moved = page.next > cursor.seq
    late = sum(one.seq <= cursor.seq for one in readable)
    cursor.dropped += page.dropped + len(page.decisions) - len(told) - late
    cursor.collected += len(told)
    cursor.seq = max(cursor.seq, page.next)
    cursor.save()
    progress.see(told)
    return has_moved and progress.rows_left > 0


def finish(progress: Progress, *, budget_per_s: float, now: datetime) -> None:
    """The run is over: choose which part of the blocks is asked for next."""
    cursor = progress.cursor
    elapsed_s = (now - cursor.at).total_seconds() if cursor.at else 0.0
    cursor.blocks_per_s = faded_peak(cursor.blocks_per_s, progress.blocks_per_s(elapsed_s), elapsed_s)
    cursor.sample_ratio = sample_ratio(cursor.blocks_per_s, budget_per_s)
    cursor.at, cursor.reason = now, ""
    cursor.save()


def fail(progress: Progress, reason: str) -> None:
    """Note why a router told nothing."""
    progress.cursor.reason = reason[:200]
    progress.cursor.save(update_fields=["reason"])


def _is_credible(at: datetime, now: datetime) -> bool:
    """Whether a decision's time is one that is kept: each day has a table of its own."""
    return now - timedelta(hours=settings.DECISIONS_RETENTION_H) <= at <= now + AHEAD


def _rows(progress: Progress, told: list[Told], ratio: float) -> list[Row]:
    """Rows of a page; the candidates of some of them, spread evenly, as long as there are any left to keep."""
    kept = min(progress.candidates_left, len(told))
    progress.candidates_left -= kept
    return [
        _row(
            progress.router.pk, progress.cursor.boot, one, ratio, (at + 1) * kept // len(told) > at * kept // len(told)
        )
        for at, one in enumerate(told)
    ]


def _row(router_id: int, boot: str, told: Told, ratio: float, keeps_candidates: bool) -> Row:
    return (
        told.at,
        router_id,
        boot,
        told.seq,
        told.pool,
        told.group,
        told.matched_by,
        told.policy,
        told.revision,
        told.arm or "",
        told.strategy,
        told.replica,
        told.rank,
        told.reason,
        told.status,
        told.streamed,
        told.ttft_s,
        told.latency_s,
        told.prompt_tokens_estimate,
        told.prompt_tokens,
        told.cached_tokens,
        told.hit_tokens,
        told.block_tokens,
        told.hash_tokens,
        signed(told.prefix),
        [signed(block) for block in told.blocks],
        told.positions,
        told.block_count,
        1.0 if told.positions is None else ratio,
        told.request_id,
        told.retries,
        bounded_json(told.candidates) if keeps_candidates or told.opening is not None else None,
        bounded_json(told.opening),
    )
