"""Queries and time of pages and ``/metrics`` of the control plane, by size of the fleet.

Fleets that were measured for five minutes every 5 s: one pool of 8, 200 or 1,000 replicas, and 20 pools of 10. A number
of queries that grows with replicas or pools is a defect, so the table shows them side by side. An open tab requests the
live part every 5 s; the last row is what 20 tabs of the overview cost together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from tests.benchmarks.telemetry.stand import Stand, server_s

if TYPE_CHECKING:
    from django.test import Client

FLEETS = {"1 x 8": (1, 8), "1 x 200": (1, 200), "1 x 1000": (1, 1000), "20 x 10": (20, 10)}
PAGES = (
    "/",
    "/live/",
    "/?pool=chat",
    "/live/?pool=chat",
    "/replicas/gpu-1/",
    "/fleet/",
    "/metrics",
    "20 x /live/",
)
SECONDS = 300
ROUNDS = 3


class Cost(NamedTuple):
    queries: int
    best_ms: float  # by the clock
    cpu_ms: float  # mean of this process and of the database
    kilobytes: float


def main(stand: Stand) -> None:
    measured: dict[str, dict[str, Cost]] = {}
    for name, (pools, replicas) in FLEETS.items():
        stand.empty()
        measured[name] = measure(pools, replicas, seconds=SECONDS)
    print("\n".join(table(measured)))


def measure(pools: int, replicas: int, *, seconds: int) -> dict[str, Cost]:
    """Costs by page of a new fleet in the current database."""
    from django.contrib.auth.models import User
    from django.db import connection
    from django.test import Client

    from tests.fleet_history import warm_fleet

    now = datetime.now().astimezone()
    for number in range(pools):
        warm_fleet(now, seconds=seconds, replicas=replicas, number=number)
    client = Client()
    client.force_login(User.objects.create_user("olga", is_superuser=True))
    with connection.cursor() as cursor:
        cursor.execute("analyze")
    return {page: _cost(client, page) for page in PAGES}


def _cost(client: Client, page: str) -> Cost:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext, override_settings

    from telemetry.web import pages

    tabs, _, path = page.rpartition(" x ")
    times = int(tabs or 1)

    pages._live_parts = pages.SharedContent()  # those of the fleet before are kept for a while

    def request(number: int) -> int:
        responses = [client.get(path, {"number": number}) for _ in range(times)]
        if failed := [response.status_code for response in responses if response.status_code != 200]:
            raise AssertionError(f"{page} responds with {failed[0]}")
        return sum(len(response.content) for response in responses)

    with override_settings(LIVE_PARTS_FRESH_S=60 if times > 1 else 0):
        with CaptureQueriesContext(connection) as queries:
            size = request(0)
            count = len(queries)  # the next request clears the log
        elapsed_s, cpu_s = [], time.process_time() + server_s()
        for number in range(1, ROUNDS + 1):
            started = time.perf_counter()
            request(number)
            elapsed_s.append(time.perf_counter() - started)
        cpu_s = time.process_time() + server_s() - cpu_s
    return Cost(count, 1000 * min(elapsed_s), 1000 * cpu_s / ROUNDS, size / 1000)


def table(measured: Mapping[str, Mapping[str, Cost]]) -> list[str]:
    """A line for each page: queries, ms by the clock, ms of CPU and kB of the response, for each fleet."""
    heads = "".join(f"{f'pools x replicas: {name}':>36}" for name in measured)
    return [
        f"queries, ms (best of {ROUNDS}), ms of CPU (both sides), kB of the response",
        f"{'':20}{heads}",
        *(f"{page:20}" + "".join(_cell(costs[page]) for costs in measured.values()) for page in PAGES),
    ]


def _cell(cost: Cost) -> str:
    return f"{cost.queries:>9} {cost.best_ms:>8.0f} {cost.cpu_ms:>8.0f} {cost.kilobytes:>8.0f}"
