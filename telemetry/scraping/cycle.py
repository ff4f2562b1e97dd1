"""Which part of the fleet is scraped together, and when. Pure.

Theory of operation. A fleet is cut into as many shards as it needs for each to hold about ``SHARD_TARGETS`` targets; a
target belongs to the shard that a hash of its name gives, so nobody has to be told. Each shard has a grid of its own:
the intervals since the epoch, moved by the shard's part of an interval, so that the shards' work is spread evenly over
time and one shard's late targets keep nobody else waiting. When a fleet grows into more shards, its targets move to
other grids: that costs one reading of an unusual length, and no total.

One tick of a shard: scrape its part of the fleet at once, store what comes as it comes.

Theory of operation. A tick holds its shard's advisory lock, so that one still running makes the next one skip. Every
target gets its own deadline, below the interval, and all are fetched on one event loop. The loop runs until something
came, stops while that is written to the database, and goes on: a target that hangs holds back nobody's reading, and
no database call runs on the loop. ``due`` is the tick's place on the shard's grid, so that two beats, or one
task delivered twice, make one reading. A tick may come a little early or late without missing its place.

A shard's row says when it was due, how late it began, how long it took and how many ticks it has missed, so that
nobody has to infer from charts that scraping cannot keep up. While the database has no room, a tick ends with that
error and its row says so: what was stored stays, what is remembered of the counters stays with it, and the first tick
that finds room stores what was counted meanwhile.
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

import httpx
from django.conf import settings
from django.db import OperationalError
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.database.base import is_disk_full
from controlplane.egress import fleet_rules, guarded_async_client
from controlplane.models import Replica, ReplicaState, Router
from telemetry.metrics.engine import read_replica
from telemetry.metrics.exposition import ROUTER_BYTES
from telemetry.metrics.router import read_router
from telemetry.models import ScrapeShard
from telemetry.scraping.fetch import scrape
from telemetry.scraping.merge import Failure
from telemetry.scraping.record import ReplicaScrape, RouterScrape, record_scrapes
from telemetry.storage.locks import SCRAPE, advisory_lock

SHARD_TARGETS = 128  # a third of a second's work for one core
MOST_SHARDS = 64  # above 8,192 targets shards grow instead
EARLY_SHARE = 0.2  # of the interval: a tick this close to the next place on the grid may take it
AHEAD_SHARE = 1.5  # of the interval: how far ahead shards are told, so that a tick of beat may be late or lost by half


@dataclass(frozen=True, slots=True)
class Shard:
    """Number ``number`` (from 0) of ``of`` shards."""

    number: int
    of: int

    def holds(self, target: str) -> bool:
        """Whether a target, by a name that never changes, is one of this shard's."""
        return zlib.crc32(target.encode()) % self.of == self.number

    def phase_s(self, interval_s: float) -> float:
        """How far its grid lies behind the intervals since the epoch."""
        return interval_s * self.number / self.of

    def place(self, now_s: float, interval_s: float, taken_s: float | None) -> float | None:
        """When this tick's readings are due: its place on the grid, or the next one when that is near, or None.

        ``taken_s`` is the newest place that was taken; one that lies far ahead means that the clock was set back.
        """
        place_s = self._at_or_before(now_s, interval_s)
        if taken_s is None or taken_s < place_s - EPSILON_S or taken_s > place_s + interval_s + EPSILON_S:
            return place_s
        next_s = place_s + interval_s
        return next_s if taken_s <= place_s + EPSILON_S and next_s - now_s <= EARLY_SHARE * interval_s else None

    def dues_s(self, now_s: float, interval_s: float) -> list[float]:
        """The places on the grid from now on that a tick of beat tells the workers of, ascending."""
        first_s = self._at_or_before(now_s, interval_s) + interval_s
        ahead_s = now_s + AHEAD_SHARE * interval_s - first_s
        return [first_s + interval_s * number for number in range(math.floor(ahead_s / interval_s) + 1)]

    def _at_or_before(self, now_s: float, interval_s: float) -> float:
        phase_s = self.phase_s(interval_s)
        return math.floor((now_s - phase_s) / interval_s + EPSILON_S) * interval_s + phase_s


EPSILON_S = 1e-6  # times of day as floats, of which PostgreSQL keeps microseconds


def shards_for(targets: int) -> list[Shard]:
    """The shards of a fleet of so many replicas and routers; one at least."""
    of = min(max(1, math.ceil(targets / SHARD_TARGETS)), MOST_SHARDS)
    return [Shard(number, of) for number in range(of)]


def missed_ticks(last_s: float | None, due_s: float, interval_s: float) -> int:
    """How many places on the grid were left out between two ticks of a shard; 0 after the clock was set back."""
    return 0 if last_s is None else max(0, round((due_s - last_s) / interval_s) - 1)


log = logging.getLogger(__name__)
LONGEST_S = 5.0  # for one scrape (S8)
DEADLINE_SHARE = 0.8  # of the interval
BATCH_S = 0.25  # how long what came first waits for others to be written with
CONCURRENCY = 512  # scrapes at once: more than may hang, since those behind them would wait for their deadlines

Scrape = ReplicaScrape | RouterScrape


@dataclass(frozen=True, slots=True)
class Tick:
    """What a tick did."""

    due: datetime
    scrapes: int
    failures: int
    elapsed_s: float


def fleet_shards() -> list[Shard]:
    """The shards that the fleet needs now; rows of others go. Three queries."""
    shards = shards_for(_replicas().count() + _routers().count())
    ScrapeShard.objects.filter(number__gte=len(shards)).delete()
    return shards


