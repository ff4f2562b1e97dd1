"""Deliveries concurrent with changes of channels, on real connections: locks are taken in one order."""

from contextlib import contextmanager

import pytest
from django.db import connection, transaction

from controlplane.database.transactions import retry_on_conflict
from controlplane.models import Event, ItemFailure, PeriodicTask
from controlplane.services.audit_log import _LOCK as AUDIT
from controlplane.services.fleet.pools import create_pool
from telemetry.channels.base import DeliveryError
from telemetry.channels.enqueue import enqueue
from telemetry.models import Alert, Channel, DeliveryAttempt, Notification, NotificationKind
from telemetry.services.alerts.rules import create_rule
from telemetry.services.notifications import outbox
from telemetry.services.notifications.channels import create_channel, delete_channel
from tests.conftest import wait_until
from tests.controlplane.threads import TIMEOUT_S, in_thread, waiting
from tests.telemetry.conftest import T0
from tests.telemetry.services.notifications.scripted import ScriptedSender, claim_next, queue_messages

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def channel():
    return create_channel("ops", config={"url": "https://hooks.example/x"})


@contextmanager
def audit_log_locked():
    """Hold the audit log's lock, so that transactions that write to it wait with the locks that they hold."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_lock(%s)", [AUDIT])
        try:
            yield
        finally:
            cursor.execute("select pg_advisory_unlock(%s)", [AUDIT])


def wait_for_lock_waiters(number):
    wait_until(lambda: len(waiting()) == number, TIMEOUT_S, f"{number} transactions to wait for a lock")


def deadlocks():
    with connection.cursor() as cursor:
        cursor.execute("select pg_stat_clear_snapshot()")
        cursor.execute("select deadlocks from pg_stat_database where datname = current_database()")
        return cursor.fetchone()[0]


def test_recording_a_result_waits_for_the_deletion_of_its_channel(channel):
    queue_messages(channel, "firing")
    claim, before = claim_next(T0), deadlocks()
    with audit_log_locked(), in_thread(lambda: delete_channel(channel)) as deleting:
        wait_for_lock_waiters(1)
        with in_thread(lambda: outbox.record_outcome(claim, outbox.Outcome(200, 0.1), T0)) as recording:
            wait_for_lock_waiters(2)
            with connection.cursor() as cursor:
                cursor.execute("select pg_advisory_unlock(%s)", [AUDIT])
            deleting.join(TIMEOUT_S)
            recording.join(TIMEOUT_S)
    assert not Channel.objects.exists()
    assert not DeliveryAttempt.objects.exists()
    assert deadlocks() == before


def test_a_notice_waits_for_the_deletion_of_another_channel(channel):
    other = create_channel("chat", config={"url": "https://hooks.example/y"})
    queue_messages(channel, "firing")
    claim, before = claim_next(T0), deadlocks()
    gone = outbox.Outcome(410, 0.1, DeliveryError("it responded with status 410", retryable=False, gone=True))
    with audit_log_locked(), in_thread(lambda: outbox.record_outcome(claim, gone, T0)) as recording:
        wait_for_lock_waiters(1)
        with in_thread(lambda: delete_channel(other)) as deleting:
            wait_for_lock_waiters(2)
            with connection.cursor() as cursor:
                cursor.execute("select pg_advisory_unlock(%s)", [AUDIT])
            recording.join(TIMEOUT_S)
            deleting.join(TIMEOUT_S)
    assert [row.enabled for row in Channel.objects.all()] == [False]
    assert Event.objects.filter(kind="channel_disabled").count() == 1
    assert deadlocks() == before


def test_a_notification_during_a_deletion_goes_to_the_other_channels(channel):
    create_channel("chat", config={"url": "https://hooks.example/y"})
    rule = create_rule(create_pool("chat"), name="rule", kind="replica_down")
    alert = Alert.objects.create(rule=rule, pool=rule.pool, state="firing", started_at=T0, last_breach_at=T0)
    payloads = {alert.pk: {"type": "alert.firing", "data": {"alert": alert.pk, "labels": {}}}}

    def notify():
        with transaction.atomic():
            enqueue(payloads, NotificationKind.TEST, T0)

    with audit_log_locked(), in_thread(lambda: delete_channel(channel)) as deleting:
        wait_for_lock_waiters(1)
        with in_thread(notify) as notifying:
            wait_for_lock_waiters(2)
            with connection.cursor() as cursor:
                cursor.execute("select pg_advisory_unlock(%s)", [AUDIT])
            deleting.join(TIMEOUT_S)
            notifying.join(TIMEOUT_S)
    assert list(Notification.objects.values_list("channel__name", flat=True)) == ["chat"]


# --- retries after a conflict ---------------------------------------------------------------------


def test_a_deadlock_is_retried():
    rows = [create_channel(name, config={"url": "https://hooks.example/x"}).pk for name in ("a", "b")]
    before, attempts = deadlocks(), []

    @retry_on_conflict
    @transaction.atomic
    def lock(first, second, meet):
        attempts.append(first)
        list(Channel.objects.select_for_update().filter(pk=first))
        meet(first)
        list(Channel.objects.select_for_update().filter(pk=second))

    def when_both_hold_one(_first):
        wait_until(lambda: len(set(attempts)) == 2, TIMEOUT_S, "the other one to begin")

    with in_thread(lambda: lock(*rows, when_both_hold_one)), in_thread(lambda: lock(*rows[::-1], when_both_hold_one)):
        pass
    assert len(attempts) == 2 + (deadlocks() - before)


def test_an_unrecorded_result_does_not_end_the_run(channel, caplog):
    with connection.cursor() as cursor:
        cursor.execute(
            "create function ends() returns trigger language plpgsql as "
            "$$ begin raise exception using errcode = '40P01'; end $$"
        )
        cursor.execute("create trigger ends before update on telemetry_deliveryattempt execute function ends()")
    try:
        queue_messages(channel, "firing")
        queue_messages(channel, "firing", alert=8)
        assert outbox.deliver_due(lambda: T0, ScriptedSender()) == 2
    finally:
        with connection.cursor() as cursor:
            cursor.execute("drop trigger ends on telemetry_deliveryattempt")
            cursor.execute("drop function ends()")
    assert sum("the other items continue" in line for line in caplog.messages) == 1  # of two in a row
    assert ItemFailure.objects.get(task=PeriodicTask.DELIVERIES, item=channel.name).failures == 2
    assert set(Notification.objects.values_list("state", flat=True)) == {"pending"}
