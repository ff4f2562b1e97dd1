"""At least once, under the same id: over retries, crashes and days of absence."""

import copy
import os
import signal
import subprocess
import sys
import textwrap
import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, connections

from controlplane.errors import ConflictError
from controlplane.models import Event
from telemetry.channels.base import DeliveryError, Message, Receipt
from telemetry.models import Channel, DeliveryAttempt, Notification
from telemetry.services.notifications import outbox
from telemetry.services.notifications.channels import (
    create_channel,
    open_config,
    public_config,
    rotate_secret,
    test_send,
    update_channel,
)
from telemetry.services.notifications.deliveries import deliveries, replay
from tests.fakes.fake_webhook_receiver import Reply
from tests.telemetry.conftest import T0
from tests.telemetry.services.notifications.kills import killed_deliveries

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


def test_a_replayed_message_begins_its_schedule_anew(queued, clock):
    outbox.deliver_due(clock, Scripted(*[DeliveryError("no", retryable=False)]))
    replay(Notification.objects.get(), clock())
    outbox.deliver_due(clock, Scripted(away()))

    assert (Notification.objects.get().next_at - clock()).total_seconds() == 5


def test_what_is_still_under_way_cannot_be_replayed(queued, clock):
    with pytest.raises(ConflictError):
        replay(queued, clock())


def told(channel, *kinds, alert=7):
    """Messages about an alert, in this order."""
    return [
        Notification.objects.create(
            channel=channel, kind=kind, alert_ids=[alert], payload={"data": {"n": kind}}, next_at=T0, created_at=T0
        )
        for kind in kinds
    ]


def test_an_end_never_overtakes_its_beginning(channel, clock):
    told(channel, "firing", "resolved")
    told(channel, "firing", alert=8)
    sender = Scripted(away())

    assert outbox.deliver_due(clock, sender) == 2  # of alert 7 the first one, which fails, and alert 8
    clock.forward(4)
    assert outbox.deliver_due(clock, sender) == 0
    clock.forward(2)
    assert outbox.deliver_due(clock, sender) == 2
    assert [message.payload["data"]["n"] for message in sender.messages[2:]] == ["firing", "resolved"]


def test_what_was_given_up_holds_nothing_back(channel, clock):
    told(channel, "firing", "resolved")

    assert outbox.deliver_due(clock, Scripted(DeliveryError("no", retryable=False))) == 2
    assert sorted(Notification.objects.values_list("kind", "state")) == [
        ("firing", "failed"),
        ("resolved", "delivered"),
    ]


class Hangs(Scripted):
    """Sends of the channel ``stuck`` end when all of the others have."""

    def __init__(self, others):
        super().__init__()
        self.others, self.in_time = others, []
        self.released = threading.Event()
        self.at_once = self.most = 0
        self.lock = threading.Lock()

    def __call__(self, channel):
        sender = copy.copy(self)
        sender.stuck, sender.all = channel.name == "stuck", self
        return sender

    def send(self, message):
        with self.lock:
            everything = self.all
            everything.at_once += self.stuck
            everything.most = max(everything.most, everything.at_once)
            self.messages.append(message)
            everything.others -= not self.stuck
            if everything.others == 0:
                self.released.set()
        if self.stuck:
            self.in_time.append(self.released.wait(timeout=20))
            with self.lock:
                self.all.at_once -= 1
        return Receipt(204)


def test_a_receiver_that_hangs_delays_nobody_else_and_holds_few_threads(clock, receiver):
    stuck, fine = (create_channel(name, config={"url": receiver.url}) for name in ("stuck", "fine"))
    for number in range(8):
        told(stuck, "firing", alert=number)
    for number in range(5):
        told(fine, "firing", alert=number)
    sender = Hangs(5)

    assert outbox.deliver_due(clock, sender) == 13
    assert sender.in_time == [True] * 8  # while they hung, the others arrived
    assert sender.most == outbox.PER_CHANNEL


