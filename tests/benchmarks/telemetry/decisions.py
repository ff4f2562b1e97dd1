"""What reading five minutes of 200 requests/s costs a replay: ``python -m tests.benchmarks telemetry --decisions``."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from telemetry.collecting.budget import sample_ratio
from telemetry.lab.chains import HASHES, Request
from tests.benchmarks.telemetry.stand import server_s, standing
from tests.telemetry.lab.traces import sampled, traffic

REQUESTS, SECONDS = 60_000, 300
BUDGET = 2000  # blocks a second: the default
ROUNDS = 5
START = datetime(2031, 3, 4, 12, tzinfo=UTC)
STORED = """at router_id boot seq pool "group" matched_by policy revision arm strategy replica reason status
    prompt_tokens_estimate prompt_tokens cached_tokens block_tokens hash_tokens blocks positions block_count
    sample_ratio request_id retries"""


def main() -> None:
    """Print the row."""
    requests = traffic(REQUESTS, sessions=3000, placed="random")
    told = sampled(requests, sample_ratio(sum(one.block_count for one in requests) / SECONDS, BUDGET))
    with standing():
        store(told)
        took_s = min(reading_s(len(told)) for _ in range(ROUNDS))
    each_us = 1e6 * took_s / len(told)
    print(f"reading {len(told)} decisions for a replay: {took_s:.2f} s of CPU of both sides, {each_us:.1f} us each")


def reading_s(expected: int) -> float:
    """CPU of ours and of PostgreSQL's."""
    from telemetry.storage.decisions import requests_between

    begun_s = time.process_time() + server_s()
    found = requests_between("bench", START, START + timedelta(seconds=SECONDS), at_most=2 * REQUESTS)
    took_s = time.process_time() + server_s() - begun_s
    if len(found) != expected:
        raise AssertionError(f"{len(found)} of {expected} requests came back")
    return took_s


def store(requests: list[Request]) -> None:
    """As the collector stores them."""
    from django.db import connection

    from telemetry.storage.partitions import ensure_days

    ensure_days([START.date()])
    columns = ", ".join(STORED.split())
    with connection.cursor() as cursor:
        with cursor.copy(f"copy telemetry_decision ({columns}) from stdin") as copy:
            for number, one in enumerate(requests):
                copy.write_row(_row(number, one))
        cursor.execute("analyze telemetry_decision")


def _row(number: int, one: Request) -> tuple[object, ...]:
    at = START + timedelta(seconds=one.at_s)
    blocks = [block - HASHES if block >= HASHES >> 1 else block for block in one.blocks]  # the column has a sign
    placed = (at, 1, "b", number, "bench", one.group, "", "", 1, "", "", one.replica, "hit", 200)
    tokens = (one.estimate_tokens, one.prompt_tokens, one.cached_tokens, one.block_tokens, one.hash_tokens)
    prompt = (blocks, list(one.positions or ()), one.block_count, one.sample_ratio, f"req-{number}", 0)
    return (*placed, *tokens, *prompt)
