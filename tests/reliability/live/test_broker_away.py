"""The broker killed, down and flushed. It carries only wake-ups, so nothing may be lost.

At full size: ``python -m tests.benchmarks soak --only broker_kills broker_outage broker_flushes --full``.
"""

from controlplane.celery import MAX_RECONNECT_INTERVAL_S, app
from tests.pace import is_within
from tests.reliability.outages import FLUSHED_S, RESUMES_S, flush_broker, kill_broker_for

STOCK_S = 9.0  # stock Celery's pause between attempts after the longer outage
AWAY_S = 21.0  # stock Celery would double its pauses, up to this one


def test_no_transition_is_lost_and_work_resumes_quickly_after_any_outage(stand, rest, fleet):
    """Worker and beat keep reconnecting at a constant interval."""
    assert app.conf.broker_connection_max_retries is None
    assert app.conf.broker_connection_retry_on_startup
    start, processes = len(stand.worker.lines), stand.worker.family()
    outage = kill_broker_for(stand, rest, fleet, AWAY_S)
    assert fleet.received == fleet.transitions == fleet.expected
    assert set(outage.statuses) == {200}
    assert is_within(outage.resumed_s, min(MAX_RECONNECT_INTERVAL_S + 3, STOCK_S, RESUMES_S))
    fleet.until_delivered()
    assert len(stand.worker.log_lines("the broker is unavailable", since=start)) == 1
    assert stand.worker.log_lines("Traceback|Message Error", since=start) == []
    assert stand.worker.family() == processes


def test_a_flushed_broker_delays_work_by_two_ticks_at_most(stand):
    """Due work is stored in PostgreSQL alone."""
    assert all(is_within(flush_broker(stand), FLUSHED_S) for _ in range(3))
