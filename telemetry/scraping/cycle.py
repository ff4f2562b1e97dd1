"""Scrape cycles: which targets a shard scrapes together, when it is due, and one cycle of a shard.

Theory of operation. The fleet is split into as many shards as it needs for each to have about ``SHARD_TARGETS``
targets; a hash of a target's id decides its shard. Each shard has a schedule of its own: multiples of the scrape
interval, shifted by the shard's part of an interval, so that the work is spread evenly and late targets of one shard
delay no other. When the number of shards changes, targets move to another schedule: one reading covers an unusual time,
and no total changes.

A cycle holds its shard's advisory lock, so a cycle that still runs makes the next one skip. Every target has its own
deadline, below the interval. The event loop runs until results arrive and stands still while they are written, so a
target that hangs delays no other reading. ``due`` is the cycle's time on the schedule: a task delivered twice makes one
reading. A cycle may start a little early or late without missing its time.

A shard's row says when its last cycle was due, how late it started, how long it took and how many cycles were missed.
While the database has no space, a cycle ends with that error and the row says so. What is stored stays, the raw
counters stay with it, and the next cycle that can write stores everything that was counted meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from django.conf import settings
from django.db import OperationalError
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.database.base import is_disk_full
from controlplane.models import Replica, ReplicaState, Router
from telemetry.metrics.engine import read_replica
from telemetry.metrics.exposition import ROUTER_BYTES
from telemetry.metrics.router import read_router
from telemetry.models import ScrapeShard
from telemetry.scraping.fetch import Requests, scrape
from telemetry.scraping.merge import ScrapeFailure
from telemetry.scraping.record import ReplicaScrape, RouterScrape, Scrape, record_scrapes
from telemetry.storage.locks import SCRAPE, advisory_lock

log = logging.getLogger(__name__)
SHARD_TARGETS = 128  # a third of a second's work for one core
MAX_SHARDS = 64  # above 8,192 targets shards grow instead
EARLY_SHARE = 0.2  # of the interval: a cycle this close to its next due time may take it
AHEAD_SHARE = 1.5  # of the interval: how far ahead shards are scheduled, so that beat may be half an interval late
EPSILON_S = 1e-6  # Unix times as floats; PostgreSQL keeps microseconds
MAX_SCRAPE_S = 5.0
DEADLINE_SHARE = 0.8  # of the interval
BATCH_S = 0.25  # how long the first results wait to be written together with others
CONCURRENCY = 512  # scrapes at once: if more than that hang, the others wait for their deadlines


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``count`` shards, numbered from 0."""

    number: int
    count: int

    def holds(self, target: str) -> bool:
        """Whether a target, by a name that never changes, belongs to this shard."""
        return zlib.crc32(target.encode()) % self.count == self.number

    def phase_s(self, interval_s: float) -> float:
        """Shift of this shard's schedule against multiples of the interval since the epoch."""
        return interval_s * self.number / self.count

    def due_s(self, now_s: float, interval_s: float, last_due_s: float | None) -> float | None:
        """The due time that a cycle at ``now_s`` takes: the last one, or the next if that is near; None if taken.

        A ``last_due_s`` far in the future means that the clock was set back.
        """
        due_s = self._at_or_before(now_s, interval_s)
        if last_due_s is None or last_due_s < due_s - EPSILON_S or last_due_s > due_s + interval_s + EPSILON_S:
            return due_s
        next_s = due_s + interval_s
        return next_s if last_due_s <= due_s + EPSILON_S and next_s - now_s <= EARLY_SHARE * interval_s else None

    def upcoming_s(self, now_s: float, interval_s: float) -> list[float]:
        """The due times after now that one run of beat schedules, ascending."""
        first_s = self._at_or_before(now_s, interval_s) + interval_s
        ahead_s = now_s + AHEAD_SHARE * interval_s - first_s
        return [first_s + interval_s * number for number in range(math.floor(ahead_s / interval_s) + 1)]

    def _at_or_before(self, now_s: float, interval_s: float) -> float:
        phase_s = self.phase_s(interval_s)
        return math.floor((now_s - phase_s) / interval_s + EPSILON_S) * interval_s + phase_s


@dataclass(frozen=True, slots=True)
class Cycle:
    """One completed cycle of a shard."""

    due: datetime
    scrapes: int
    failures: int
    elapsed_s: float


def shards_for(targets: int) -> list[Shard]:
    """The shards of a fleet with this many replicas and routers; at least one."""
    count = min(max(1, math.ceil(targets / SHARD_TARGETS)), MAX_SHARDS)
    return [Shard(number, count) for number in range(count)]


def missed_cycles(last_due_s: float | None, due_s: float, interval_s: float) -> int:
    """How many due times lie between two cycles of a shard; 0 after the clock was set back."""
    return 0 if last_due_s is None else max(0, round((due_s - last_due_s) / interval_s) - 1)


def fleet_shards() -> list[Shard]:
    """The shards that the fleet needs now; rows of other shards are deleted. Three queries."""
    shards = shards_for(_replicas().count() + _routers().count())
    ScrapeShard.objects.filter(number__gte=len(shards)).delete()
    return shards


