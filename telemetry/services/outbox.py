"""Delivering what the outbox holds: at least once, under the same id each time.

Theory of operation. A notification is claimed by a conditional update that gives the claimer a lease and counts the
attempt; others skip it meanwhile. The attempt is written down before the message goes out and completed after. A
worker that dies in between leaves an attempt without an end and a lease that runs out; then another worker claims the
notification again and sends it again under the same id, by which the receiver knows a duplicate. A result is
recorded only while the claim is still the newest one, so a worker that was merely slow changes nothing later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.errors import SealBrokenError
from telemetry.channels.base import DeliveryError, Message, Sender
from telemetry.models import Channel, DeliveryAttempt, Notification, NotificationKind, NotificationState
from telemetry.services.channels import disable_channel, open_sender

log = logging.getLogger(__name__)

LEASE_S = 60.0  # longer than any send may take
BUDGET_S = 50.0  # for one run; what is left waits for the next
# Seconds from one attempt to the next (Standard Webhooks, OPERATORS 2.6): at once, 5 s, 5 min, 30 min, 2 h ... 24 h.
PAUSES_S = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
LAST_ATTEMPT = len(PAUSES_S) + 1


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


def deliver_due(clock: Callable[[], datetime] = timezone.now, opener: Callable[[Channel], Sender] = open_sender) -> int:
    """Send everything that is due, one after the other; how many attempts were made."""
    started_s = time.monotonic()
    attempts = 0
    while time.monotonic() - started_s < BUDGET_S and (claim := claim_next(clock())) is not None:
        record_outcome(claim, attempt(claim, clock(), opener), clock())
        attempts += 1
    return attempts


@transaction.atomic
def claim_next(now: datetime) -> Claim | None:
    """Claim the notification that has been due the longest and write down the attempt; None for none."""
    free = Q(leased_until=None) | Q(leased_until__lte=now)
    wanted = Q(channel__enabled=True) | Q(kind=NotificationKind.TEST)  # of a disabled channel the others wait
    due = Notification.objects.filter(free, wanted, state=NotificationState.PENDING, next_at__lte=now)
    notification = (
        due.select_for_update(skip_locked=True, of=("self",))
        .select_related("channel")
        .order_by("next_at", "id")
        .first()
    )
    if notification is None:
        return None
    notification.attempts += 1
    notification.leased_until = now + timedelta(seconds=LEASE_S)
    notification.save(update_fields=["attempts", "leased_until"])
    DeliveryAttempt.objects.create(notification=notification, number=notification.attempts, started_at=now)
    return Claim(notification, notification.attempts)


def attempt(claim: Claim, now: datetime, opener: Callable[[Channel], Sender]) -> Outcome:
    """Send once. Nothing is written; nothing that a channel does is raised."""
    message = Message(f"msg_{claim.notification.pk.hex}", now, claim.notification.payload)
    started_s = time.monotonic()
    try:
        sender = opener(claim.notification.channel)
    except SealBrokenError:
        return Outcome(None, 0.0, DeliveryError("its stored config cannot be opened", retryable=True))
    try:
        status = sender.send(message)
    except DeliveryError as error:
        return Outcome(error.status, time.monotonic() - started_s, error)
    except Exception as error:
        log.exception("channel kind %s failed", claim.notification.channel.kind)
        return Outcome(None, time.monotonic() - started_s, DeliveryError(type(error).__name__, retryable=True))
    finally:
        sender.close()
    return Outcome(status, time.monotonic() - started_s)


@transaction.atomic
def record_outcome(claim: Claim, outcome: Outcome, now: datetime) -> None:
    """Complete the attempt, and settle the notification unless somebody claimed it after us."""
    error = outcome.error
    claim.notification.log.filter(number=claim.number).update(
        duration_s=outcome.duration_s, status=outcome.status, error=str(error)[:200] if error else ""
    )
    ours = Notification.objects.filter(pk=claim.notification.pk, state=NotificationState.PENDING, attempts=claim.number)
    if error is None:
        ours.update(state=NotificationState.DELIVERED, finished_at=now, leased_until=None)
    elif error.retryable and claim.number < LAST_ATTEMPT:
        ours.update(next_at=now + timedelta(seconds=_pause_s(claim.number, error)), leased_until=None)
    else:
        ours.update(state=NotificationState.FAILED, finished_at=now, leased_until=None)
    if error is not None:
        log.warning("channel %s: attempt %s failed: %s", claim.notification.channel.name, claim.number, error)
        if error.gone:
            disable_channel(claim.notification.channel, reason="its receiver answered 410: it wants nothing any more")


def _pause_s(number: int, error: DeliveryError) -> float:
    """The schedule's pause after an attempt, or the receiver's longer wish."""
    return max(PAUSES_S[number - 1], error.retry_after_s or 0.0)


@transaction.atomic
def replay(notification: Notification, now: datetime) -> None:
    """Try a notification again that was given up or delivered: at once, under the same id."""
    Notification.objects.filter(pk=notification.pk).exclude(state=NotificationState.PENDING).update(
        state=NotificationState.PENDING, next_at=now, leased_until=None, finished_at=None
    )
