"""Into the outbox: who is told of what. Called in the transaction of the change that is told of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from controlplane.celery import wake
from telemetry.channels.grouping import MOST_TOGETHER, together
from telemetry.matchers import match_all, stored
from telemetry.models import Channel, Notification, NotificationKind

DELIVER = "telemetry.tasks.deliver_notifications"
Payload = Mapping[str, Any]


def enqueue(
    payloads: Mapping[int, Payload],
    kind: NotificationKind,
    now: datetime,
    *,
    sequences: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Tell every enabled channel of those of some alerts that go there: alert id -> the payload of that alert alone.

    Several become one message (up to ``MOST_TOGETHER``, then another). ``sequences`` counts
    each alert's repetitions of this kind (0 where it does not); the same alert, kind and count is one message. Two
    queries.
    """
    found = [
        row
        for channel in Channel.objects.filter(enabled=True)
        for row in _rows(channel, _going_to(channel, payloads), kind, sequences, now)
    ]
    Notification.objects.bulk_create(found, ignore_conflicts=True)
    wake(DELIVER)


def _going_to(channel: Channel, payloads: Mapping[int, Payload]) -> list[tuple[int, Payload]]:
    matchers = stored(channel.matchers)
    return [one for one in payloads.items() if match_all(matchers, one[1]["data"].get("labels") or {})]


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