def upcoming_cycles(shards: Iterable[Shard], now: datetime) -> list[tuple[Shard, datetime, datetime]]:
    """(shard, due time, expiry) of the cycles to schedule, by due time."""
    interval_s = float(settings.SCRAPE_INTERVAL_S)
    cycles = [
        (shard, datetime.fromtimestamp(due_s, UTC), datetime.fromtimestamp(due_s + interval_s, UTC))
        for shard in shards
        for due_s in shard.upcoming_s(now.timestamp(), interval_s)
    ]
    return sorted(cycles, key=lambda cycle: cycle[1])


def scrape_shard(shard: Shard, now_s: float | None = None) -> Cycle | None:
    """Scrape the shard's replicas that are not disabled and its routers that are present.

    None where another cycle of the shard runs, or has taken the due time.
    """
    with advisory_lock(SCRAPE + shard.number) as acquired:
        if not acquired:
            log.info("the previous cycle of shard %d still runs; this one is skipped", shard.number)
            return None
        try:
            return _run_cycle(shard, time.time() if now_s is None else now_s)
        except OperationalError as error:
            if is_disk_full(error):
                _note_database_full(shard)
            raise


def _run_cycle(shard: Shard, now_s: float) -> Cycle | None:
    started_s = time.monotonic()
    due = _take_due_time(shard, now_s)
    if due is None:
        return None
    scrapes = failures = 0
    for batch in _batches(shard, min(MAX_SCRAPE_S, DEADLINE_SHARE * settings.SCRAPE_INTERVAL_S)):
        replicas = [scrape for scrape in batch if isinstance(scrape, ReplicaScrape)]
        routers = [scrape for scrape in batch if isinstance(scrape, RouterScrape)]
        record_scrapes(replicas, routers, due=due)
        scrapes += len(batch)
        failures += sum(isinstance(scrape.outcome, ScrapeFailure) for scrape in batch)
    cycle = Cycle(due, scrapes, failures, time.monotonic() - started_s)
    ScrapeShard.objects.filter(number=shard.number).update(
        targets=scrapes, failures=failures, took_s=round(cycle.elapsed_s, 3), refused_since=None
    )
    return cycle


def _note_database_full(shard: Shard) -> None:
    """An existing row can usually be updated in place on a full disk; if not, the shard's lag shows the problem."""
    with suppress(OperationalError):
        ScrapeShard.objects.filter(number=shard.number, refused_since=None).update(refused_since=timezone.now())


def _take_due_time(shard: Shard, now_s: float) -> datetime | None:
    """Take the cycle's due time; None where it is taken. The caller holds the shard's lock."""
    interval_s = float(settings.SCRAPE_INTERVAL_S)
    last = ScrapeShard.objects.filter(number=shard.number).first()
    last_due_s = last.due_at.timestamp() if last else None
    due_s = shard.due_s(now_s, interval_s, last_due_s)
    if due_s is None:
        return None
    due = datetime.fromtimestamp(due_s, UTC)
    ScrapeShard.objects.update_or_create(
        number=shard.number,
        defaults={
            "due_at": due,
            "lag_s": round(max(0.0, now_s - due_s), 3),
            "took_s": None,
            "missed": (last.missed if last else 0) + missed_cycles(last_due_s, due_s, interval_s),
        },
    )
    return due


def _replicas() -> QuerySet[Replica]:
    """Replicas that are scraped directly, not by a Prometheus server."""
    return Replica.objects.exclude(state=ReplicaState.DISABLED).exclude(pool__read_from__server__enabled=True)


def _routers() -> QuerySet[Router]:
    return Router.objects.filter(lost_at=None)


def _batches(shard: Shard, deadline_s: float) -> Iterator[list[Scrape]]:
    """The scrapes of the shard's targets, in batches as they finish. Four queries at most, two of them for ids."""
    replica_ids = [pk for pk in _replicas().values_list("pk", flat=True) if shard.holds(f"replica {pk}")]
    router_ids = [pk for pk in _routers().values_list("pk", flat=True) if shard.holds(f"router {pk}")]
    slots = asyncio.Semaphore(CONCURRENCY)
    with Requests[Scrape]() as requests:

        async def scrape_replica(replica: Replica) -> Scrape:
            url = f"{replica.url}/metrics"
            async with slots:
                return ReplicaScrape(replica, await scrape(requests.client, url, read_replica, deadline_s=deadline_s))

        async def scrape_router(router: Router) -> Scrape:
            url = f"{router.admin_url.rstrip('/')}/metrics?buckets=fine"
            async with slots:
                outcome = await scrape(requests.client, url, read_router, deadline_s=deadline_s, max_bytes=ROUTER_BYTES)
                return RouterScrape(router, outcome)

        for replica in Replica.objects.filter(pk__in=replica_ids).select_related("pool"):
            requests.start(scrape_replica(replica))
        for router in Router.objects.filter(pk__in=router_ids):
            requests.start(scrape_router(router))
        for batch in requests.batches(BATCH_S):
            yield [task.result() for task in batch]
