"""One page of decisions into the database: rows, and how far they go, in one transaction."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction

from controlplane.models import Router
from telemetry.collecting.budget import faded_peak, sample_ratio
from telemetry.collecting.page import Page, Told, bounded_json, read_decisions
from telemetry.lab.hashes import signed
from telemetry.models import Decision, DecisionCursor
from telemetry.storage.store import Row, Table, store_rows

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
