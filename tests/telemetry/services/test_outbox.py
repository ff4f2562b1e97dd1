"""At least once, under the same id: over retries, crashes and days of absence."""

import os
import signal
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from telemetry.channels.base import DeliveryError, Message, Receipt
from telemetry.models import Channel, DeliveryAttempt, Notification
from telemetry.services import outbox
from telemetry.services.channels import (
    create_channel,
    open_config,
    public_config,
    test_send,
    update_channel,
)
from telemetry.services.deliveries import deliveries, replay
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.conftest import T0

pytestmark = pytest.mark.django_db


class Clock:
    """A set clock."""

    def __init__(self):
        self.now = T0

    def __call__(self):
        return self.now

    def forward(self, seconds):
        self.now += timedelta(seconds=seconds)


class Scripted:
    """A channel whose sends end as scripted: None is a success."""

    def __init__(self, *endings):
        self.endings = list(endings)
        self.messages: list[Message] = []

    def __call__(self, _channel):
        return self

    def send(self, message):
        self.messages.append(message)
        ending = self.endings.pop(0) if self.endings else None
        if ending is not None:
            raise ending
        return Receipt(204)

    def close(self):
        pass


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def channel(receiver):
    return create_channel("ops", config={"url": receiver.url})


@pytest.fixture
def queued(channel, time_machine):
    time_machine.move_to(T0, tick=False)
    return test_send(channel)


def away():
    return DeliveryError("it cannot be reached", retryable=True)


def test_a_message_is_delivered_once_and_the_log_says_how(queued, receiver, clock):
    assert outbox.deliver_due(clock) == 1
    assert outbox.deliver_due(clock) == 0

    (delivery,) = deliveries()
    (attempt,) = delivery.log.all()
    assert (delivery.state, attempt.number, attempt.status, attempt.error) == ("delivered", 1, 200, "")
    assert attempt.duration_s > 0
    assert [got.payload["type"] for got in receiver.received] == ["alert.test"]


def test_retries_follow_the_schedule_under_one_id_until_it_is_given_up(queued, clock):
    """R18: at once, 5 s, 5 min, 30 min, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h."""
    sender = Scripted(*[away() for _ in range(20)])
    waits = []
    while not deliveries()[0].finished_at:
        asked_at = clock.now
        assert outbox.deliver_due(clock, sender) == 1
        notification = Notification.objects.get()
        waits.append((notification.next_at - asked_at).total_seconds())
        clock.forward(waits[-1] - 0.001)
        assert outbox.deliver_due(clock, sender) == 0
        clock.forward(0.001)

    assert waits[:9] == [5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400]
    assert len(sender.messages) == 10
    assert len({message.id for message in sender.messages}) == 1
    assert Notification.objects.get().state == "failed"


def test_a_receiver_that_comes_back_after_three_days_gets_it(queued, clock):
    sender = Scripted(*[away() for _ in range(9)])
    while Notification.objects.get().state == "pending":
        clock.now = max(clock.now, Notification.objects.get().next_at)
        outbox.deliver_due(clock, sender)

    assert Notification.objects.get().state == "delivered"
    assert clock.now - T0 > timedelta(days=3)


def test_a_receiver_s_longer_wish_is_honoured(queued, receiver, clock):
    receiver.replies = [Reply(429, {"Retry-After": "120"})]

    outbox.deliver_due(clock)

    assert Notification.objects.get().next_at == T0 + timedelta(seconds=120)


def test_what_is_not_worth_a_retry_is_given_up_at_once(queued, receiver, clock):
    receiver.replies = [Reply(400)]

    outbox.deliver_due(clock)

    assert Notification.objects.get().state == "failed"
    assert "400" in DeliveryAttempt.objects.get().error


def test_a_receiver_that_is_gone_disables_its_channel(queued, channel, receiver, clock):
    receiver.replies = [Reply(410)]

    outbox.deliver_due(clock)

    channel.refresh_from_db()
    assert not channel.enabled
    assert "410" in channel.disabled_reason


def test_a_bug_in_a_channel_is_a_failed_attempt_and_stops_nobody(queued, channel, clock):
    test_send(channel)
    sender = Scripted(KeyError("oops"))

    assert outbox.deliver_due(clock, sender) == 2
    assert sorted(Notification.objects.values_list("state", flat=True)) == ["delivered", "pending"]


