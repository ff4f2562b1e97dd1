"""Delivers notifications from the outbox at least once, under the same id at each attempt; and lists and replays them.

Theory of operation. A worker claims a notification by a conditional update that sets a lease and counts the attempt;
other workers skip it meanwhile. The attempt is stored before the message is sent and completed afterwards. A worker
that dies in between leaves an unfinished attempt and a lease that expires; then another worker claims and sends it
again, under the same id, by which the receiver recognizes a duplicate. A result is stored only if the claim is still
the newest one, so a worker that was merely slow changes nothing later.

One thread claims rows and stores results; several threads send messages and do not use the database. At most
``MAX_PER_CHANNEL`` messages are sent to one channel at a time, so a receiver that hangs delays no others. Of a
channel's messages about an alert, only the oldest pending one can be claimed, so messages arrive in order.

Locks are taken in one order: the channel, the notification, its attempts, the logs (``enqueue.lock_channels``). Each
result is a transaction of its own, which is repeated if PostgreSQL aborts it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
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
from telemetry.channels import KINDS
from telemetry.channels.base import DeliveryError, Message, Receipt
from telemetry.channels.enqueue import DELIVER
from telemetry.models import (
    Alert,
    AlertState,
    Channel,
    DeliveryAttempt,
    Notification,
    NotificationKind,
    NotificationState,
)
from telemetry.services.notifications.channels import disable_channel, open_config, redact_secrets, send

log = logging.getLogger(__name__)

LEASE_S = 60.0  # longer than any send may take
CLAIM_FOR_S = 30.0  # a run claims messages for so long; the next run claims the rest
CONCURRENCY = 16  # messages being sent in one run
MAX_PER_CHANNEL = 2  # messages being sent to one channel, in all runs together
POLL_S = 0.5  # between two checks for due messages while others are being sent
# Seconds from one attempt to the next (Standard Webhooks): at once, 5 s, 5 min, 30 min, 2 h ... 24 h.
RETRY_DELAYS_S = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
MAX_ATTEMPTS = len(RETRY_DELAYS_S) + 1
GAVE_UP_REASON = f"a message was not delivered in {MAX_ATTEMPTS} attempts over {sum(RETRY_DELAYS_S) / 86_400:.1f} days"
TOO_MANY_REQUESTS = 429
MAX_RESENT = 500  # messages of one channel that are searched for firing alerts
Send = Callable[[Channel, Message], Receipt]


def deliveries() -> QuerySet[Notification]:
    """Messages with their attempts and channel, newest first. Two queries."""
    return Notification.objects.select_related("channel").prefetch_related("log").order_by("-number")


def filter_deliveries(
    rows: QuerySet[Notification],
    *,
    channel: str = "",
    state: str = "",
    kind: str = "",
    alert: int | None = None,
    before: int | None = None,
) -> QuerySet[Notification]:
    """Messages of a channel, in a state, of a kind, about an alert, before a number."""
    filters: dict[str, Any] = {"channel__name": channel, "state": state, "kind": kind, "number__lt": before}
    if alert is not None:
        filters["alert_ids__contains"] = [alert]
    return rows.filter(**{name: value for name, value in filters.items() if value})


@transaction.atomic
def replay(notification: Notification, now: datetime) -> Notification:
    """Send a message at once, under the same id, with a new retry schedule.

    One that was delivered, failed, or waits for its next attempt; ConflictError for one that is being sent.
    """
    is_waiting = Q(state=NotificationState.PENDING, attempts__gt=0, leased_until=None)
    is_finished = ~Q(state=NotificationState.PENDING)
    if not Notification.objects.filter(is_waiting | is_finished, pk=notification.pk).update(
        state=NotificationState.PENDING, next_at=now, leased_until=None, finished_at=None, tried_before=F("attempts")
    ):
        raise ConflictError("The message is being sent.")
    wake(DELIVER)
    notification.refresh_from_db()
    return notification


@dataclass(frozen=True, slots=True)
class Claim:
    """A notification that this worker holds until the lease expires, and the number of its attempt."""

    notification: Notification
    number: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an attempt; ``error`` is None for a success."""

    status: int | None
    duration_s: float
    error: DeliveryError | None = None
    response: str = ""


