"""One worker at a time claims a message, messages of an alert stay in order, and a slow channel delays no other."""

import math
import threading

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from telemetry.channels.base import DeliveryError, Receipt
from telemetry.models import Notification
from telemetry.services.notifications import outbox
from telemetry.services.notifications.channels import create_channel
from telemetry.services.self_monitoring import overdue_work
from tests.telemetry.conftest import T0
from tests.telemetry.services.notifications.kills import killed_deliveries
from tests.telemetry.services.notifications.scripted import ScriptedSender, claim_next, connection_error, queue_messages

pytestmark = pytest.mark.django_db


def test_a_claimed_message_cannot_be_claimed_until_the_lease_expires(queued, clock):
    claim = claim_next(clock())

    assert claim_next(clock()) is None
    clock.forward(outbox.LEASE_S + 1)
    again = claim_next(clock())
    assert (again.notification.pk, again.number) == (claim.notification.pk, 2)


def test_a_slow_worker_s_late_result_does_not_undo_the_newer_claim(queued, clock):
    slow = claim_next(clock())
    clock.forward(outbox.LEASE_S + 1)
    newer = claim_next(clock())

    outbox.record_outcome(slow, outbox.Outcome(None, 99.0, DeliveryError("x", retryable=False)), clock())
    assert Notification.objects.get().state == "pending"
    outbox.record_outcome(newer, outbox.Outcome(200, 0.1), clock())
    assert Notification.objects.get().state == "delivered"


def test_a_resolution_never_overtakes_its_alert(channel, clock):
    first, _ = queue_messages(channel, "firing", "resolved")
    queue_messages(channel, "firing", alert=8)
    errors, messages = [connection_error()], []

    def fails_first(_channel, message):  # whichever of two threads is faster
        messages.append(message)
        if message.id == f"msg_{first.pk.hex}" and errors:
            raise errors.pop()
        return Receipt(204)

    assert outbox.deliver_due(clock, fails_first) == 2  # of alert 7 the first one, which fails, and alert 8
    clock.forward(4)
    assert outbox.deliver_due(clock, fails_first) == 0
    clock.forward(2)
    assert outbox.deliver_due(clock, fails_first) == 2
    assert [message.payload["data"]["n"] for message in messages[2:]] == ["firing", "resolved"]


def test_a_failed_message_does_not_block_later_ones(channel, clock):
    queue_messages(channel, "firing", "resolved")

    assert outbox.deliver_due(clock, ScriptedSender(DeliveryError("no", retryable=False))) == 2
    assert sorted(Notification.objects.values_list("kind", "state")) == [
        ("firing", "failed"),
        ("resolved", "delivered"),
    ]


class HangingSender(ScriptedSender):
    """A sender that blocks on the channel ``stuck`` until ``remaining`` messages of other channels are sent."""

    def __init__(self, remaining):
        super().__init__()
        self.remaining, self.in_time = remaining, []
        self.released = threading.Event()
        self.concurrent = self.max_concurrent = 0
        self.lock = threading.Lock()

    def __call__(self, channel, message):
        is_stuck = channel.name == "stuck"
        with self.lock:
            self.concurrent += is_stuck
            self.max_concurrent = max(self.max_concurrent, self.concurrent)
            self.messages.append(message)
            self.remaining -= not is_stuck
            if self.remaining == 0:
                self.released.set()
        if is_stuck:
            self.in_time.append(self.released.wait(timeout=20))
            with self.lock:
                self.concurrent -= 1
        return Receipt(204)


def test_a_hanging_receiver_delays_no_other_and_uses_few_threads(clock, receiver):
    stuck, fine = (create_channel(name, config={"url": receiver.url}) for name in ("stuck", "fine"))
    for number in range(8):
        queue_messages(stuck, "firing", alert=number)
    for number in range(5):
        queue_messages(fine, "firing", alert=number)
    sender = HangingSender(5)

    assert outbox.deliver_due(clock, sender) == 13
    assert sender.in_time == [True] * 8  # the other messages were sent meanwhile
    assert sender.max_concurrent == outbox.MAX_PER_CHANNEL


def test_a_backlog_is_read_a_few_times_and_not_for_each_message(channel, clock, monkeypatch):
    monkeypatch.setattr(outbox, "READ_EVERY_S", math.inf)  # only when messages may have become claimable
    for number in range(40):
        queue_messages(channel, "firing", "resolved", alert=number)

    with CaptureQueriesContext(connection) as delivering:
        assert outbox.deliver_due(clock, ScriptedSender()) == 80
    with CaptureQueriesContext(connection) as reading:
        assert overdue_work(clock()) == []

    assert sum("unnest(alert_ids)" in query["sql"] for query in delivering) <= 8
    assert [query["sql"] for query in reading if "telemetry_notification" in query["sql"]] == []


@pytest.mark.django_db(transaction=True)
def test_two_workers_at_once_send_each_message_once(receiver):
    channels = [create_channel(f"c{number}", config={"url": receiver.url}) for number in range(6)]
    for channel in channels:
        queue_messages(channel, "firing", "repeated", "resolved")
    start = threading.Barrier(4)
    attempts = []

    def work():
        try:
            start.wait(timeout=10)
            attempts.append(outbox.deliver_due(lambda: T0))
        finally:
            connections.close_all()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    outbox.deliver_due(lambda: T0)  # messages that a worker skipped because another one had claimed them

    assert len(receiver.received) == len({got.id for got in receiver.received}) == 18
    assert set(Notification.objects.values_list("state", "attempts")) == {("delivered", 1)}


@pytest.mark.django_db(transaction=True)
def test_processes_that_are_killed_around_the_send_lose_nothing_and_send_at_most_twice():
    """``make bench-soak`` has its 1,000 cycles."""
    database = connection.settings_dict
    counted = killed_deliveries(str(database["HOST"]), database["NAME"], cycles=24, seed=7, timeout_s=100)

    assert (counted.messages, counted.lost, counted.too_often) == (24, 0, 0)
    assert 0 < counted.sent_again <= counted.moments["after the send"] + counted.moments["while it is sent"]