def dues(shards: Iterable[Shard], now: datetime) -> list[tuple[Shard, datetime, datetime]]:
    """(shard, when it is due, when that tick is no longer worth anything) of the ticks that lie ahead, by time."""
    interval_s = float(settings.SCRAPE_INTERVAL_S)
    found = [
        (shard, datetime.fromtimestamp(due_s, UTC), datetime.fromtimestamp(due_s + interval_s, UTC))
        for shard in shards
        for due_s in shard.dues_s(now.timestamp(), interval_s)
    ]
    return sorted(found, key=lambda tick: tick[1])


def scrape_shard(shard: Shard, now_s: float | None = None) -> Tick | None:
    """Scrape the shard's replicas that are not disabled and its routers that are present.

    None where another tick is at it, or has been.
    """
    with advisory_lock(SCRAPE + shard.number) as ours:
        if not ours:
            log.info("the previous scrape of shard %d still runs; this one is left out", shard.number)
            return None
        try:
            return _scrape(shard, time.time() if now_s is None else now_s)
        except OperationalError as error:
            if is_disk_full(error):
                _note_refusal(shard)
            raise


def _scrape(shard: Shard, now_s: float) -> Tick | None:
    started_s = time.monotonic()
    due = _begin(shard, now_s)
    if due is None:
        return None
    scrapes = failures = 0
    for batch in _batches(shard, min(LONGEST_S, DEADLINE_SHARE * settings.SCRAPE_INTERVAL_S)):
        record_scrapes(
            [scrape for scrape in batch if isinstance(scrape, ReplicaScrape)],
            [scrape for scrape in batch if isinstance(scrape, RouterScrape)],
            due=due,
        )
        scrapes += len(batch)
        failures += sum(isinstance(scrape.outcome, Failure) for scrape in batch)
    tick = Tick(due, scrapes, failures, time.monotonic() - started_s)
    ScrapeShard.objects.filter(number=shard.number).update(
        targets=scrapes, failures=failures, took_s=round(tick.elapsed_s, 3), refused_since=None
    )
    return tick


def _note_refusal(shard: Shard) -> None:
    """A row that is there can be changed in its place on a disk that is full, mostly; if not, the lag tells."""
    refused = ScrapeShard.objects.filter(number=shard.number, refused_since=None)
    with suppress(OperationalError):
        refused.update(refused_since=timezone.now())


def _begin(shard: Shard, now_s: float) -> datetime | None:
    """Take the tick's place on the shard's grid; None where that is taken. The shard's lock is held."""
    interval_s = float(settings.SCRAPE_INTERVAL_S)
    last = ScrapeShard.objects.filter(number=shard.number).first()
    last_s = last.due_at.timestamp() if last else None
    due_s = shard.place(now_s, interval_s, last_s)
    if due_s is None:
        return None
    due = datetime.fromtimestamp(due_s, UTC)
    ScrapeShard.objects.update_or_create(
        number=shard.number,
        defaults={
            "due_at": due,
            "lag_s": round(max(0.0, now_s - due_s), 3),
            "took_s": None,
            "missed": (last.missed if last else 0) + missed_ticks(last_s, due_s, interval_s),
        },
    )
    return due


def _replicas() -> QuerySet[Replica]:
    """Those that no metrics server scrapes for us."""
    return Replica.objects.exclude(state=ReplicaState.DISABLED).exclude(pool__read_from__server__enabled=True)


def _routers() -> QuerySet[Router]:
    return Router.objects.filter(lost_at=None)


def _targets(shard: Shard) -> tuple[list[Replica], list[Router]]:
    """Its replicas, with their pool, and its routers. At most four queries, two of them for numbers alone."""
    replica_ids = [pk for pk in _replicas().values_list("pk", flat=True) if shard.holds(f"replica {pk}")]
    router_ids = [pk for pk in _routers().values_list("pk", flat=True) if shard.holds(f"router {pk}")]
    replicas = Replica.objects.filter(pk__in=replica_ids).select_related("pool")
    return list(replicas), list(Router.objects.filter(pk__in=router_ids))


def _batches(shard: Shard, deadline_s: float) -> Iterator[list[Scrape]]:
    """Every target's scrape, in batches as they come in; the event loop stands still while a batch is used."""
    replicas, routers = _targets(shard)
    if not replicas and not routers:
        return
    with asyncio.Runner() as runner:
        client = guarded_async_client(fleet_rules())
        try:
            pending = runner.run(_start(client, replicas, routers, deadline_s))
            while pending:
                done, pending = runner.run(_next(pending))
                yield [task.result() for task in done]
        finally:
            runner.run(client.aclose())


async def _start(
    client: httpx.AsyncClient, replicas: list[Replica], routers: list[Router], deadline_s: float
) -> set[asyncio.Task[Scrape]]:
    room = asyncio.Semaphore(CONCURRENCY)

    async def replica_scrape(replica: Replica) -> Scrape:
        async with room:
            return ReplicaScrape(
                replica, await scrape(client, f"{replica.url}/metrics", read_replica, deadline_s=deadline_s)
            )

    async def router_scrape(router: Router) -> Scrape:
        url = f"{router.admin_url.rstrip('/')}/metrics?buckets=fine"
        async with room:
            return RouterScrape(
                router, await scrape(client, url, read_router, deadline_s=deadline_s, most_bytes=ROUTER_BYTES)
            )

    return {
        *(asyncio.create_task(replica_scrape(replica)) for replica in replicas),
        *(asyncio.create_task(router_scrape(router)) for router in routers),
    }


async def _next(pending: set[asyncio.Task[Scrape]]) -> tuple[set[asyncio.Task[Scrape]], set[asyncio.Task[Scrape]]]:
    """(done, pending) after the first scrape came in and ``BATCH_S`` more, or all did."""
    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    return await asyncio.wait(pending, timeout=BATCH_S)
