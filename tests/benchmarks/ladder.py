"""What five minutes of 200 requests/s take on their way to a ladder: ``python -m tests.benchmarks ladder``.

60,000 requests of sessions that grow turn by turn, sampled as the collector asks routers to: with the largest power of
two that keeps a second's blocks within the budget. The replay alone, without reading rows; least of several rounds, of
one core. Beside it the same replay's error against one of all the blocks, in points of the widest term.
"""

from __future__ import annotations

import gc
import time

from telemetry.collecting.budget import sample_ratio
from telemetry.lab.chains import Request
from telemetry.lab.ladder import Ladder, Sums, ladder_from, settled
from telemetry.lab.replay import Replay
from tests.telemetry.lab.traces import HASH_TOKENS, sampled, traffic

REQUESTS, SECONDS = 60_000, 300
BUDGETS = (500, 1000, 2000)  # blocks a second; the last is the default
FLEETS = (4, 32)
ROOM_BLOCKS = 60_000  # of the fleet
LIMIT_S = 1.0
ROUNDS = 3


def main() -> None:
    """Print the table."""
    print(
        f"{'replicas':>8} {'budget/s':>9} {'part':>7} {'blocks/s':>9} {'seconds':>8} {'limit':>6} {'error, points':>14}"
    )
    for replicas in FLEETS:
        requests = traffic(REQUESTS, replicas=replicas, sessions=3000, placed="random")
        whole = ladder(requests, 1.0, replicas)
        per_s = sum(one.block_count for one in requests) / SECONDS
        for budget in BUDGETS:
            print_row(requests, whole, sample_ratio(per_s, budget), replicas, budget)


def print_row(requests: list[Request], whole: Ladder, ratio: float, replicas: int, budget: int) -> None:
    """One budget's line."""
    told = sampled(requests, ratio)
    gc.freeze()  # the requests, which are rows in a worker's hands only while they are replayed
    part, took_s = timed(told, ratio, replicas)
    gc.unfreeze()
    off = max(
        abs((a or 0) / whole.prompt_tokens - (b or 0) / part.prompt_tokens)
        for (_, a), (_, b) in zip(whole.terms, part.terms, strict=True)
    )
    blocks = sum(len(one.blocks) for one in told) / SECONDS
    print(f"{replicas:>8} {budget:>9} {ratio:>7.4f} {blocks:>9.0f} {took_s:>8.4f} {LIMIT_S:>6.1f} {100 * off:>14.1f}")


def timed(requests: list[Request], ratio: float, replicas: int) -> tuple[Ladder, float]:
    """The ladder and the least of the times it took."""
    took_s = []
    for _ in range(ROUNDS):
        begun_s = time.process_time()
        found = ladder(requests, ratio, replicas)
        took_s.append(time.process_time() - begun_s)
    return found, min(took_s)


def ladder(requests: list[Request], ratio: float, replicas: int) -> Ladder:
    """The ladder of these requests."""
    replay = Replay({f"r{number}": ROOM_BLOCKS * HASH_TOKENS // replicas for number in range(replicas)}, ratio)
    sums: dict[str, Sums] = {}
    replay.learn(requests)
    for one in requests:
        of_group = sums.get(one.group)
        if of_group is None:
            of_group = sums[one.group] = Sums()
        replay.add(one, of_group)
    total = Sums()
    for of_group in sums.values():
        total.add(settled(of_group, replay.ratio))
    return ladder_from(total, sample_ratio=replay.ratio)
