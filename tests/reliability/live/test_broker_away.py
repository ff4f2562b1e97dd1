"""R12 to R14: the broker killed, down and flushed. It carries only wake-ups, so nothing may be lost.

At full size: ``python -m tests.benchmarks soak --only R12 R13 R14 --full``.
"""

import pytest

from controlplane.broker import LONGEST_PAUSE_S
from controlplane.celery import app
from tests.pace import is_within
from tests.reliability.broker import FLUSHED_S, RESUMES_S, flush, kill_and_return

pytestmark = pytest.mark.timeout(300)
STOCK_S = 9.0  # that stock Celery waits until its next try when the broker returns after the longer absence
AWAY_S = (8.0, 21.0)


def test_killed_and_away_it_costs_no_transition_and_is_found_again_as_soon_as_after_a_moment(stand, rest, fleet):
    """Worker and beat keep reconnecting at a constant interval."""
    assert app.conf.broker_connection_max_retries is None
    assert app.conf.broker_connection_retry_on_startup
    begun, processes = len(stand.worker.lines), stand.worker.family()
    absences = [kill_and_return(stand, rest, fleet, away_s) for away_s in AWAY_S]
    assert fleet.told == fleet.transitions == fleet.expected
    assert all(set(absence.statuses) == {200} for absence in absences)
    assert is_within(max(absence.resumed_s for absence in absences), min(LONGEST_PAUSE_S + 3, STOCK_S, RESUMES_S))
    fleet.until_delivered()
    assert len(stand.worker.said("the broker is away", since=begun)) == len(AWAY_S)
    assert stand.worker.said("Traceback|Message Error", since=begun) == []
    assert stand.worker.family() == processes


def test_flushed_it_knows_again_within_two_ticks_what_is_due(stand):
    """R14: due work is stored in PostgreSQL alone."""
    assert all(is_within(flush(stand), FLUSHED_S) for _ in range(3))
