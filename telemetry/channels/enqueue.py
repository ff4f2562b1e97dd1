"""Writes notifications into the outbox, one message per channel that an alert matches.

Called in the transaction of the change that is notified. Locks are taken in one order: the channel, its messages, their
attempts, and the logs last. Deleting a channel locks its row, and so waits for a transaction that writes messages to
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from django.db import connection
from django.db.models import QuerySet

from controlplane.celery import wake
from telemetry.matchers import match_all, parse_stored
from telemetry.models import Channel, Notification, NotificationKind, NotificationState

DELIVER = "telemetry.tasks.deliver_notifications"
MAX_ALERTS = 20  # in one message
CLOCK_DIFFERENCE = timedelta(days=1)  # more than the clocks of two workers differ
Payload = Mapping[str, Any]
_VERBS = {"firing": "firing", "repeated": "still firing", "acknowledged": "acknowledged", "resolved": "resolved"}


def combine(payloads: Sequence[Payload], now: datetime) -> dict[str, Any]:
    """One payload for the alerts of a message: that of a single alert, or ``data.alerts`` with their common labels."""
    if len(payloads) == 1:
        return dict(payloads[0])
    alerts = [payload["data"] for payload in payloads]
    state = str(alerts[0]["state"])
    pools = sorted({str(alert["pool"]) for alert in alerts if alert.get("pool")})
    where = f" in pool {pools[0]}" if len(pools) == 1 else f" in {len(pools)} pools" if pools else ""
    return {
        "type": payloads[0]["type"],
        "timestamp": now.isoformat(timespec="milliseconds"),
        "data": {
            "state": state,
            "summary": f"{len(alerts)} alerts {_VERBS.get(state, state)}{where}: {alerts[0]['summary']}",
            "labels": _common_labels(alerts),
            "alerts": alerts,
            "path": "/alerts/",
        },
    }


def _common_labels(alerts: Sequence[Payload]) -> dict[str, str]:
    first, *others = [alert.get("labels") or {} for alert in alerts]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def lock_channels(keys: Collection[int]) -> frozenset[int]:
    """Prevent the deletion of these channels until the transaction ends; those that still exist. One query."""
    with connection.cursor() as cursor:
        table = connection.ops.quote_name(Channel._meta.db_table)  # noqa: SLF001 - Django's documented way
        cursor.execute(
            f"select id from {table} where id = any(%s) order by id for key share",  # noqa: S608 - a table of ours
            [sorted(keys)],
        )
        return frozenset(key for (key,) in cursor.fetchall())


def enqueue(
    payloads: Mapping[int, Payload],
    kind: NotificationKind,
    now: datetime,
    *,
    sequences: Mapping[int, int] = MappingProxyType({}),
) -> frozenset[int]:
    """Notify every enabled channel that matches some alerts: alert id -> the payload of this alert alone.

    Returns the alerts that some channel is notified of.

    A resolution goes to the channels that were notified of the alert, whatever they match now, and to no other. If the
    channel is disabled, the message waits, so that a receiver that returns does not show a resolved alert as firing.
    Several alerts become one message, up to ``MAX_ALERTS``. ``sequences`` counts each alert's messages of this kind (0
    without repetition): the same alert, kind and count is one message. Three queries, four for a resolution.
    """
    if kind is NotificationKind.RESOLVED:
        notified = _notified(payloads)
        chosen = list(Channel.objects.filter(pk__in={channel for channel, _ in notified}))
        return _write(chosen, lambda channel, alert, _: (channel.pk, alert) in notified, payloads, kind, now, sequences)
    return _write(list(Channel.objects.filter(enabled=True)), _matches, payloads, kind, now, sequences)


def channels_to_catch_up() -> QuerySet[Channel]:
    return Channel.objects.filter(enabled=True, catches_up=True)


def enqueue_missed(payloads: Mapping[int, Payload], now: datetime, *, sequences: Mapping[int, int]) -> frozenset[int]:
    """Notify channels that were added, enabled or changed of the alerts that fire already, each alert once.

    Returns these alerts.
    """
    notified = _notified(payloads)
    # Locked, so that a change of them is not missed.
    channels = list(channels_to_catch_up().select_for_update(no_key=True).order_by("pk"))

    def is_missed(channel: Channel, alert: int, payload: Payload) -> bool:
        return (channel.pk, alert) not in notified and _matches(channel, alert, payload)

    written = _write(channels, is_missed, payloads, NotificationKind.FIRING, now, sequences)
    Channel.objects.filter(pk__in=[channel.pk for channel in channels]).update(catches_up=False)
    return written


def _matches(channel: Channel, _: int, payload: Payload) -> bool:
    return match_all(parse_stored(channel.matchers), payload["data"].get("labels") or {})


def _write(
    channels: Sequence[Channel],
    is_for: Callable[[Channel, int, Payload], bool],
    payloads: Mapping[int, Payload],
    kind: NotificationKind,
    now: datetime,
    sequences: Mapping[int, int],
) -> frozenset[int]:
    """Write the messages of each channel with the alerts that are for it; the alerts of these messages."""
    existing = lock_channels([channel.pk for channel in channels])
    rows = [
        row
        for channel in channels
        if channel.pk in existing
        for row in _rows(channel, [pair for pair in payloads.items() if is_for(channel, *pair)], kind, sequences, now)
    ]
    Notification.objects.bulk_create(rows, ignore_conflicts=True)
    if rows:
        wake(DELIVER)
    return frozenset(alert for row in rows for alert in row.alert_ids)


def _notified(alerts: Mapping[int, Payload]) -> frozenset[tuple[int, int]]:
    """(channel, alert) of the messages about some alerts that were delivered or are pending. One query."""
    messages = Notification.objects.filter(alert_ids__overlap=list(alerts)).exclude(state=NotificationState.FAILED)
    started = [payload["data"].get("started_at") for payload in alerts.values()]
    if started and all(started):
        messages = messages.filter(created_at__gte=datetime.fromisoformat(min(started)) - CLOCK_DIFFERENCE)
    rows = messages.order_by().values_list("channel", "alert_ids").distinct()
    return frozenset((channel, alert) for channel, alert_ids in rows for alert in alert_ids if alert in alerts)


def _rows(
    channel: Channel,
    alerts: Sequence[tuple[int, Payload]],
    kind: NotificationKind,
    sequences: Mapping[int, int],
    now: datetime,
) -> Iterator[Notification]:
    for start in range(0, len(alerts), MAX_ALERTS):
        part = alerts[start : start + MAX_ALERTS]
        yield Notification(
            alert_id=part[0][0],
            alert_ids=[alert for alert, _ in part],
            channel=channel,
            kind=kind,
            sequence=sequences.get(part[0][0], 0),
            payload=combine([payload for _, payload in part], now),
            next_at=now,
            created_at=now,
        )
