"""R15: PostgreSQL restarted, killed, down and frozen, under real web, worker and router processes.

At full size: ``python -m tests.benchmarks soak --only R15 --full``.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.conftest import wait_until
from tests.pace import is_within
from tests.reliability.asking import ENDPOINTS, PAGES, Asking
from tests.reliability.database import GIVES_UP_S, RECOVERS_S, faults, hurt, telling, until_it_answers
from tests.reliability.stand import STATEMENT_S, Stand, answers, soon

pytestmark = pytest.mark.timeout(300)


@contextmanager
def quiet(stand: Stand, *, gone: int = 1) -> Iterator[None]:
    """The worker logs one line for the start and one for the end of an outage, and no traceback."""
    begun = len(stand.worker.lines)
    yield
    soon(lambda: len(stand.worker.said("the database is back", since=begun)) >= gone, 10, "the worker's word")
    assert len(stand.worker.said("the database is away", since=begun)) == gone
    assert stand.worker.said("Traceback|Error:", since=begun) == []


def test_while_it_is_away_everybody_is_told_so_and_afterwards_all_goes_on(stand, rest, person):
    before = stand.ask("select count(*) from controlplane_event")
    with quiet(stand), Asking(rest, person) as asking:
        stand.postgres.kill()
        wait_until(lambda: asking.addresses(503) >= {*PAGES, *ENDPOINTS},
                   90, "each address to say that the database is away")  # fmt: skip
        assert httpx.get(f"{stand.url}/healthz", trust_env=False).status_code == 200
        not_ready = httpx.get(f"{stand.url}/readyz", timeout=20, trust_env=False)
        assert (not_ready.status_code, not_ready.json()["reason"]) == (503, "the database does not answer")
        stand.restart_postgres()
        until_it_answers(rest)
        stand.until_ticks_resume(RECOVERS_S)
    assert set(asking.statuses) == {200, 503}
    assert asking.kinds(503, ENDPOINTS) == {"application/problem+json"}
    assert asking.kinds(503, PAGES) == {"text/html"}
    assert stand.ask("select count(*) from controlplane_event") >= before


def test_restarts_are_passed_over_and_each_event_of_a_router_is_stored_once(stand, rest, person):
    begun = len(stand.worker.lines)
    with telling(stand, rest) as router:
        with Asking(rest, person) as asking:
            for number, fault in enumerate(faults(4, seed=1)):
                with hurt(stand, fault):
                    if number == 1:
                        router.until_waiting()
                        router.kill()
                until_it_answers(rest)
                stand.until_ticks_resume(RECOVERS_S)
        told = router.counted()
    assert set(asking.statuses) <= {200, 503}
    assert stand.worker.said("Traceback", since=begun) == []
    assert (told.lost, told.repeated) == ([], [])
    assert told.lives == 2
    assert told.turns > 1


def test_one_that_is_frozen_keeps_nobody_waiting_for_ever(stand, rest, person):
    with quiet(stand):
        stand.postgres.freeze()
        try:
            begun = time.monotonic()
            assert rest.get("pools").status_code == 503
            assert person.get("/policies/").status_code == 503
            assert is_within(time.monotonic() - begun, 2 * (GIVES_UP_S + 3))
            soon(lambda: stand.worker.said("the database is away"), 2 * GIVES_UP_S, "the worker to give up")
        finally:
            stand.postgres.thaw()
        until_it_answers(rest)
        stand.until_ticks_resume(RECOVERS_S)


def test_a_statement_that_takes_too_long_is_ended_by_the_server_and_is_no_absence(stand, rest):
    """A table is locked: waiting statements time out, and the worker does not report the database as down."""
    with stand.sql() as holder, holder.transaction():
        holder.execute("lock table controlplane_pool in access exclusive mode")
        begun = time.monotonic()
        assert rest.get("pools").status_code == 503
        took_s = time.monotonic() - begun
    assert took_s > STATEMENT_S - 1
    assert is_within(took_s, GIVES_UP_S + 3)
    until_it_answers(rest)


def test_a_session_whose_process_fell_asleep_in_a_transaction_holds_its_locks_only_so_long(stand, rest):
    """A worker is frozen while it holds a row lock that announcements need."""
    asleep = "from django.db import connection, transaction; import os, signal; transaction.set_autocommit(False);"
    asleep += " connection.cursor().execute('lock table controlplane_pool'); print('HELD', flush=True); signal.pause()"
    with stand.process("sleeper", "shell", "-c", asleep) as sleeper:
        wait_until(lambda: sleeper.said("HELD"), 60, "the lock to be held")
        sleeper.freeze()
        soon(lambda: answers(lambda: rest.get("pools")) == 200, STATEMENT_S + 10, "its lock to be let go")


def test_a_web_process_that_was_frozen_goes_on(stand, rest):
    """Connections that the server closed meanwhile are replaced."""
    os.kill(stand.web.pid, signal.SIGSTOP)
    with stand.sql() as server:
        server.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid != pg_backend_pid()")
    os.kill(stand.web.pid, signal.SIGCONT)
    until_it_answers(rest)
