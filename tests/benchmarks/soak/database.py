"""R15: PostgreSQL restarted, killed and down, under real web, worker and router processes.

A script and a browser poll all the time; the script must get 503 as problem+json and never 500. A router produces
events every few seconds and is killed now and then while it holds unsent ones. Every event it wrote to disk must be
stored exactly once.
"""

from __future__ import annotations

from collections import Counter

from tests.benchmarks.soak.verdict import Verdict
from tests.pace import is_within
from tests.reliability.event_router import Delivery, event_router
from tests.reliability.outages import ENDPOINTS, RECOVERS_S, Fault, Polling, database_outage, faults, until_api_recovers
from tests.reliability.stand import running_stand

AWAY_S = 60.0
GIVE_UP_S = 60.0  # after which waiting for an answer is no use
KILL_EVERY = 5  # faults, the router is killed


def measure(verdict: Verdict, count: int, seed: int) -> None:
    chosen = faults(count, seed)
    with running_stand() as stand, stand.rest() as rest, stand.browser() as person, event_router(stand, rest) as router:
        begun, answered, ticked = len(stand.worker.lines), [], []
        with Polling(rest, person) as polling:
            for number, fault in enumerate(chosen, start=1):
                with database_outage(stand, fault, AWAY_S):
                    if number % KILL_EVERY == 0:
                        router.until_waiting()
                        router.kill()
                answered.append(until_api_recovers(rest, GIVE_UP_S))
                ticked.append(stand.until_ticks_resume(GIVE_UP_S))
        told = router.stop_and_count()
        stacks = stand.worker.log_lines("Traceback", since=begun)
    kinds = Counter(chosen)
    verdict.say("faults", ", ".join(f"{kinds[fault]} {fault}" for fault in Fault))
    _judge_asked(verdict, polling)
    for what, took in (("the API answers after", answered), ("ticks resume after", ticked)):
        took.sort()
        figures = f"{took[len(took) // 2]:.1f} s at the median, {took[-1]:.1f} at most, of {RECOVERS_S:g}"
        verdict.holds(what, figures, is_within(took[-1], RECOVERS_S))
    _judge_told(verdict, told)
    verdict.holds("worker's log", f"{len(stacks)} stacks", not stacks)


def _judge_asked(verdict: Verdict, polling: Polling) -> None:
    statuses = polling.statuses
    seen = ", ".join(f"{many:,} times {status}" for status, many in sorted(statuses.items()))
    verdict.holds("answers", seen, set(statuses) <= {200, 503} and statuses[503] > 0)
    kinds = polling.kinds(503, ENDPOINTS)
    verdict.holds("refusals of the API", ", ".join(sorted(kinds)), kinds == {"application/problem+json"})


def _judge_told(verdict: Verdict, told: Delivery) -> None:
    counted = f"{told.stored} in {told.boots} lives, {told.changes} turns of a replica among them"
    verdict.holds("events of the router", counted, told.stored >= told.changes > 0)
    wrong = f"{len(told.lost)} lost, {len(told.repeated)} stored twice"
    verdict.holds("exactly once", wrong, not (told.lost or told.repeated))
