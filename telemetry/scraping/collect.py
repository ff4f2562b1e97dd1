"""One run: ask every router that is present for what it decided since, and store it as it comes.

Theory of operation. A router keeps its latest decisions in a bounded ring, numbered within its life (``boot``); our
cursor stands in PostgreSQL beside the rows, and both move in one transaction. So a page that was asked for twice
changes nothing, a worker may be killed at any moment, and what a router dropped before we came is counted. An advisory
lock for each router lets one worker at a time ask it. All are asked at once on one event loop, which stands still while
a page is stored; a router that hangs costs its own pages alone. A run ends in time for the next beat; a router that
still has more goes on there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime

import httpx
from django.conf import settings

from controlplane.egress import (
    EgressDeniedError,
    ResponseTooLargeError,
    fetch_async,
    fleet_rules,
    guarded_async_client,
)
from controlplane.isolation import Items, isolated_items
from controlplane.models import PeriodicTask, Router
from telemetry.models import DecisionCursor
from telemetry.scraping.decision_records import (
    CANDIDATES_PER_S,
    Page,
    PageError,
    Progress,
    fail,
    finish,
    read_page,
    record_page,
)
from telemetry.storage.locks import COLLECT, advisory_lock

log = logging.getLogger(__name__)
RUN_S = 3.5  # after which no further page is asked for
PAGE_S = 1.4  # in which a page is here: a run with its last page is over before the next one is due
PAGE_RECORDS = 250
PAGE_BYTES = 16 << 20  # of so many prompts of the longest kind, whole
INTERVAL_S = 5.0  # what budgets of a second are multiplied with


@dataclass(frozen=True, slots=True)
class Run:
    """What a run did."""

    routers: int
    decisions: int
    failures: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A router's page, or why there is none."""

    progress: Progress
    ratio: float
    page: Page | str


def collect_decisions(now: datetime) -> Run:
    """Collect from every router that is present and that no other worker asks just now."""
    ends_s = time.monotonic() + RUN_S
    routers = list(Router.objects.filter(lost_at=None))
    with isolated_items(PeriodicTask.DECISIONS) as item, ExitStack() as held:
        ours = [router for router in routers if held.enter_context(advisory_lock(COLLECT + router.pk))]
        progresses: list[Progress] = []
        for router in ours:
            with item(router.name):
                progresses.append(_begin(router, len(routers)))
        before = sum(progress.cursor.collected for progress in progresses)
        failures = _collect(progresses, ends_s, now, item) if progresses else set()
        budget_per_s = settings.DECISIONS_BLOCKS_PER_S / max(1, len(routers))
        for progress in progresses:
            if progress.router.pk not in failures:
                with item(progress.router.name):
                    finish(progress, budget_per_s=budget_per_s, now=now)
        after = sum(progress.cursor.collected for progress in progresses)
    return Run(len(ours), after - before, len(failures))


def _begin(router: Router, routers: int) -> Progress:
    cursor, is_new = DecisionCursor.objects.get_or_create(router=router, defaults={"sample_ratio": 1.0})
    rows = PAGE_RECORDS  # of a first run, which learns how long prompts are
    if not is_new:
        rows = max(PAGE_RECORDS, int(settings.DECISIONS_ROWS_PER_S * INTERVAL_S / routers))
    return Progress(router, cursor, rows_left=rows, candidates_left=int(CANDIDATES_PER_S * INTERVAL_S))


def _collect(progresses: list[Progress], ends_s: float, now: datetime, item: Items) -> set[int]:
    """Page after page until every router has no more or the time is up; the ids of those that failed."""
    failures: set[int] = set()
    by_name = {progress.router.name: progress for progress in progresses}
    with asyncio.Runner() as runner:
        client = guarded_async_client(fleet_rules())
        try:
            pending = runner.run(_start(client, progresses))
            while pending:
                done, pending = runner.run(_next(pending))
                for task in done:
                    progress = by_name[task.get_name()]
                    failures.add(progress.router.pk)
                    with item(progress.router.name):
                        fetched = task.result()
                        if isinstance(fetched.page, str):
                            fail(progress, fetched.page)
                            continue
                        if _store(fetched, fetched.page, now) and time.monotonic() < ends_s:
                            pending |= runner.run(_start(client, [progress]))
                        failures.discard(progress.router.pk)
        finally:
            runner.run(client.aclose())
    return failures


def _store(fetched: Fetched, page: Page, now: datetime) -> bool:
    return record_page(fetched.progress, page, ratio=fetched.ratio, now=now)


async def _start(client: httpx.AsyncClient, progresses: list[Progress]) -> set[asyncio.Task[Fetched]]:
    return {asyncio.create_task(_fetch(client, progress), name=progress.router.name) for progress in progresses}


async def _next(pending: set[asyncio.Task[Fetched]]) -> tuple[set[asyncio.Task[Fetched]], set[asyncio.Task[Fetched]]]:
    return await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


async def _fetch(client: httpx.AsyncClient, progress: Progress) -> Fetched:
    """The next page; nothing that a router does is raised."""
    cursor, ratio = progress.cursor, progress.cursor.sample_ratio
    limit = min(PAGE_RECORDS, progress.rows_left)
    url = f"{progress.router.admin_url.rstrip('/')}/admin/decisions?after={cursor.seq}&limit={limit}&blocks={ratio:.9f}"
    headers = {"Authorization": f"Bearer {settings.ROUTER_ADMIN_TOKEN}"}
    try:
        answer = await fetch_async(client, "GET", url, deadline_s=PAGE_S, max_bytes=PAGE_BYTES, headers=headers)
        if answer.status != httpx.codes.OK:
            return Fetched(progress, ratio, f"it answers with status {answer.status}")
        return Fetched(progress, ratio, read_page(answer.body))
    except PageError:
        return Fetched(progress, ratio, "its answer is not one that a router gives")
    except httpx.HTTPError as error:
        return Fetched(progress, ratio, _reason(error))


def _reason(error: httpx.HTTPError) -> str:
    """In words that name no URL."""
    if isinstance(error, httpx.TimeoutException):
        return f"no whole answer within {PAGE_S:g} s"
    if isinstance(error, ResponseTooLargeError):
        return "the answer is too long, or packed"
    if isinstance(error, EgressDeniedError):
        return "its address is not in WARMPATH_FLEET_NETWORKS"
    return f"no usable answer ({type(error).__name__})"
