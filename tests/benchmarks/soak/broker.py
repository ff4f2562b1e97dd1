"""The broker killed repeatedly, down for an hour, and flushed, under real web and worker processes.

During each outage the fleet's hit rate falls or recovers; each transition must be stored once and notified once. The
API is polled throughout. Recovery time is measured from when the broker accepts connections again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from tests.benchmarks.soak.verdict import Verdict
from tests.pace import is_within
from tests.reliability.alerting_fleet import alerting_fleet
from tests.reliability.outages import FLUSHED_S, LONG_RESUMES_S, RESUMES_S, BrokerOutage, flush_broker, kill_broker_for
from tests.reliability.stand import running_stand

AWAY_S = (8.0, 60.0)
FLUSHES = 20


def measure_kills(verdict: Verdict, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    _measure(verdict, [chance.uniform(*AWAY_S) for _ in range(kills)], RESUMES_S)


def measure_long(verdict: Verdict, seconds: float) -> None:
    _measure(verdict, [seconds], LONG_RESUMES_S)


def measure_flushes(verdict: Verdict) -> None:
    with running_stand() as stand:
        durations_s = sorted(flush_broker(stand) for _ in range(FLUSHES))
    is_fast = is_within(durations_s[-1], FLUSHED_S)
    verdict.check("work after a flush", f"{_seconds(durations_s)}, of {FLUSHED_S:g}; {FLUSHES} flushes", is_fast)


def _measure(verdict: Verdict, away_s: Sequence[float], limit_s: float) -> None:
    with running_stand() as stand, stand.rest() as rest, alerting_fleet(stand, rest) as fleet:
        first_line, processes = len(stand.worker.lines), stand.worker.family()
        outages: list[BrokerOutage] = []
        for away in away_s:
            outages.append(kill_broker_for(stand, rest, fleet, away))
            verdict.report("away", f"{away:.0f} s, resumed {outages[-1].resumed_s:.1f} s after the return")
        fleet.until_delivered()
        _judge_outages(verdict, outages, limit_s)
        missing = Counter(fleet.expected) - Counter(fleet.transitions)
        counts = f"{len(fleet.expected)} transitions, {missing.total()} lost, {len(fleet.received)} messages"
        verdict.check("alerts", counts, fleet.transitions == fleet.received == fleet.expected)
        verdict.check("worker and beat", "the same processes as before", stand.worker.family() == processes)
        logged, tracebacks = (
            len(stand.worker.log_lines(text, since=first_line)) for text in ("the broker is unavailable", "Traceback")
        )
        verdict.check(
            "worker's log",
            f"{logged} outages logged, {tracebacks} tracebacks",
            (logged, tracebacks) == (len(away_s), 0),
        )


def _judge_outages(verdict: Verdict, outages: Sequence[BrokerOutage], limit_s: float) -> None:
    durations_s = sorted(outage.resumed_s for outage in outages)
    verdict.check("ticks resume after", f"{_seconds(durations_s)}, of {limit_s:g}", is_within(durations_s[-1], limit_s))
    statuses = sum((outage.statuses for outage in outages), Counter[int]())
    responses = ", ".join(f"{count:,} times {status}" for status, count in sorted(statuses.items()))
    verdict.check("API reads", responses, set(statuses) == {200})


def _seconds(ascending: Sequence[float]) -> str:
    return f"{ascending[len(ascending) // 2]:.1f} s at the median, {ascending[-1]:.1f} at most"
