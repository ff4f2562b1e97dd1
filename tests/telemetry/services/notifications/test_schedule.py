"""Retry schedule of the outbox, disabled channels, and replays under the same id."""

from datetime import timedelta

import pytest

from controlplane.models import Event
from telemetry.channels.base import DeliveryError
from telemetry.models import DeliveryAttempt, Notification
from telemetry.services.notifications import outbox
from telemetry.services.notifications.channels import create_channel, test_send, update_channel
from telemetry.services.notifications.outbox import deliveries, replay
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.conftest import T0
from tests.telemetry.services.notifications.scripted import ScriptedSender, connection_error, queue_messages

pytestmark = pytest.mark.django_db


def test_a_message_is_delivered_once_and_the_log_says_how(queued, receiver, clock):
    assert outbox.deliver_due(clock) == 1
    assert outbox.deliver_due(clock) == 0

    (delivery,) = deliveries()
    (attempt,) = delivery.log.all()
    assert (delivery.state, attempt.number, attempt.status, attempt.error) == ("delivered", 1, 200, "")
    assert attempt.duration_s > 0
    assert [got.payload["type"] for got in receiver.received] == ["alert.test"]


def test_retries_follow_the_schedule_under_one_id(queued, clock):
    """At once, 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h."""
    sender = ScriptedSender(*[connection_error() for _ in range(20)])
    waits = []
    while not deliveries()[0].finished_at:
        sent_at = clock.now
        assert outbox.deliver_due(clock, sender) == 1
        notification = Notification.objects.get()
        waits.append((notification.next_at - sent_at).total_seconds())
        clock.forward(waits[-1] - 0.001)
        assert outbox.deliver_due(clock, sender) == 0
        clock.forward(0.001)

    assert waits[:9] == [5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400]
    assert len(sender.messages) == 10
    assert len({message.id for message in sender.messages}) == 1
    assert Notification.objects.get().state == "failed"


def test_a_receiver_that_returns_after_three_days_gets_the_message(queued, clock):
    sender = ScriptedSender(*[connection_error() for _ in range(9)])
    while Notification.objects.get().state == "pending":
        clock.now = max(clock.now, Notification.objects.get().next_at)
        outbox.deliver_due(clock, sender)

    assert Notification.objects.get().state == "delivered"
    assert clock.now - T0 > timedelta(days=3)


def test_a_longer_retry_after_is_honoured(queued, receiver, clock):
    receiver.replies = [Reply(429, {"Retry-After": "120"})]

    outbox.deliver_due(clock)

    assert Notification.objects.get().next_at == T0 + timedelta(seconds=120)


def test_a_final_error_is_not_retried(queued, receiver, clock):
    receiver.replies = [Reply(400)]

    outbox.deliver_due(clock)

    assert Notification.objects.get().state == "failed"
    assert "400" in DeliveryAttempt.objects.get().error


def test_status_410_disables_the_channel(queued, channel, receiver, clock):
    receiver.replies = [Reply(410)]

    outbox.deliver_due(clock)

    channel.refresh_from_db()
    assert not channel.enabled
    assert "410" in channel.disabled_reason


def test_an_exception_in_a_channel_is_a_failed_attempt(queued, channel, clock):
    test_send(channel)
    sender = ScriptedSender(KeyError("oops"))

    assert outbox.deliver_due(clock, sender) == 2
    assert sorted(Notification.objects.values_list("state", flat=True)) == ["delivered", "pending"]


def test_a_failing_channel_is_disabled_and_its_owner_notified(channel, clock, django_user_model):
    owner = django_user_model.objects.create_user("olga", email="olga@example.org")
    doomed = create_channel("doomed", config={"url": "https://hooks.example/x"}, by=owner)
    mail = {"recipients": "a@example.org", "sender": "w@example.org", "host": "smtp.example.org"}
    create_channel("mail", kind="email", config=mail)
    queue_messages(doomed, "firing")
    for _ in range(outbox.MAX_ATTEMPTS):
        outbox.deliver_due(clock, ScriptedSender(connection_error()))
        doomed.refresh_from_db()
        if doomed.enabled:
            clock.now = Notification.objects.get().next_at

    assert not doomed.enabled
    assert Notification.objects.get(channel=doomed).attempts == 10
    assert "was not delivered" in doomed.disabled_reason
    assert clock.now - T0 > timedelta(days=3)
    notices = Notification.objects.filter(kind="notice").order_by("channel__name")
    assert [(notice.channel.name, notice.payload["data"].get("also_to")) for notice in notices] == [
        ("mail", ["olga@example.org"]),
        ("ops", None),
    ]
    assert "doomed was disabled" in notices[0].payload["data"]["summary"]
    assert Event.objects.filter(kind="channel_disabled").count() == 1


