"""R12 to R14: the broker killed, away and flushed. It carries wake-ups, so nothing may be lost with it."""

import time
from collections.abc import Iterator

import httpx
import pytest
import redis

from controlplane.broker import LONGEST_PAUSE_S
from controlplane.celery import app
from tests.conftest import wait_until
from tests.end_to_end.live_stack import only_the_hit_rate
from tests.fakes.fake_webhook_receiver import FakeWebhookReceiver, receiving
from tests.reliability.stand import Stand, is_within, soon

pytestmark = pytest.mark.timeout(300)
RESUMES_S = 10
CYCLES = 3
AWAY_S = 8.0
TICK_S = 1.0
LONG_S = 30.0
QUICK = {"window_s": 10, "baseline_s": 60, "min_requests": 1, "min_tokens": 1, "for_s": 0, "keep_firing_s": 0}


@pytest.fixture(scope="module")
def rest(stand: Stand) -> Iterator[httpx.Client]:
    with stand.rest() as client:
        yield client


@pytest.fixture(scope="module")
def receiver(stand: Stand, rest: httpx.Client) -> Iterator[FakeWebhookReceiver]:
    with receiving() as receiver:
        edit = rest.patch(f"alert-rules/{only_the_hit_rate(rest)}", json={"settings": QUICK}, headers={"If-Match": "*"})
        assert edit.status_code == 200, edit.text
        assert rest.post("channels", json={"name": "ops", "config": {"url": receiver.url}}).status_code == 201
        yield receiver


def measured(stand: Stand, ratio: float) -> None:
    """What the fleet's last minutes looked like: 0.8 until just now, and ``ratio`` since."""
    stand.manage("shell", "-c", f"from tests.reliability.history import write; write({ratio})")


def test_killed_and_away_for_a_while_it_costs_no_transition_of_an_alert(stand, rest, receiver):
    """R12, in short: each time the fleet falls ill, or recovers, while nothing can be woken."""
    begun = len(stand.worker.lines)
    for cycle in range(CYCLES):
        stand.valkey.kill()
        away_until = time.monotonic() + AWAY_S
        measured(stand, 0.1 if cycle % 2 == 0 else 0.8)
        assert rest.get("pools").status_code == 200
        made = rest.post("pools", json={"name": f"made-{cycle}", "models": [f"m{cycle}"]})
        assert made.status_code == 201, made.text
        wait_until(lambda until=away_until: time.monotonic() > until, AWAY_S + 1, "some seconds to pass")
        stand.valkey.start()
        stand.until_ticks_resume(RESUMES_S)
        expected = ["alert.firing", "alert.resolved"] * 2
        soon(lambda wanted=expected[: cycle + 1]: told(receiver) == wanted, 30, f"{expected[: cycle + 1]}, each once")
    assert transitions(stand) == ["alert_firing", "alert_resolved", "alert_firing"]
    undelivered = "select count(*) from telemetry_notification where state != 'delivered'"
    soon(lambda: stand.ask(undelivered) == 0, 10, "the last message to be marked")
    assert len(stand.worker.said("the broker is away", since=begun)) == CYCLES
    assert stand.worker.said("Traceback|Message Error", since=begun) == []


def transitions(stand: Stand) -> list[str]:
    """The rows of the rule's alerts. Before all others were switched off the replica that is nowhere had some."""
    statement = """
        select coalesce(array_agg(event.kind order by event.id), '{}') from controlplane_event event
        join telemetry_alert alert on alert.id = (event.detail ->> 'alert')::bigint
        join telemetry_alertrule rule on rule.id = alert.rule_id
        where event.kind like 'alert%' and rule.kind = 'hit_rate_drop'
    """
    return list(stand.ask(statement))


def told(receiver: FakeWebhookReceiver) -> list[str]:
    return [message.payload["type"] for message in receiver.received]


def test_flushed_it_knows_again_within_two_ticks_what_is_due(stand):
    """R14: what is due stands in PostgreSQL alone."""
    path = stand.environment["WARMPATH_REDIS_URL"].removeprefix("redis+socket://").partition("?")[0]
    with redis.Redis(unix_socket_path=path) as broker:
        for _ in range(3):
            broker.flushall()
            assert is_within(stand.until_ticks_resume(RESUMES_S), 2 * TICK_S + 1)


def test_away_for_long_it_is_found_again_as_soon_as_after_a_moment(stand):
    """R13, in short: neither worker nor beat gives up, and the pause between two tries does not grow.

    Stock Celery waits for 8 to 10 s between two tries by the end of this, and for 30 in the end.
    """
    assert app.conf.broker_connection_max_retries is None
    assert app.conf.broker_connection_retry_on_startup
    stand.valkey.kill()
    returns_at = time.monotonic() + LONG_S
    wait_until(lambda: time.monotonic() > returns_at, LONG_S + 1, "half a minute to pass", every_s=0.5)
    stand.valkey.start()
    assert is_within(stand.until_ticks_resume(RESUMES_S), LONGEST_PAUSE_S + 3)
