"""The delivery log: every message with each attempt at it, and sending one again.

Delivering what the outbox holds: at least once, under the same id each time.

Theory of operation. A notification is claimed by a conditional update that gives the claimer a lease and counts the
attempt; others skip it meanwhile. The attempt is written down before the message goes out and completed after. A
worker that dies in between leaves an attempt without an end and a lease that runs out; then another worker claims the
notification again and sends it again under the same id, by which the receiver knows a duplicate. A result is
recorded only while the claim is still the newest one, so a worker that was merely slow changes nothing later.

Rows are claimed and settled by one thread, messages are sent by several, which know no database. At most
``PER_CHANNEL`` of them wait for one channel, so a receiver that hangs delays nobody else. Of the messages of a channel
about an alert only the oldest that is not settled can be claimed: a later one never overtakes it.

Locks are taken in one order: the channel, the notification, its attempts, the logs (``channels.holding``). Each outcome
is a transaction of its own, run again where PostgreSQL ends it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.utils import timezone

from controlplane.celery import wake
from controlplane.database.transactions import retry_on_conflict
from controlplane.errors import ConflictError, DecryptionError
from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask
from telemetry.channels.base import DeliveryError, Message, Sender
from telemetry.channels.enqueue import DELIVER
from telemetry.models import Channel, DeliveryAttempt, Notification, NotificationKind, NotificationState
from telemetry.services.notifications.channels import disable_channel, open_sender, without_secrets


def deliveries() -> QuerySet[Notification]:
    """Messages with their attempts and channel, the newest first. Two queries."""
    return Notification.objects.select_related("channel").prefetch_related("log").order_by("-number")


def narrowed(
    found: QuerySet[Notification],
    *,
    channel: str = "",
    state: str = "",
    kind: str = "",
    alert: int | None = None,
    before: int | None = None,
) -> QuerySet[Notification]:
    """Those of a channel of this name, in this state, of this kind, about this alert, before this number."""
    asked: dict[str, Any] = {"channel__name": channel, "state": state, "kind": kind, "number__lt": before}
    if alert is not None:
        asked["alert_ids__contains"] = [alert]
    return found.filter(**{name: value for name, value in asked.items() if value})


@transaction.atomic
def replay(notification: Notification, now: datetime) -> Notification:
    """Send a message again that was given up or delivered: at once, under the same id, as on its first day."""
    ended = Notification.objects.filter(pk=notification.pk).exclude(state=NotificationState.PENDING)
    if not ended.update(
        state=NotificationState.PENDING, next_at=now, leased_until=None, finished_at=None, tried_before=F("attempts")
    ):
        raise ConflictError("The message is still being delivered.")
    wake(DELIVER)
    notification.refresh_from_db()
    return notification


log = logging.getLogger(__name__)

LEASE_S = 60.0  # longer than any send may take
BUDGET_S = 30.0  # in which a run claims; what is left waits for the next
AT_ONCE = 16  # messages under way in one run
PER_CHANNEL = 2  # of one channel, in all runs together
LOOK_S = 0.5  # between two looks for what has become due while others are under way
# Seconds from one attempt to the next (Standard Webhooks, OPERATORS 2.6): at once, 5 s, 5 min, 30 min, 2 h ... 24 h.
PAUSES_S = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
LAST_ATTEMPT = len(PAUSES_S) + 1
GIVEN_UP = f"a message was tried {LAST_ATTEMPT} times over {sum(PAUSES_S) / 86_400:.1f} days and never arrived"
Opener = Callable[[Channel], Sender]


@dataclass(frozen=True, slots=True)
class Claim:
    """A notification that is ours until the lease ends, and the attempt that we are making."""

    notification: Notification
    number: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt went; ``error`` is None for a success."""

    status: int | None
    duration_s: float
    error: DeliveryError | None = None
    answer: str = ""


def deliver_due(clock: Callable[[], datetime] = timezone.now, opener: Opener = open_sender) -> int:
    """Send everything that is due; how many attempts were made. Ends when nothing is due and nothing under way."""
    ends_s = time.monotonic() + BUDGET_S
    under_way: dict[Future[Outcome], Claim] = {}
    attempts = 0
    with (
        isolated_items(PeriodicTask.DELIVERIES) as item,
        ThreadPoolExecutor(AT_ONCE, thread_name_prefix="deliver") as threads,
    ):
        while True:
            while time.monotonic() < ends_s and len(under_way) < AT_ONCE and (claim := claim_next(clock())):
                under_way[threads.submit(attempt, claim, clock(), opener)] = claim
                attempts += 1
            if not under_way:
                return attempts
            for done in wait(under_way, LOOK_S, FIRST_COMPLETED).done:
                claim = under_way.pop(done)
                with item(claim.notification.channel.name):  # one that fails is claimed again when its lease ends
                    record_outcome(claim, done.result(), clock())


