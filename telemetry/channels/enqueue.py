"""Several alerts as one message. Pure.

Channels that stay until a transaction's end, so that what is written for them has somewhere to belong.

One lock order for everybody who writes about channels: the channel, then its messages, then their attempts, and the
logs last. Whoever deletes a channel locks its row for that and waits for those who hold it here.

Into the outbox: who is told of what. Called in the transaction of the change that is told of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from django.db import connection
from django.db.models import Q

from controlplane.celery import wake
from telemetry.matchers import match_all, stored
from telemetry.models import Channel, Notification, NotificationKind, NotificationState

MOST_TOGETHER = 20  # alerts in one message
_VERBS = {"firing": "fire", "repeated": "still fire", "acknowledged": "were acknowledged", "resolved": "ended"}


def together(payloads: Sequence[Mapping[str, Any]], now: datetime) -> dict[str, Any]:
    """One payload for alerts of one kind of message: that of the one, or ``data.alerts`` with what they share above."""
    if len(payloads) == 1:
        return dict(payloads[0])
    alerts = [payload["data"] for payload in payloads]
    state = str(alerts[0]["state"])
    return {
        "type": payloads[0]["type"],
        "timestamp": now.isoformat(timespec="milliseconds"),
        "data": {
            "state": state,
            "summary": _summary(alerts, state),
            "labels": shared_labels(alerts),
            "alerts": alerts,
            "path": "/alerts/",
        },
    }


def shared_labels(alerts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The labels that all of the alerts have alike."""
    first, *others = [alert.get("labels") or {} for alert in alerts]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _summary(alerts: Sequence[Mapping[str, Any]], state: str) -> str:
    pools = sorted({str(alert["pool"]) for alert in alerts if alert.get("pool")})
    where = f" in pool {pools[0]}" if len(pools) == 1 else f" in {len(pools)} pools" if pools else ""
    return f"{len(alerts)} alerts {_VERBS.get(state, state)}{where}: {alerts[0]['summary']}"


def hold_channels(keys: Collection[int]) -> frozenset[int]:
    """Keep these channels from being deleted before this transaction ends; those that are still there. One query."""
    with connection.cursor() as cursor:
        table = connection.ops.quote_name(Channel._meta.db_table)  # noqa: SLF001 - Django's documented way
        cursor.execute(
            f"select id from {table} where id = any(%s) order by id for key share",  # noqa: S608 - a table of ours
            [sorted(keys)],
        )
        return frozenset(key for (key,) in cursor.fetchall())


DELIVER = "telemetry.tasks.deliver_notifications"
Payload = Mapping[str, Any]
CLOCKS = timedelta(days=1)  # by which those of two workers may differ, and more


def enqueue(
    payloads: Mapping[int, Payload],
    kind: NotificationKind,
    now: datetime,
    *,
    sequences: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Tell every enabled channel of those of some alerts that go there: alert id -> the payload of that alert alone.

    The end of an alert goes to whoever was told of it, whatever the channel takes by now; where that is switched off it
    waits, so that a receiver that comes back does not take for firing what is over. Several become one message (up
    to ``MOST_TOGETHER``, then another). ``sequences`` counts each alert's repetitions of this kind (0 where it does
    not); the same alert, kind and count is one message. Three queries, four for an end.
    """
    told = _told_of(payloads) if kind is NotificationKind.RESOLVED else frozenset()
    channels = list(Channel.objects.filter(Q(enabled=True) | Q(pk__in={channel for channel, _ in told})))
    held = hold_channels([channel.pk for channel in channels])
    there = [channel for channel in channels if channel.pk in held]
    found = [
        row for channel in there for row in _rows(channel, _going_to(channel, payloads, told), kind, sequences, now)
    ]
    Notification.objects.bulk_create(found, ignore_conflicts=True)
    wake(DELIVER)


def _told_of(alerts: Mapping[int, Payload]) -> frozenset[tuple[int, int]]:
    """(channel, alert) of the messages about some alerts that arrived or still may. One query, no further back."""
    messages = Notification.objects.filter(alert_ids__overlap=list(alerts)).exclude(state=NotificationState.FAILED)
    began = [payload["data"].get("started_at") for payload in alerts.values()]
    if all(began):
        messages = messages.filter(created_at__gte=datetime.fromisoformat(min(began)) - CLOCKS)
    rows = messages.order_by().values_list("channel", "alert_ids").distinct()
    return frozenset((channel, alert) for channel, together in rows for alert in together if alert in alerts)


def _going_to(
    channel: Channel, payloads: Mapping[int, Payload], told: frozenset[tuple[int, int]]
) -> list[tuple[int, Payload]]:
    matchers = stored(channel.matchers)
    return [
        (alert, payload)
        for alert, payload in payloads.items()
        if (channel.pk, alert) in told or (channel.enabled and match_all(matchers, payload["data"].get("labels") or {}))
    ]


def _rows(
    channel: Channel,
    told: Sequence[tuple[int, Payload]],
    kind: NotificationKind,
    sequences: Mapping[int, int],
    now: datetime,
) -> Iterator[Notification]:
    for start in range(0, len(told), MOST_TOGETHER):
        some = told[start : start + MOST_TOGETHER]
        yield Notification(
            alert_id=some[0][0],
            alert_ids=[alert_id for alert_id, _ in some],
            channel=channel,
            kind=kind,
            sequence=sequences.get(some[0][0], 0),
            payload=together([payload for _, payload in some], now),
            next_at=now,
            created_at=now,
        )
