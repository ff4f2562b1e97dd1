"""What replaying five minutes at 200 requests/s costs: ``python -m tests.benchmarks ladder``.

60,000 requests of growing sessions, sampled as the collector asks routers to: by the largest power of two that keeps
the blocks per second within the budget. Replay only; ``telemetry --decisions`` includes reading and writing. Least of
several rounds on one core, with the replay's error against one of all blocks, in points of the largest term.
"""

from __future__ import annotations

import time
from dataclasses import astuple

from telemetry.lab.chains import Requests
from telemetry.lab.ladder import Ladder, Sums, ladder_from
from telemetry.lab.replay import BinSums, Replay
from telemetry.scraping.decision_records import sample_ratio
from tests.telemetry.lab.traces import HASH_TOKENS, Request, columns, sampled, traffic

REQUESTS, SECONDS = 60_000, 300
BUDGETS = (500, 1000, 2000)  # blocks a second; the last is the default
FLEETS = (4, 32)
ROOM_BLOCKS = 60_000  # of the fleet
ROUNDS = 3


def main() -> None:
    print(f"{'replicas':>8} {'budget/s':>9} {'part':>7} {'blocks/s':>9} {'seconds':>8} {'error, points':>14}")
    for replicas in FLEETS:
        requests = traffic(REQUESTS, replicas=replicas, sessions=3000, placed="random")
        whole = ladder(columns(requests), 1.0, replicas)
        per_s = sum(one.block_count for one in requests) / SECONDS
        for budget in BUDGETS:
            print_row(requests, whole, sample_ratio(per_s, budget), replicas, budget)


def print_row(requests: list[Request], whole: Ladder, ratio: float, replicas: int, budget: int) -> None:
    told = sampled(requests, ratio)
    part, took_s = timed(columns(told), ratio, replicas)
    off = max(
        abs((a or 0) / whole.prompt_tokens - (b or 0) / part.prompt_tokens)
        for (_, a), (_, b) in zip(whole.terms, part.terms, strict=True)
    )
    blocks = sum(len(one.blocks) for one in told) / SECONDS
    print(f"{replicas:>8} {budget:>9} {ratio:>7.4f} {blocks:>9.0f} {took_s:>8.4f} {100 * off:>14.1f}")


def timed(requests: Requests, ratio: float, replicas: int) -> tuple[Ladder, float]:
    """(ladder, least time in seconds)."""
    took_s = []
    for _ in range(ROUNDS):
        begun_s = time.process_time()
        found = ladder(requests, ratio, replicas)
        took_s.append(time.process_time() - begun_s)
    return found, min(took_s)


def ladder(requests: Requests, ratio: float, replicas: int) -> Ladder:
    rooms = {f"r{number}": ROOM_BLOCKS * HASH_TOKENS // replicas for number in range(replicas)}
    replay, tally = Replay(rooms, ratio), BinSums()
    replay.learn(requests, SECONDS / 60)
    replay.use(requests, tally)
    groups = map(astuple, tally.result(replay.ratio).values())
    return ladder_from(Sums(*map(sum, zip(*groups, strict=True))), sample_ratio=replay.ratio)