def test_a_channel_that_nothing_arrives_at_is_disabled_and_its_owner_told(channel, clock, django_user_model):
    """R18"""
    owner = django_user_model.objects.create_user("olga", email="olga@example.org")
    doomed = create_channel("doomed", config={"url": "https://hooks.example/x"}, by=owner)
    mail = {"recipients": "a@example.org", "sender": "w@example.org", "host": "smtp.example.org"}
    create_channel("mail", kind="email", config=mail)
    told(doomed, "firing")
    for _ in range(outbox.LAST_ATTEMPT):
        outbox.deliver_due(clock, Scripted(away()))
        doomed.refresh_from_db()
        if doomed.enabled:
            clock.now = Notification.objects.get().next_at

    assert not doomed.enabled
    assert Notification.objects.get(channel=doomed).attempts == 10
    assert "never arrived" in doomed.disabled_reason
    assert clock.now - T0 > timedelta(days=3)
    notices = Notification.objects.filter(kind="notice").order_by("channel__name")
    assert [(one.channel.name, one.payload["data"].get("also_to")) for one in notices] == [
        ("mail", ["olga@example.org"]),
        ("ops", None),
    ]
    assert "doomed was disabled" in notices[0].payload["data"]["summary"]
    assert Event.objects.filter(kind="channel_disabled").count() == 1


def test_a_channel_that_is_switched_on_again_begins_with_what_waited(channel, clock, time_machine):
    (waiting,) = told(channel, "firing")
    Notification.objects.update(attempts=9, next_at=T0 + timedelta(days=1))
    update_channel(channel, enabled=False)
    time_machine.move_to(T0, tick=False)
    update_channel(channel, enabled=True)

    assert outbox.deliver_due(clock, Scripted(away())) == 1
    waiting.refresh_from_db()
    assert (waiting.state, waiting.next_at) == ("pending", T0 + timedelta(seconds=5))


def test_the_log_keeps_the_answer_without_the_channel_s_secrets(queued, channel, receiver, clock):
    secret = open_config(channel)["secret"]
    receiver.replies = [Reply(500, body=f"no: {receiver.url} /hook/s3cret-path {secret} \x1b[31m".encode())]

    outbox.deliver_due(clock)

    assert DeliveryAttempt.objects.get().answer == "no: ... ... ... [31m"
    channel.refresh_from_db()
    assert (channel.failed_at, channel.error, channel.delivered_at) == (T0, "it answered with status 500", None)


def test_a_fresh_secret_signs_beside_the_former_one_until_that_is_taken_away(channel, receiver, clock):
    former = open_config(channel)["secret"]
    fresh = rotate_secret(channel)
    channel.refresh_from_db()
    assert (open_config(channel)["secret"], open_config(channel)["previous_secret"]) == (fresh, former)
    test_send(channel)
    outbox.deliver_due(clock_now)
    update_channel(channel, config={"previous_secret": None})
    test_send(channel)
    outbox.deliver_due(clock_now)

    assert [len(got.headers["webhook-signature"].split()) for got in receiver.received] == [2, 1]


def clock_now():
    return datetime.now(UTC) + timedelta(seconds=1)


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
    from telemetry.services.notifications import outbox
    from telemetry.services.notifications.channels import open_sender

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
def test_two_workers_at_once_send_each_message_once(receiver):
    """R17"""
    channels = [create_channel(f"c{number}", config={"url": receiver.url}) for number in range(6)]
    for channel in channels:
        told(channel, "firing", "repeated", "resolved")
    start = threading.Barrier(4)
    made = []

    def work():
        try:
            start.wait(timeout=10)
            made.append(outbox.deliver_due(lambda: T0))
        finally:
            connections.close_all()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    outbox.deliver_due(lambda: T0)  # what a worker found taken while another was at it

    assert len(receiver.received) == len({got.id for got in receiver.received}) == 18
    assert set(Notification.objects.values_list("state", "attempts")) == {("delivered", 1)}


@pytest.mark.django_db(transaction=True)
def test_processes_that_are_killed_around_the_send_lose_nothing_and_send_at_most_twice():
    """R16, in short; ``make bench-soak`` has its 1,000 cycles."""
    database = connection.settings_dict
    counted = killed_deliveries(str(database["HOST"]), database["NAME"], cycles=24, seed=7, timeout_s=100)

    assert (counted.messages, counted.lost, counted.too_often) == (24, 0, 0)
    assert 0 < counted.sent_again <= counted.moments["after the send"] + counted.moments["while it is sent"]


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
