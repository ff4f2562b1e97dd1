"""Heartbeats, withheld while telemetry is late, and firing alerts resent to receivers that expire them."""

from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import connection

from telemetry.channels import KINDS
from telemetry.models import Alert, AlertRule, Channel, EvaluationState, Heartbeat, Notification, ScrapeShard
from telemetry.services.notifications import outbox
from telemetry.services.notifications.channels import create_channel, test_send
from telemetry.services.notifications.heartbeats import heartbeat, masked_url, send_if_due, set_heartbeat
from telemetry.services.notifications.outbox import deliver_due, resend_firing
from telemetry.services.self_monitoring import overdue_work
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.channels.messages import payload
from tests.telemetry.conftest import T0
from tests.telemetry.services.notifications.scripted import queue_messages

pytestmark = pytest.mark.django_db


def later(seconds):
    return T0 + timedelta(seconds=seconds)


@pytest.fixture
def at_noon(time_machine):
    time_machine.move_to(T0, tick=False)


def test_a_heartbeat_is_sent_when_it_is_due_and_once(at_noon, receiver):
    set_heartbeat(url=receiver.url, every_s=60)

    assert [send_if_due(later(second)) for second in (0, 1, 59, 60, 61, 200, 201)] == [
        True,
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert len(receiver.received) == 3
    assert heartbeat().sent_at == later(200)


@pytest.mark.parametrize("work", ["scraping", "evaluating", "delivering"])
def test_no_heartbeat_while_telemetry_is_late(at_noon, receiver, pool, settings, work):
    set_heartbeat(url=receiver.url, every_s=10)
    late = later(3 * max(settings.SCRAPE_INTERVAL_S, 5) * 2)
    if work == "scraping":
        ScrapeShard.objects.create(number=0, due_at=T0, lag_s=0)
    elif work == "evaluating":
        EvaluationState.objects.create(pk=1, at=T0)
    else:
        channel = create_channel("ops", config={"url": receiver.url})
        deliver_due(lambda: T0)
        test_send(channel)  # which no run has read since

    assert send_if_due(late) is False
    assert receiver.received == []
    assert work in heartbeat().withheld
    assert [text.startswith(work) for text in overdue_work(late)] == [True]
    assert send_if_due(T0 + timedelta(seconds=12)) is False  # not due: the withheld heartbeat counts


def test_a_waiting_message_is_not_late(at_noon, pool, receiver):
    channel = create_channel("ops", config={"url": receiver.url}, enabled=False)
    Notification.objects.create(channel=channel, kind="firing", payload={}, next_at=T0, created_at=T0)

    deliver_due(lambda: later(600))
    assert overdue_work(later(600)) == []


def test_a_page_reads_since_when_messages_are_due_from_the_last_delivery_run(at_noon, receiver, monkeypatch):
    channel = create_channel("ops", config={"url": receiver.url})
    queue_messages(channel, "firing", "resolved")
    monkeypatch.setattr(outbox, "CLAIM_FOR_S", 0.0)  # a run that has no time left sends nothing

    deliver_due(lambda: later(60))
    assert overdue_work(later(60)) == ["delivering messages is 60 s late"]


def test_a_failed_heartbeat_is_shown_and_retried(at_noon, receiver):
    receiver.replies = [Reply(503)]
    set_heartbeat(url=receiver.url, every_s=10)

    assert send_if_due(T0) is False
    assert (heartbeat().error, heartbeat().failed_at) == ("it responded with status 503", T0)
    assert send_if_due(later(10)) is True


def test_the_heartbeat_url_is_encrypted_kept_and_never_shown(at_noon, receiver):
    set_heartbeat(url=receiver.url, every_s=10)
    changed = set_heartbeat(url="", every_s=20)

    assert b"s3cret-path" not in bytes(Heartbeat.objects.get().encrypted)
    assert masked_url(changed) == f"{receiver.origin}/..."
    assert send_if_due(T0) is True


def fire(pool, **changes):
    rule = AlertRule.objects.filter(pool=pool).first()
    return Alert.objects.create(rule=rule, pool=pool, state="firing", started_at=T0, last_breach_at=T0, **changes)


def notified(channel, alert, state="delivered", kind="firing"):
    Notification.objects.create(
        channel=channel,
        kind=kind,
        alert=alert,
        alert_ids=[alert.pk],
        payload=payload(alert.pk, kind, summary=f"{kind} {state}", labels=alert.labels),
        state=state,
        next_at=T0,
        created_at=T0,
    )


def test_only_delivered_firing_alerts_are_resent(pool, receiver):
    am = create_channel("am", kind="alertmanager", config={"url": receiver.origin})
    notified(create_channel("hook", config={"url": receiver.url}), alert := fire(pool))
    assert resend_firing(T0) == 0  # it was not delivered to this channel
    notified(am, alert, state="pending")
    assert resend_firing(T0) == 0

    Notification.objects.filter(channel=am).update(state="delivered")
    notified(am, alert, kind="repeated")
    assert resend_firing(T0) == 1
    (got,) = receiver.received
    assert [alert["annotations"]["summary"] for alert in got.payload] == ["repeated delivered"]
    assert got.path == "/api/v2/alerts"

    Alert.objects.update(state="resolved")
    assert resend_firing(T0) == 0


def test_a_failed_resend_is_shown_at_the_channel(pool, receiver):
    am = create_channel("am", kind="alertmanager", config={"url": receiver.origin})
    notified(am, fire(pool))
    receiver.replies = [Reply(500)]

    resend_firing(T0)

    assert Channel.objects.get().error == "it responded with status 500"


@pytest.mark.django_db(transaction=True)
def test_an_alert_that_resolves_while_it_is_resent_is_resolved_at_the_receiver(pool, monkeypatch):
    """Its resolution may have been delivered before the resend arrives, which would revive it for minutes."""
    am = create_channel("am", kind="alertmanager", config={"url": "http://127.0.0.1:9"})
    notified(am, fire(pool, labels={"pool": "chat", "rule": "a"}))
    notified(am, lasting := fire(pool, labels={"pool": "chat", "rule": "b"}, subject="r1"))
    pushed = []

    def resend(config, alerts, now):
        pushed.append([(alert["alert"], alert["state"]) for alert in alerts])
        Alert.objects.exclude(pk=lasting.pk).update(state="resolved")
        connection.close()  # this thread's

    monkeypatch.setitem(KINDS, "alertmanager", replace(KINDS["alertmanager"], resend=resend))
    resend_firing(T0)
    resolved = Alert.objects.exclude(pk=lasting.pk).get()
    assert pushed == [[(lasting.pk, "firing"), (resolved.pk, "firing")], [(resolved.pk, "resolved")]]