def test_a_disabled_channel_sends_only_tests(channel, receiver, clock, queued):
    update_channel(channel, enabled=False)
    Notification.objects.create(channel=channel, kind="firing", payload={}, next_at=T0, created_at=T0)

    assert outbox.deliver_due(clock) == 1
    update_channel(channel, enabled=True)
    assert outbox.deliver_due(clock) == 1


def test_an_enabled_channel_sends_its_pending_messages(channel, clock, time_machine):
    (waiting,) = queue_messages(channel, "firing")
    Notification.objects.update(attempts=9, next_at=T0 + timedelta(days=1))
    update_channel(channel, enabled=False)
    time_machine.move_to(T0, tick=False)
    update_channel(channel, enabled=True)

    assert outbox.deliver_due(clock, ScriptedSender(connection_error())) == 1
    waiting.refresh_from_db()
    assert (waiting.state, waiting.next_at) == ("pending", T0 + timedelta(seconds=5))


def test_a_channel_with_another_url_sends_its_pending_messages(channel, clock, time_machine):
    queue_messages(channel, "firing")
    Notification.objects.update(attempts=3, next_at=T0 + timedelta(days=1))
    time_machine.move_to(T0, tick=False)
    update_channel(channel, config={"url": "https://hooks.example/repaired", "secret": None})

    assert outbox.deliver_due(clock, ScriptedSender()) == 1


def test_a_replay_sends_the_same_id_again(queued, receiver, clock):
    outbox.deliver_due(clock)
    replay(Notification.objects.get(), clock())
    outbox.deliver_due(clock)

    assert len(receiver.received) == 2
    assert len({got.id for got in receiver.received}) == 1


def test_a_replayed_message_restarts_its_schedule(queued, clock):
    outbox.deliver_due(clock, ScriptedSender(*[DeliveryError("no", retryable=False)]))
    replay(Notification.objects.get(), clock())
    outbox.deliver_due(clock, ScriptedSender(connection_error()))

    assert (Notification.objects.get().next_at - clock()).total_seconds() == 5


def test_a_message_that_waits_for_its_next_attempt_can_be_sent_at_once(queued, clock):
    for wait_s in (0, 5):
        clock.forward(wait_s)
        outbox.deliver_due(clock, ScriptedSender(connection_error()))
    assert Notification.objects.get().next_at == clock() + timedelta(minutes=5)
    replay(queued, clock())

    assert outbox.deliver_due(clock) == 1
    assert Notification.objects.get().state == "delivered"


def test_a_delivery_after_failures_makes_the_messages_due_that_the_receiver_did_not_ask_to_delay(channel, clock):
    (waiting,), (delayed,) = (queue_messages(channel, "firing", alert=alert) for alert in (1, 2))
    limited = DeliveryError("429", status=429, retryable=True, retry_after_s=60.0)
    for message, error in ((waiting, connection_error()), (delayed, limited)):
        Notification.objects.exclude(pk=message.pk).update(next_at=T0 + timedelta(days=1))
        outbox.deliver_due(clock, ScriptedSender(error))
        Notification.objects.filter(attempts=0).update(next_at=T0)
    channel.refresh_from_db()
    test_send(channel)
    Notification.objects.filter(kind="test").update(next_at=T0)

    assert outbox.deliver_due(clock) == 2
    assert dict(Notification.objects.values_list("alert_ids__0", "state")) == {
        None: "delivered", 1: "delivered", 2: "pending",
    }  # fmt: skip
