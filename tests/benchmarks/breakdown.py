"""Cost of replaying five minutes at 200 requests/s: ``python -m tests.benchmarks breakdown``.

60,000 requests of growing sessions, sampled as the collector asks routers to: by the largest power of two that keeps
the blocks per second within the budget. Replay only; ``telemetry --decisions`` includes reading and writing. Minimum of
several rounds on one core, with the replay's error against one of all blocks, in points of the largest term.
"""

from __future__ import annotations

import time
from dataclasses import astuple

from telemetry.lab.breakdown import Breakdown, Sums, breakdown_from
from telemetry.lab.chains import Requests
from telemetry.lab.replay import BinSums, Replay
from telemetry.scraping.decision_records import sample_ratio
from tests.telemetry.lab.traces import HASH_TOKENS, Request, columns, sampled, traffic

REQUESTS, SECONDS = 60_000, 300
BUDGETS = (500, 1000, 2000)  # blocks a second; the last is the default
FLEETS = (4, 32)
CACHE_BLOCKS = 60_000  # of the fleet
ROUNDS = 3


def main() -> None:
    print(f"{'replicas':>8} {'budget/s':>9} {'part':>7} {'blocks/s':>9} {'seconds':>8} {'error, points':>14}")
    for replicas in FLEETS:
        requests = traffic(REQUESTS, replicas=replicas, sessions=3000, placed="random")
        whole = breakdown(columns(requests), 1.0, replicas)
        per_s = sum(request.block_count for request in requests) / SECONDS
        for budget in BUDGETS:
            print_row(requests, whole, sample_ratio(per_s, budget), replicas, budget)


def print_row(requests: list[Request], whole: Breakdown, ratio: float, replicas: int, budget: int) -> None:
    sample = sampled(requests, ratio)
    sampled_breakdown, took_s = timed(columns(sample), ratio, replicas)
    error = max(
        abs((a or 0) / whole.prompt_tokens - (b or 0) / sampled_breakdown.prompt_tokens)
        for (_, a), (_, b) in zip(whole.terms, sampled_breakdown.terms, strict=True)
    )
    blocks = sum(len(request.blocks) for request in sample) / SECONDS
    print(f"{replicas:>8} {budget:>9} {ratio:>7.4f} {blocks:>9.0f} {took_s:>8.4f} {100 * error:>14.1f}")


def timed(requests: Requests, ratio: float, replicas: int) -> tuple[Breakdown, float]:
    """(breakdown, least time in seconds)."""
    durations_s = []
    for _ in range(ROUNDS):
        started_s = time.process_time()
        result = breakdown(requests, ratio, replicas)
        durations_s.append(time.process_time() - started_s)
    return result, min(durations_s)


def breakdown(requests: Requests, ratio: float, replicas: int) -> Breakdown:
    capacities = {f"r{number}": CACHE_BLOCKS * HASH_TOKENS // replicas for number in range(replicas)}
    replay, sums = Replay(capacities, ratio), BinSums()
    replay.learn(requests, SECONDS / 60)
    replay.use(requests, sums)
    groups = map(astuple, sums.result(replay.ratio).values())
    return breakdown_from(Sums(*map(sum, zip(*groups, strict=True))), sample_ratio=replay.ratio)
