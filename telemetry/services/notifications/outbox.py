"""Delivers notifications from the outbox at least once, under the same id at each attempt; and lists and replays them.

Theory of operation. A worker claims a notification by a conditional update that sets a lease and counts the attempt;
other workers skip it meanwhile. The attempt is stored before the message is sent and completed afterwards. A worker
that dies in between leaves an unfinished attempt and a lease that expires; then another worker claims and sends it
again, under the same id, by which the receiver recognizes a duplicate. A result is stored only if the claim is still
the newest one, so a worker that was merely slow changes nothing later.

One thread claims rows and stores results; several threads send messages and do not use the database. At most
``MAX_PER_CHANNEL`` messages are sent to one channel at a time (other runs' as they were read last), so a receiver that
hangs delays no others. Of a
channel's messages about an alert, only the oldest pending one can be claimed, so messages arrive in order.

Which messages these are is read for many at a time (``DueMessages``), because it takes a look at the whole outbox: a
receiver that returns after a day makes thousands due at once. What pages show is stored then (``OutboxState``).

Locks are taken in one order: the channel, the notification, its attempts, the logs (``enqueue.lock_channels``). Each
result is a transaction of its own, which is repeated if PostgreSQL aborts it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
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
    OutboxState,
)
from telemetry.services.notifications.channels import disable_channel, open_config, redact_secrets, send

log = logging.getLogger(__name__)

LEASE_S = 60.0  # longer than any send may take
CLAIM_FOR_S = 30.0  # a run claims messages for so long; the next run claims the rest
CONCURRENCY = 16  # messages being sent in one run
MAX_PER_CHANNEL = 2  # messages being sent to one channel, in all runs together
POLL_S = 0.5  # between two checks for results while messages are being sent
READ_EVERY_S = 1.0  # at least so often a run reads which messages are due, unless that takes a tenth of its time
READ_PER_CHANNEL = 500  # due messages of a channel that are read at once
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
    due = DueMessages()
    sending: dict[Future[Outcome], Claim] = {}
    attempts = 0
    with (
        isolated_items(PeriodicTask.DELIVERIES) as item,
        ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="deliver") as threads,
    ):
        while True:
            due.read_if_needed(clock())
            while time.monotonic() < ends_s and (claims := due.claim(CONCURRENCY - len(sending), clock())):
                sending |= {threads.submit(attempt, claim, clock(), sender): claim for claim in claims}
                attempts += len(claims)
            if not sending:
                return attempts
            results = [(sending.pop(each), each.result()) for each in wait(sending, POLL_S, FIRST_COMPLETED).done]
            for claim, _ in results:
                due.on_finished(claim.notification.channel_id)
            recorded = frozenset[UUID]()
            with item.all_of([claim.notification.channel.name for claim, _ in results]):
                recorded = record_successes(results, clock())
            for claim, outcome in results:
                if claim.notification.pk not in recorded:
                    with item(claim.notification.channel.name):  # after an error it is claimed again after its lease
                        record_outcome(claim, outcome, clock())


class DueMessages:
    """The messages that can be claimed, by channel, as they were read last; and how many are being sent."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[tuple[datetime, int, UUID]]] = {}  # by channel, the longest due first
        self._channels: dict[int, Channel] = {}
        self._in_progress: Counter[int] = Counter()  # in this run, by channel
        self._elsewhere: Counter[int] = Counter()  # in other runs, by channel
        self._finished = set[int]()  # channels with a result since the last read
        self._read_after = -math.inf

    def read_if_needed(self, now: datetime) -> None:
        """Read which messages are due, if that is a while ago or a result may have made the next ones claimable."""
        may_have_next = any(not self._waiting.get(channel) for channel in self._finished)
        if may_have_next or time.monotonic() >= self._read_after:
            self._read(now)

    def claim(self, count: int, now: datetime) -> list[Claim]:
        """Claim up to so many messages, those that have been due longest, and store their attempts."""
        keys: list[UUID] = []
        chosen = self._in_progress + self._elsewhere
        while len(keys) < count:
            free = [
                (rows[0], channel)
                for channel, rows in self._waiting.items()
                if rows and chosen[channel] < MAX_PER_CHANNEL
            ]
            if not free:
                break
            _, channel = min(free)
            keys.append(self._waiting[channel].popleft()[2])
            chosen[channel] += 1
        claims: list[Claim] = []
        for notification in _claim(keys, now) if keys else ():
            notification.channel = self._channels[notification.channel_id]
            self._in_progress[notification.channel_id] += 1
            claims.append(Claim(notification, notification.attempts))
        return claims

    def on_finished(self, channel: int) -> None:
        """Note that a message of a channel was sent, or not."""
        self._in_progress[channel] -= 1
        self._finished.add(channel)

    def _read(self, now: datetime) -> None:
        started_s = time.monotonic()
        self._finished.clear()
        self._waiting, self._elsewhere = defaultdict(deque), Counter()
        due_since: list[datetime] = []
        with connection.cursor() as cursor:
            cursor.execute(_DUE, {"now": now, "limit": READ_PER_CHANNEL})
            for key, number, channel, next_at, leased in cursor.fetchall():
                self._waiting[channel].append((next_at, number, key))
                self._elsewhere[channel] = max(0, leased - self._in_progress[channel])
                if leased < MAX_PER_CHANNEL:
                    due_since.append(next_at)
        self._channels = Channel.objects.in_bulk(list(self._waiting)) if self._waiting else {}
        state = OutboxState(pk=1, read_at=now, due_since=min(due_since, default=None))
        fields = ["read_at", "due_since"]
        OutboxState.objects.bulk_create([state], update_conflicts=True, unique_fields=["id"], update_fields=fields)
        finished_s = time.monotonic()
        self._read_after = finished_s + max(READ_EVERY_S, 10 * (finished_s - started_s))


