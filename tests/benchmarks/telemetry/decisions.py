"""Cost of five minutes at 200 requests/s up to the breakdown: ``... benchmarks telemetry --decisions``.

Rows as the collector stores them, of growing sessions, sampled as by default; then the worker's part: reading,
replay, writing the bin and the caches. CPU of the worker and PostgreSQL, minimum of several rounds. ``at once`` starts
cold with all five minutes. ``a minute`` is the run a minute later, which continues with the kept caches: one complete
minute and two incomplete ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from telemetry.lab.chains import HASHES
from telemetry.scraping.decision_records import sample_ratio
from tests.benchmarks.telemetry.stand import Stand, server_s
from tests.telemetry.lab.traces import HASH_TOKENS, Request, sampled, traffic

if TYPE_CHECKING:
    from controlplane.models import Pool

REQUESTS, SECONDS = 72_000, 360  # the last minute is that of the second run
BUDGET = 2000  # blocks a second: the default
FLEETS = (4, 32)
CACHE_BLOCKS = 60_000  # of the fleet
LIMIT_S = 1.0
ROUNDS = 5
START = datetime(2031, 3, 4, 12, tzinfo=UTC)
STORED = """at router_id boot seq pool "group" matched_by policy revision arm strategy replica reason status
    prompt_tokens_estimate prompt_tokens cached_tokens block_tokens hash_tokens blocks positions block_count
    sample_ratio request_id retries"""


def main(_stand: Stand) -> None:
    print(f"{'replicas':>8} {'reading':>8} {'at once':>8} {'a minute':>9} {'limit':>6}   CPU s, worker + PostgreSQL")
    for replicas in FLEETS:
        requests = traffic(REQUESTS, replicas=replicas, sessions=3000, placed="random")
        sample = sampled(requests, sample_ratio(sum(request.block_count for request in requests) / SECONDS, BUDGET))
        pool = fleet(replicas)
        store(sample, pool.name)
        costs = [rounds(pool) for _ in range(ROUNDS)]
        reading, whole, minute = (min(column) for column in zip(*costs, strict=True))
        print(f"{replicas:>8} {reading:>8.2f} {whole:>8.2f} {minute:>9.2f} {LIMIT_S:>6.1f}", flush=True)


def fleet(replicas: int) -> Pool:
    """A new pool whose replicas have reported their capacity."""
    from controlplane.models import Pool, Replica
    from controlplane.services.fleet.pools import default_project

    Replica.objects.all().delete()
    pool = Pool.objects.create(project=default_project(), name=f"of-{replicas}")
    blocks = CACHE_BLOCKS // replicas * HASH_TOKENS // 16
    rows = [(f"r{number}", f"http://r{number}.{pool.name}") for number in range(replicas)]
    Replica.objects.bulk_create(
        Replica(pool=pool, name=name, url=url, block_tokens=16, capacity_blocks=blocks) for name, url in rows
    )
    return pool


def rounds(pool: Pool) -> tuple[float, float, float]:
    """(reading alone, all five minutes at once, the run of the next minute)."""
    from telemetry.models import BreakdownBin, ReplayState
    from telemetry.services.lab.replays import replay_pool
    from telemetry.storage.decisions import requests_between

    end = START + timedelta(minutes=5)
    reading = cpu_s(lambda: len(requests_between(pool.name, START, end, at_most=REQUESTS)))
    ReplayState.objects.filter(pool=pool).delete()
    BreakdownBin.objects.filter(pool=pool).delete()
    whole = cpu_s(lambda: replay_pool(pool, end))
    if sum(BreakdownBin.objects.filter(pool=pool).values_list("requests", flat=True)) != REQUESTS * 5 // 6:
        raise AssertionError("requests are missing from the bin")
    return reading, whole, cpu_s(lambda: replay_pool(pool, end + timedelta(minutes=1)))


def cpu_s(run: Callable[[], object]) -> float:
    started_s = time.process_time() + server_s()
    run()
    return time.process_time() + server_s() - started_s


def store(requests: list[Request], pool: str) -> None:
    from django.db import connection

    from telemetry.storage.partitions import ensure_days

    ensure_days([START.date()])
    columns = ", ".join(STORED.split())
    with connection.cursor() as cursor:
        with cursor.copy(f"copy telemetry_decision ({columns}) from stdin") as copy:
            for number, request in enumerate(requests):
                copy.write_row(_row(number, request, pool))
        cursor.execute("analyze telemetry_decision")


def _row(number: int, request: Request, pool: str) -> tuple[object, ...]:
    at = START + timedelta(seconds=SECONDS * number / REQUESTS)
    blocks = [
        block - HASHES if block >= HASHES >> 1 else block for block in request.blocks
    ]  # the column is a signed integer
    placed = (at, 1, pool, number, pool, request.group, "", "", 1, "", "", request.replica, "hit", 200)
    tokens = (
        request.estimate_tokens,
        request.prompt_tokens,
        request.cached_tokens,
        request.block_tokens,
        request.hash_tokens,
    )
    prompt = (blocks, request.positions, request.block_count, request.sample_ratio, f"req-{number}", 0)
    return (*placed, *tokens, *prompt)