def deliver_due(clock: Callable[[], datetime] = timezone.now, sender: Send = send) -> int:
    """Send all due messages; the number of attempts. Ends when nothing is due and nothing is being sent."""
    ends_s = time.monotonic() + CLAIM_FOR_S
    sending: dict[Future[Outcome], Claim] = {}
    attempts = 0
    with (
        isolated_items(PeriodicTask.DELIVERIES) as item,
        ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="deliver") as threads,
    ):
        while True:
            while time.monotonic() < ends_s and len(sending) < CONCURRENCY and (claim := claim_next(clock())):
                sending[threads.submit(attempt, claim, clock(), sender)] = claim
                attempts += 1
            if not sending:
                return attempts
            for future in wait(sending, POLL_S, FIRST_COMPLETED).done:
                claim = sending.pop(future)
                with item(claim.notification.channel.name):  # after an error it is claimed again when its lease expires
                    record_outcome(claim, future.result(), clock())


def due_notifications(now: datetime) -> QuerySet[Notification]:
    """Messages that can be claimed: not leased, the first of their alert, and of a channel below its limit."""
    is_free = Q(leased_until=None) | Q(leased_until__lte=now)
    is_enabled = Q(channel__enabled=True) | Q(kind=NotificationKind.TEST)
    pending = Notification.objects.filter(state=NotificationState.PENDING)
    of_channel = pending.filter(channel=OuterRef("channel")).order_by()
    earlier = of_channel.filter(number__lt=OuterRef("number"), alert_ids__overlap=OuterRef("alert_ids"))
    leased = of_channel.filter(leased_until__gt=now).values("channel").annotate(count=Count("pk")).values("count")
    below_limit = pending.annotate(in_progress=Coalesce(Subquery(leased), 0)).filter(in_progress__lt=MAX_PER_CHANNEL)
    return below_limit.filter(is_free, is_enabled, ~Exists(earlier), next_at__lte=now)


@retry_on_conflict
@transaction.atomic
def claim_next(now: datetime) -> Claim | None:
    """Claim the message that has been due longest and store the attempt; None for none."""
    rows = due_notifications(now).select_for_update(skip_locked=True, of=("self",)).select_related("channel")
    notification = rows.order_by("next_at", "number").first()
    if notification is None:
        return None
    notification.attempts += 1
    notification.leased_until = now + timedelta(seconds=LEASE_S)
    notification.save(update_fields=["attempts", "leased_until"])
    DeliveryAttempt.objects.create(notification=notification, number=notification.attempts, started_at=now)
    return Claim(notification, notification.attempts)


def attempt(claim: Claim, now: datetime, sender: Send) -> Outcome:
    """Send once. Uses no database and raises nothing."""
    channel = claim.notification.channel
    message = Message(f"msg_{claim.notification.pk.hex}", now, claim.notification.payload)
    started_s = time.monotonic()
    try:
        receipt = sender(channel, message)
    except DecryptionError:
        return Outcome(None, 0.0, DeliveryError("its stored config cannot be decrypted", retryable=True))
    except DeliveryError as error:
        response = redact_secrets(channel, error.response)
        return Outcome(error.status, time.monotonic() - started_s, error, response)
    except Exception as error:
        log.exception("channel kind %s failed", channel.kind)
        return Outcome(None, time.monotonic() - started_s, DeliveryError(type(error).__name__, retryable=True))
    return Outcome(receipt.status, time.monotonic() - started_s, response=redact_secrets(channel, receipt.response))


@retry_on_conflict
@transaction.atomic
def record_outcome(claim: Claim, outcome: Outcome, now: datetime) -> None:
    """Complete the attempt, and update the notification unless another worker claimed it since.

    The channel is locked first, as in ``delete_channel``; nothing is left to update for a removed channel.
    """
    error, channel = outcome.error, claim.notification.channel
    if not Channel.objects.select_for_update(no_key=True).filter(pk=channel.pk).exists():
        return
    claim.notification.log.filter(number=claim.number).update(
        duration_s=outcome.duration_s,
        status=outcome.status,
        error=str(error)[:200] if error else "",
        response=outcome.response[:200],
    )
    pending = Notification.objects.filter(pk=claim.notification.pk, state=NotificationState.PENDING)
    claimed = pending.filter(attempts=claim.number)
    if error is None:
        claimed.update(state=NotificationState.DELIVERED, finished_at=now, leased_until=None)
        if channel.failed_at is not None:
            retry_waiting(channel, now)
    else:
        log.warning("channel %s: attempt %s failed: %s", channel.name, claim.number, error)
        _retry_or_fail(claim, claimed, error, now)
    _record_health(channel, None if error is None else str(error), now)