# Of each channel, the messages that can be claimed: due, not leased, and the first of each of their alerts. One pass
# over the pending messages, whatever the planner knows about them.
_DUE = """
with pending as (
    select id, number, channel_id, kind, next_at, alert_ids, coalesce(leased_until > %(now)s, false) as is_leased
    from telemetry_notification where state = 'pending'
),
ordered as (
    select id, number, min(number) over (partition by channel_id, alert) as first
    from pending, unnest(alert_ids) as alert
),
blocked as (select distinct id from ordered where number > first),
leased as (select channel_id, count(*) as count from pending where is_leased group by channel_id),
due as (
    select pending.*, row_number() over (partition by channel_id order by next_at, number) as place
    from pending left join blocked using (id)
    where blocked.id is null and not is_leased and next_at <= %(now)s
)
select due.id, due.number, due.channel_id, due.next_at, coalesce(leased.count, 0)
from due join telemetry_channel channel on channel.id = due.channel_id left join leased using (channel_id)
where place <= %(limit)s and (channel.enabled or due.kind = 'test')
order by due.channel_id, place
"""


_CLAIM = """
with free as (
    select message.id from telemetry_notification message join telemetry_channel channel on channel.id = channel_id
    where message.id = any(%(keys)s) and state = 'pending' and next_at <= %(now)s
        and (leased_until is null or leased_until <= %(now)s) and (channel.enabled or message.kind = 'test')
    for update of message skip locked
),
claimed as (
    update telemetry_notification message set attempts = attempts + 1, leased_until = %(until)s
    from free where message.id = free.id returning message.*
),
started as (
    insert into telemetry_deliveryattempt (notification_id, number, started_at, error)
    select id, attempts, %(now)s, '' from claimed
)
select * from claimed order by next_at, number
"""


@retry_on_conflict
def _claim(keys: Sequence[UUID], now: datetime) -> list[Notification]:
    """Claim those of some messages that are still due, and store their attempts. One statement."""
    parameters = {"keys": list(keys), "now": now, "until": now + timedelta(seconds=LEASE_S)}
    return list(Notification.objects.raw(_CLAIM, parameters))


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


_SUCCESS = """
with healthy as (
    select id from telemetry_channel where id = any(%(channels)s) and (failed_at is null or failed_at < delivered_at)
    order by id for no key update
),
results as (
    select result.* from unnest(
        %(keys)s::uuid[], %(channels)s::bigint[], %(numbers)s::integer[],
        %(durations)s::double precision[], %(statuses)s::smallint[], %(responses)s::text[]
    ) as result(key, channel, number, duration_s, status, response) join healthy on healthy.id = channel
),
completed as (
    update telemetry_deliveryattempt attempt
    set duration_s = result.duration_s, status = result.status, response = result.response
    from results result where notification_id = key and attempt.number = result.number
),
delivered as (
    update telemetry_notification message set state = 'delivered', finished_at = %(now)s, leased_until = null
    from results result where message.id = key and state = 'pending' and attempts = result.number
),
noted as (
    update telemetry_channel channel set delivered_at = %(now)s
    from (select distinct channel as id from results) used where channel.id = used.id
)
select key from results
"""


@retry_on_conflict
def record_successes(results: Sequence[tuple[Claim, Outcome]], now: datetime) -> frozenset[UUID]:
    """Record the successes of channels whose last attempt succeeded, in one statement; the messages' ids.

    That is the usual result, and a backlog has thousands. ``record_outcome`` records all others.
    """
    successes = [(claim, outcome) for claim, outcome in results if outcome.error is None]
    if not successes:
        return frozenset()
    parameters: dict[str, Any] = {
        "keys": [claim.notification.pk for claim, _ in successes],
        "channels": [claim.notification.channel_id for claim, _ in successes],
        "numbers": [claim.number for claim, _ in successes],
        "durations": [outcome.duration_s for _, outcome in successes],
        "statuses": [outcome.status for _, outcome in successes],
        "responses": [outcome.response[:200] for _, outcome in successes],
        "now": now,
    }
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_SUCCESS, parameters)
        return frozenset(key for (key,) in cursor.fetchall())


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
        if channel.failed_at is not None:  # before this message was claimed
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
    """Resend firing alerts to receivers that forget them; the number of channels. Not in the delivery log.

    An alert whose resolution may have been delivered while its resend was under way is resolved there again.
    """
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
            for channel, ended in _ended_meanwhile(batches):
                threads.submit(_resend, channel, ended, now)
    return len(batches)


def _ended_meanwhile(
    batches: list[tuple[Channel, list[Mapping[str, Any]]]],
) -> Iterator[tuple[Channel, list[Mapping[str, Any]]]]:
    """The resolutions of resent alerts of whose labels none fires any more, by channel. One query."""
    firing = dict(Alert.objects.filter(state=AlertState.FIRING).values_list("pk", "labels")) if batches else {}
    resolved = {"state": "resolved", "resolved_at": timezone.now().isoformat()}
    for channel, alerts in batches:
        ended = [alert for alert in alerts if alert["alert"] not in firing]
        gone: list[Mapping[str, Any]]
        gone = [{**alert, **resolved} for alert in ended if alert.get("labels") not in firing.values()]
        if gone:
            yield channel, gone


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