def test_a_claimed_message_is_nobody_else_s_until_the_lease_ends(queued, clock):
    claim = outbox.claim_next(clock())

    assert outbox.claim_next(clock()) is None
    clock.forward(outbox.LEASE_S + 1)
    again = outbox.claim_next(clock())
    assert (again.notification.pk, again.number) == (claim.notification.pk, 2)


def test_a_slow_worker_s_late_result_does_not_undo_the_newer_claim(queued, clock):
    slow = outbox.claim_next(clock())
    clock.forward(outbox.LEASE_S + 1)
    newer = outbox.claim_next(clock())

    outbox.record_outcome(slow, outbox.Outcome(None, 99.0, DeliveryError("x", retryable=False)), clock())
    assert Notification.objects.get().state == "pending"
    outbox.record_outcome(newer, outbox.Outcome(200, 0.1), clock())
    assert Notification.objects.get().state == "delivered"


def test_messages_of_a_disabled_channel_wait_but_a_test_goes_out(channel, receiver, clock, queued):
    update_channel(channel, enabled=False)
    Notification.objects.create(channel=channel, kind="firing", payload={}, next_at=T0, created_at=T0)

    assert outbox.deliver_due(clock) == 1
    update_channel(channel, enabled=True)
    assert outbox.deliver_due(clock) == 1


def test_a_replay_sends_the_same_id_again(queued, receiver, clock):
    outbox.deliver_due(clock)
    replay(Notification.objects.get(), clock())
    outbox.deliver_due(clock)

    assert len(receiver.received) == 2
    assert len({got.id for got in receiver.received}) == 1


def test_secrets_are_sealed_at_rest_and_never_shown(channel, receiver):
    """S13"""
    with connection.cursor() as cursor:
        cursor.execute("select row_to_json(c)::text from telemetry_channel c")
        stored = cursor.fetchone()[0]
    sealed = bytes(Channel.objects.get().sealed)
    config = open_config(channel)

    for planted in ("s3cret-path", config["secret"]):
        assert planted.encode() not in sealed
        assert planted not in stored
        assert planted not in str(public_config(channel))


def test_changing_a_secret_keeps_what_is_not_given(channel):
    before = open_config(channel)

    update_channel(channel, config={"previous_secret": before["secret"], "secret": None})

    channel.refresh_from_db()
    after = open_config(channel)
    assert after["url"] == before["url"]
    assert after["previous_secret"] == before["secret"] != after["secret"]


CHILD = """
    import os, signal, sys
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings.test"
    from django.conf import settings
    settings.DATABASES["default"].update(HOST=sys.argv[1], NAME=sys.argv[2])
    import django
    django.setup()
    from telemetry.services import outbox
    from telemetry.services.channels import open_sender

    class Dies:
        def __init__(self, channel):
            self.inner = open_sender(channel)
        def send(self, message):
            self.inner.send(message)
            os.kill(os.getpid(), signal.SIGKILL)  # after the message is out, before that is written down
        def close(self):
            self.inner.close()

    outbox.deliver_due(opener=Dies)
"""


@pytest.mark.django_db(transaction=True)
def test_a_worker_killed_between_send_and_mark_sends_it_again_under_the_same_id(receiver, time_machine):
    """R16, with a real kill -9 of a real process."""
    test_send(create_channel("ops", config={"url": receiver.url}))
    database = connection.settings_dict
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(database["HOST"]), database["NAME"]],
        timeout=30,
        check=False,
        env={**os.environ},
        capture_output=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert len(receiver.received) == 1
    assert Notification.objects.get().state == "pending"

    assert outbox.deliver_due() == 0  # the lease of the dead worker still stands
    time_machine.move_to(datetime.now(UTC) + timedelta(seconds=outbox.LEASE_S + 1), tick=False)
    assert outbox.deliver_due() == 1

    first, second = receiver.received
    assert first.id == second.id
    assert first.body == second.body
    assert Notification.objects.get().state == "delivered"
    lost, last = DeliveryAttempt.objects.order_by("number")
    assert (lost.duration_s, last.status) == (None, 200)