def due(now: datetime) -> QuerySet[Notification]:
    """What may be claimed now: nobody is at it, its turn among its alert's has come, and its channel has room."""
    free = Q(leased_until=None) | Q(leased_until__lte=now)
    wanted = Q(channel__enabled=True) | Q(kind=NotificationKind.TEST)  # of a disabled channel the others wait
    pending = Notification.objects.filter(state=NotificationState.PENDING)
    beside = pending.filter(channel=OuterRef("channel")).order_by()
    earlier = beside.filter(number__lt=OuterRef("number"), alert_ids__overlap=OuterRef("alert_ids"))
    busy = beside.filter(leased_until__gt=now).values("channel").annotate(count=Count("pk")).values("count")
    room = pending.annotate(busy=Coalesce(Subquery(busy), 0)).filter(busy__lt=PER_CHANNEL)
    return room.filter(free, wanted, ~Exists(earlier), next_at__lte=now)


@retry_on_conflict
@transaction.atomic
def claim_next(now: datetime) -> Claim | None:
    """Claim the notification that has been due the longest and write down the attempt; None for none."""
    notification = (
        due(now)
        .select_for_update(skip_locked=True, of=("self",))
        .select_related("channel")
        .order_by("next_at", "number")
        .first()
    )
    if notification is None:
        return None
    notification.attempts += 1
    notification.leased_until = now + timedelta(seconds=LEASE_S)
    notification.save(update_fields=["attempts", "leased_until"])
    DeliveryAttempt.objects.create(notification=notification, number=notification.attempts, started_at=now)
    return Claim(notification, notification.attempts)


def attempt(claim: Claim, now: datetime, opener: Opener) -> Outcome:
    """Send once. Nothing is read or written in the database; nothing that a channel does is raised."""
    channel = claim.notification.channel
    message = Message(f"msg_{claim.notification.pk.hex}", now, claim.notification.payload)
    started_s = time.monotonic()
    try:
        sender = opener(channel)
    except DecryptionError:
        return Outcome(None, 0.0, DeliveryError("its stored config cannot be opened", retryable=True))
    try:
        receipt = sender.send(message)
    except DeliveryError as error:
        answer = without_secrets(channel, error.answer)
        return Outcome(error.status, time.monotonic() - started_s, error, answer)
    except Exception as error:
        log.exception("channel kind %s failed", channel.kind)
        return Outcome(None, time.monotonic() - started_s, DeliveryError(type(error).__name__, retryable=True))
    finally:
        sender.close()
    return Outcome(receipt.status, time.monotonic() - started_s, answer=without_secrets(channel, receipt.answer))


@retry_on_conflict
@transaction.atomic
def record_outcome(claim: Claim, outcome: Outcome, now: datetime) -> None:
    """Complete the attempt, and settle the notification unless somebody claimed it after us.

    The channel is locked first, as by whoever deletes it; one that is gone has nothing left to settle.
    """
    error, channel = outcome.error, claim.notification.channel
    if not Channel.objects.select_for_update(no_key=True).filter(pk=channel.pk).exists():
        return
    claim.notification.log.filter(number=claim.number).update(
        duration_s=outcome.duration_s,
        status=outcome.status,
        error=str(error)[:200] if error else "",
        answer=outcome.answer[:200],
    )
    ours = Notification.objects.filter(pk=claim.notification.pk, state=NotificationState.PENDING, attempts=claim.number)
    if error is None:
        Channel.objects.filter(pk=channel.pk).update(delivered_at=now)
        ours.update(state=NotificationState.DELIVERED, finished_at=now, leased_until=None)
    else:
        log.warning("channel %s: attempt %s failed: %s", channel.name, claim.number, error)
        Channel.objects.filter(pk=channel.pk).update(failed_at=now, error=str(error)[:200])
        _after_failure(claim, ours, error, now)


def _after_failure(claim: Claim, ours: QuerySet[Notification], error: DeliveryError, now: datetime) -> None:
    number = claim.number - claim.notification.tried_before
    if error.retryable and number < LAST_ATTEMPT:
        ours.update(next_at=now + timedelta(seconds=_pause_s(number, error)), leased_until=None)
        return
    given_up = ours.update(state=NotificationState.FAILED, finished_at=now, leased_until=None)
    if error.gone:
        reason = "its receiver answered 410: it wants nothing any more"
        disable_channel(claim.notification.channel, reason=reason, now=now)
    elif given_up and error.retryable and claim.notification.kind != NotificationKind.TEST:
        disable_channel(claim.notification.channel, reason=GIVEN_UP, now=now)


def _pause_s(number: int, error: DeliveryError) -> float:
    """The schedule's pause after an attempt, or the receiver's longer wish."""
    return max(PAUSES_S[number - 1], error.retry_after_s or 0.0)
