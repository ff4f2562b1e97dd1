"""One tick: scrape the whole fleet at once, store what comes as it comes.

Theory of operation. A tick holds an advisory lock, so that one still running makes the next one skip. Every target
gets its own deadline, below the interval, and all are fetched on one event loop. The loop runs until something
came, stops while that is written to the database, and goes on: a target that hangs holds back nobody's reading, and
no database call runs on the loop. ``due`` is the tick's place on the grid of intervals, so that two beats, or one
task delivered twice, make one reading. A tick may come a little early or late without missing its place.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx
from django.conf import settings
from django.db.models import Max

from controlplane.egress import fleet_rules, guarded_async_client
from controlplane.models import Replica, ReplicaState, Router
from telemetry.metrics.engine import read_replica
from telemetry.metrics.router import read_router
from telemetry.models import ScrapeState
from telemetry.scraping.fetch import scrape
from telemetry.scraping.fold import Failure
from telemetry.scraping.record import ReplicaScrape, RouterScrape, record_scrapes
from telemetry.storage.locks import SCRAPE, only_one

log = logging.getLogger(__name__)
LONGEST_S = 5.0  # for one scrape (S8)
DEADLINE_SHARE = 0.8  # of the interval
EARLY_SHARE = 0.2  # of the interval: a tick this close to the next place on the grid may take it
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


def scrape_fleet(now_s: float | None = None) -> Tick | None:
    """Scrape every replica that is not disabled and every router that is present.

    None where another tick is at it, or has been.
    """
    started_s = time.monotonic()
    with only_one(SCRAPE) as ours:
        if not ours:
            log.info("the previous scrape still runs; this one is left out")
            return None
        interval_s = float(settings.SCRAPE_INTERVAL_S)
        due_s = place(time.time() if now_s is None else now_s, interval_s, _newest_s())
        if due_s is None:
            return None
        due = datetime.fromtimestamp(due_s, UTC)
        scrapes = failures = 0
        for batch in _batches(min(LONGEST_S, DEADLINE_SHARE * interval_s)):
            record_scrapes(
                [scrape for scrape in batch if isinstance(scrape, ReplicaScrape)],
                [scrape for scrape in batch if isinstance(scrape, RouterScrape)],
                due=due,
            )
            scrapes += len(batch)
            failures += sum(isinstance(scrape.outcome, Failure) for scrape in batch)
        return Tick(due, scrapes, failures, time.monotonic() - started_s)


def place(now_s: float, interval_s: float, taken_s: float | None) -> float | None:
    """When this tick's readings are due: its place on the grid, or the next one when that is near; None for neither.

    ``taken_s`` is the newest place that has readings; one that lies ahead means that the clock was set back.
    """
    place_s = math.floor(now_s / interval_s) * interval_s
    if taken_s is None or taken_s < place_s or taken_s > place_s + interval_s:
        return place_s
    next_s = place_s + interval_s
    return next_s if taken_s == place_s and next_s - now_s <= EARLY_SHARE * interval_s else None


def _newest_s() -> float | None:
    newest: datetime | None = ScrapeState.objects.aggregate(Max("at"))["at__max"]
    return newest.timestamp() if newest else None


def _batches(deadline_s: float) -> Iterator[list[Scrape]]:
    """Every target's scrape, in batches as they come in; the event loop stands still while a batch is used."""
    replicas = list(Replica.objects.exclude(state=ReplicaState.DISABLED).select_related("pool"))
    routers = list(Router.objects.filter(lost_at=None))
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
        url = f"{router.admin_url.rstrip('/')}/metrics"
        async with room:
            return RouterScrape(router, await scrape(client, url, read_router, deadline_s=deadline_s))

    return {
        *(asyncio.create_task(replica_scrape(replica)) for replica in replicas),
        *(asyncio.create_task(router_scrape(router)) for router in routers),
    }


async def _next(pending: set[asyncio.Task[Scrape]]) -> tuple[set[asyncio.Task[Scrape]], set[asyncio.Task[Scrape]]]:
    """(done, pending) after the first scrape came in and ``BATCH_S`` more, or all did."""
    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    return await asyncio.wait(pending, timeout=BATCH_S)
