"""PostgreSQL restarted, killed and down, under real web, worker and router processes.

A script and a browser poll all the time; the script must get 503 as problem+json and never 500. A router produces
events every few seconds and is killed sometimes while it holds unsent events. Every event it wrote to disk must be
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
GIVE_UP_S = 60.0  # after which waiting for a response is given up
KILL_EVERY = 5  # faults between two kills of the router


def measure(verdict: Verdict, count: int, seed: int) -> None:
    chosen = faults(count, seed)
    with (
        running_stand() as stand,
        stand.rest() as rest,
        stand.browser() as browser,
        event_router(stand, rest) as router,
    ):
        first_line, api_s, ticks_s = len(stand.worker.lines), [], []
        with Polling(rest, browser) as polling:
            for number, fault in enumerate(chosen, start=1):
                with database_outage(stand, fault, AWAY_S):
                    if number % KILL_EVERY == 0:
                        router.until_unsent()
                        router.kill()
                api_s.append(until_api_recovers(rest, GIVE_UP_S))
                ticks_s.append(stand.until_ticks_resume(GIVE_UP_S))
        delivery = router.stop_and_count()
        tracebacks = stand.worker.log_lines("Traceback", since=first_line)
    kinds = Counter(chosen)
    verdict.report("faults", ", ".join(f"{kinds[fault]} {fault}" for fault in Fault))
    _judge_responses(verdict, polling)
    for name, durations_s in (("the API responds after", api_s), ("ticks resume after", ticks_s)):
        durations_s.sort()
        median_s, max_s = durations_s[len(durations_s) // 2], durations_s[-1]
        figures = f"{median_s:.1f} s at the median, {max_s:.1f} at most, limit {RECOVERS_S:g}"
        verdict.check(name, figures, is_within(max_s, RECOVERS_S))
    _judge_events(verdict, delivery)
    verdict.check("worker's log", f"{len(tracebacks)} tracebacks", not tracebacks)


def _judge_responses(verdict: Verdict, polling: Polling) -> None:
    statuses = polling.statuses
    counts = ", ".join(f"{count:,} times {status}" for status, count in sorted(statuses.items()))
    verdict.check("responses", counts, set(statuses) <= {200, 503} and statuses[503] > 0)
    kinds = polling.kinds(503, ENDPOINTS)
    verdict.check("503 of the API", ", ".join(sorted(kinds)), kinds == {"application/problem+json"})


def _judge_events(verdict: Verdict, delivery: Delivery) -> None:
    counts = f"{delivery.stored} of {delivery.boots} router processes; {delivery.changes} state changes of a replica"
    verdict.check("events of the router", counts, delivery.stored >= delivery.changes > 0)
    errors = f"{len(delivery.lost)} lost, {len(delivery.repeated)} stored twice"
    verdict.check("exactly once", errors, not (delivery.lost or delivery.repeated))