def retry_waiting(channel: Channel, now: datetime) -> None:
    """Make the messages due that wait for another attempt: the receiver works again. Not those it asked to delay."""
    delayed = DeliveryAttempt.objects.filter(
        notification=OuterRef("pk"), number=OuterRef("attempts"), status=TOO_MANY_REQUESTS
    )
    waiting = Notification.objects.filter(channel=channel, state=NotificationState.PENDING, leased_until=None)
    waiting.filter(~Exists(delayed), attempts__gt=0, next_at__gt=now).update(next_at=now)


def _record_health(channel: Channel, error: str | None, now: datetime) -> None:
    changes: dict[str, Any] = {"delivered_at": now} if error is None else {"failed_at": now, "error": error[:200]}
    Channel.objects.filter(pk=channel.pk).update(**changes)


def _retry_or_fail(claim: Claim, claimed: QuerySet[Notification], error: DeliveryError, now: datetime) -> None:
    attempt_number = claim.number - claim.notification.tried_before  # in the current retry schedule
    if error.retryable and attempt_number < MAX_ATTEMPTS:
        delay_s = max(RETRY_DELAYS_S[attempt_number - 1], error.retry_after_s or 0.0)
        claimed.update(next_at=now + timedelta(seconds=delay_s), leased_until=None)
        return
    has_failed = claimed.update(state=NotificationState.FAILED, finished_at=now, leased_until=None)
    if error.gone:
        disable_channel(claim.notification.channel, reason="its receiver responded with 410 (Gone)", now=now)
    elif has_failed and error.retryable and claim.notification.kind != NotificationKind.TEST:
        disable_channel(claim.notification.channel, reason=GAVE_UP_REASON, now=now)


def resend_firing(now: datetime) -> int:
    """Resend firing alerts to receivers that forget them; the number of channels. Not in the delivery log."""
    firing = set(Alert.objects.filter(state=AlertState.FIRING).values_list("pk", flat=True))
    kinds = [kind.name for kind in KINDS.values() if kind.resend is not None]
    channels = Channel.objects.filter(enabled=True, kind__in=kinds) if firing else ()
    batches: list[tuple[Channel, list[Mapping[str, Any]]]] = []
    with isolated_items(PeriodicTask.ALERT_REFRESH) as item:
        for channel in channels:
            with item(channel.name):
                if alerts := _delivered_alerts(channel, firing):
                    batches.append((channel, alerts))
        with ThreadPoolExecutor(max(1, len(batches))) as threads:  # a receiver that hangs does not delay others
            results = [(channel, threads.submit(_resend, channel, alerts, now)) for channel, alerts in batches]
            for channel, result in results:
                with item(channel.name):
                    _record_health(channel, result.result(), now)
    return len(batches)


def _delivered_alerts(channel: Channel, firing: set[int]) -> list[Mapping[str, Any]]:
    """The last delivered payload of each firing alert. One query."""
    kinds = (NotificationKind.FIRING, NotificationKind.REPEATED, NotificationKind.ACKNOWLEDGED)
    rows = Notification.objects.filter(
        channel=channel, kind__in=kinds, state=NotificationState.DELIVERED, alert_ids__overlap=list(firing)
    )
    alerts: dict[int, Mapping[str, Any]] = {}
    for payload in rows.order_by("-number").values_list("payload", flat=True)[:MAX_RESENT]:
        for alert in payload["data"].get("alerts", [payload["data"]]):
            if alert.get("alert") in firing:
                alerts.setdefault(alert["alert"], alert)
    return list(alerts.values())


def _resend(channel: Channel, alerts: list[Mapping[str, Any]], now: datetime) -> str | None:
    """Resend alerts to one channel; the error, if any."""
    resend = KINDS[channel.kind].resend
    try:
        if resend is not None:
            resend(open_config(channel), alerts, now)
    except (DecryptionError, DeliveryError) as error:
        log.warning("channel %s: firing alerts could not be resent: %s", channel.name, error)
        return str(error)
    return None
