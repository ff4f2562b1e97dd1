"""Collects decisions from every present router and stores them.

Theory of operation. A router keeps its latest decisions in a bounded ring, numbered within one boot. Warmpath's cursor
is stored beside the rows, and both change in one transaction. So a page that is requested twice changes nothing, a
worker may be killed at any time, and decisions that the router dropped before they were collected are counted. An
advisory lock per router lets one worker at a time collect from it. All routers are queried at once; a router that hangs
delays only its own pages. A run ends before the next one is due; a router that has more continues there.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime

import httpx
from django.conf import settings

from controlplane.egress import fetch_async
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
from telemetry.scraping.fetch import Requests, failure_reason
from telemetry.storage.locks import COLLECT, advisory_lock

RUN_S = 3.5  # no page is requested after that
PAGE_S = 1.4  # deadline of a page: a run with its last page ends before the next run
PAGE_RECORDS = 250
PAGE_BYTES = 16 << 20  # of PAGE_RECORDS decisions with the longest prompts
INTERVAL_S = 5.0  # of runs; budgets per second are multiplied by it


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run."""

    routers: int
    decisions: int
    failures: int


@dataclass(frozen=True, slots=True)
class FetchedPage:
    """A router's page, or why there is none, and the part of the blocks that was requested."""

    progress: Progress
    ratio: float
    page: Page | str


def collect_decisions(now: datetime) -> Run:
    """Collect from every present router from which no other worker is collecting."""
    ends_s = time.monotonic() + RUN_S
    routers = list(Router.objects.filter(lost_at=None))
    with isolated_items(PeriodicTask.DECISIONS) as item, ExitStack() as locks:
        locked = [router for router in routers if locks.enter_context(advisory_lock(COLLECT + router.pk))]
        progresses: list[Progress] = []
        for router in locked:
            with item(router.name):
                progresses.append(_begin(router, len(routers)))
        before = sum(progress.cursor.collected for progress in progresses)
        failed = _collect_pages(progresses, ends_s, now, item)
        budget_per_s = settings.DECISIONS_BLOCKS_PER_S / max(1, len(routers))
        for progress in progresses:
            if progress.router.pk not in failed:
                with item(progress.router.name):
                    finish(progress, budget_per_s=budget_per_s, now=now)
        after = sum(progress.cursor.collected for progress in progresses)
    return Run(len(locked), after - before, len(failed))


def _begin(router: Router, routers: int) -> Progress:
    cursor, is_new = DecisionCursor.objects.get_or_create(router=router, defaults={"sample_ratio": 1.0})
    rows = PAGE_RECORDS  # of a first run, which learns how long prompts are
    if not is_new:
        rows = max(PAGE_RECORDS, int(settings.DECISIONS_ROWS_PER_S * INTERVAL_S / routers))
    return Progress(router, cursor, rows_left=rows, candidates_left=int(CANDIDATES_PER_S * INTERVAL_S))


def _collect_pages(progresses: list[Progress], ends_s: float, now: datetime, item: Items) -> set[int]:
    """Page after page until no router has more or the time is over; the ids of routers that failed."""
    failed: set[int] = set()
    by_name = {progress.router.name: progress for progress in progresses}
    with Requests[FetchedPage]() as requests:
        for progress in progresses:
            requests.start(_fetch(requests.client, progress), progress.router.name)
        for batch in requests.batches():
            for task in batch:
                progress = by_name[task.get_name()]
                failed.add(progress.router.pk)
                with item(progress.router.name):
                    fetched = task.result()
                    if isinstance(fetched.page, str):
                        fail(progress, fetched.page)
                        continue
                    has_more = record_page(progress, fetched.page, ratio=fetched.ratio, now=now)
                    if has_more and time.monotonic() < ends_s:
                        requests.start(_fetch(requests.client, progress), progress.router.name)
                    failed.discard(progress.router.pk)
    return failed


async def _fetch(client: httpx.AsyncClient, progress: Progress) -> FetchedPage:
    """The next page. Errors of the router are returned, not raised."""
    cursor, ratio = progress.cursor, progress.cursor.sample_ratio
    limit = min(PAGE_RECORDS, progress.rows_left)
    url = f"{progress.router.admin_url.rstrip('/')}/admin/decisions?after={cursor.seq}&limit={limit}&blocks={ratio:.9f}"
    headers = {"Authorization": f"Bearer {settings.ROUTER_ADMIN_TOKEN}"}
    page: Page | str
    try:
        response = await fetch_async(client, "GET", url, deadline_s=PAGE_S, max_bytes=PAGE_BYTES, headers=headers)
        is_ok = response.status == httpx.codes.OK
        page = read_page(response.body) if is_ok else f"it responds with status {response.status}"
    except PageError:
        page = "its response is not a page of decisions"
    except httpx.HTTPError as error:
        page = failure_reason(error, PAGE_S)
    return FetchedPage(progress, ratio, page)
