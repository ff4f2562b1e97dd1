"""PostgreSQL restarted, killed, down and frozen, under real web, worker and router processes.

At full size: ``python -m tests.benchmarks soak --only database --full``.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.conftest import wait_until
from tests.pace import is_within
from tests.reliability.event_router import event_router
from tests.reliability.outages import (
    CLIENT_TIMEOUT_S,
    ENDPOINTS,
    PAGES,
    RECOVERS_S,
    Polling,
    database_outage,
    faults,
    until_api_recovers,
)
from tests.reliability.stand import STATEMENT_S, Stand, soon, status_of


@contextmanager
def logged_once(stand: Stand) -> Iterator[None]:
    """The worker logs one line for the start and one for the end of an outage, and no traceback."""
    start = len(stand.worker.lines)
    yield
    soon(lambda: stand.worker.log_lines("the database is available again", since=start), 10, "the worker's log line")
    assert len(stand.worker.log_lines("the database is unavailable", since=start)) == 1
    assert stand.worker.log_lines("Traceback|Error:", since=start) == []


def test_pages_and_rest_respond_with_503_during_an_outage_and_recover(stand, rest, browser):
    before = stand.query("select count(*) from controlplane_event")
    with logged_once(stand), Polling(rest, browser) as polling:
        stand.postgres.kill()
        wait_until(lambda: polling.addresses(503) >= {*PAGES, *ENDPOINTS}, 90, "each address to respond with 503")
        assert httpx.get(f"{stand.url}/healthz", trust_env=False).status_code == 200
        not_ready = httpx.get(f"{stand.url}/readyz", timeout=20, trust_env=False)
        assert (not_ready.status_code, not_ready.json()["reason"]) == (503, "the database does not respond")
        stand.restart_postgres()
        until_api_recovers(rest)
        stand.until_ticks_resume(RECOVERS_S)
    assert set(polling.statuses) == {200, 503}
    assert polling.kinds(503, ENDPOINTS) == {"application/problem+json"}
    assert polling.kinds(503, PAGES) == {"text/html"}
    assert stand.query("select count(*) from controlplane_event") >= before


def test_each_event_of_a_router_is_stored_once_over_outages(stand, rest, browser):
    start = len(stand.worker.lines)
    with event_router(stand, rest) as router:
        with Polling(rest, browser) as polling:
            for number, fault in enumerate(faults(4, seed=1)):
                with database_outage(stand, fault):
                    if number == 1:
                        router.until_unsent()
                        router.kill()
                until_api_recovers(rest)
                stand.until_ticks_resume(RECOVERS_S)
        delivery = router.stop_and_count()
    assert set(polling.statuses) <= {200, 503}
    assert stand.worker.log_lines("Traceback", since=start) == []
    assert (delivery.lost, delivery.repeated) == ([], [])
    assert delivery.boots == 2
    assert delivery.changes > 1


def test_requests_time_out_while_the_database_is_frozen(stand, rest, browser):
    with logged_once(stand):
        stand.postgres.freeze()
        try:
            started = time.monotonic()
            assert rest.get("pools").status_code == 503
            assert browser.get("/policies/").status_code == 503
            assert is_within(time.monotonic() - started, 2 * (CLIENT_TIMEOUT_S + 3))
            soon(
                lambda: stand.worker.log_lines("the database is unavailable"),
                2 * CLIENT_TIMEOUT_S,
                "the worker to give up",
            )
        finally:
            stand.postgres.thaw()
        until_api_recovers(rest)
        stand.until_ticks_resume(RECOVERS_S)


def test_a_statement_that_waits_for_a_lock_times_out(stand, rest):
    with stand.sql() as holder, holder.transaction():
        holder.execute("lock table controlplane_pool in access exclusive mode")
        started = time.monotonic()
        assert rest.get("pools").status_code == 503
        took_s = time.monotonic() - started
    assert took_s > STATEMENT_S - 1
    assert is_within(took_s, CLIENT_TIMEOUT_S + 3)
    until_api_recovers(rest)


def test_locks_of_a_frozen_process_are_released(stand, rest):
    script = "from django.db import connection, transaction; import os, signal; transaction.set_autocommit(False);"
    script += " connection.cursor().execute('lock table controlplane_pool'); print('HELD', flush=True); signal.pause()"
    with stand.process("sleeper", "shell", "-c", script) as sleeper:
        wait_until(lambda: sleeper.log_lines("HELD"), 60, "the lock to be held")
        sleeper.freeze()
        soon(lambda: status_of(lambda: rest.get("pools")) == 200, STATEMENT_S + 10, "its lock to be released")


def test_a_web_process_replaces_connections_that_the_server_closed(stand, rest):
    os.kill(stand.web.pid, signal.SIGSTOP)
    with stand.sql() as server:
        server.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid != pg_backend_pid()")
    os.kill(stand.web.pid, signal.SIGCONT)
    until_api_recovers(rest)
