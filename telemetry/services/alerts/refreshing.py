"""Telling again of what still fires, to receivers that forget what they do not hear of."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

from controlplane.errors import DecryptionError
from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask
from telemetry.channels.base import DeliveryError
from telemetry.channels.registry import KINDS
from telemetry.models import Alert, AlertState, Channel, Notification, NotificationKind, NotificationState
from telemetry.services.notifications.channels import open_sender

log = logging.getLogger(__name__)

MOST = 500  # messages that are looked at for one channel
TOLD = (NotificationKind.FIRING, NotificationKind.REPEATED, NotificationKind.ACKNOWLEDGED)
FORGETFUL = [kind.name for kind in KINDS.values() if kind.refresh is not None]


def resend_firing(now: datetime) -> int:
    """Tell each forgetful channel what still fires and has arrived there; how many channels. The log is spared."""
    firing = set(Alert.objects.filter(state=AlertState.FIRING).values_list("pk", flat=True))
    channels = Channel.objects.filter(enabled=True, kind__in=FORGETFUL) if firing else ()
    told: list[tuple[Channel, list[Mapping[str, Any]]]] = []
    with isolated_items(PeriodicTask.ALERT_REFRESH) as item:
        for channel in channels:
            with item(channel.name):
                if alerts := _arrived(channel, firing):
                    told.append((channel, alerts))
        with ThreadPoolExecutor(max(1, len(told))) as threads:  # one that hangs delays nobody else
            sent = [(channel, threads.submit(_refresh, channel, alerts, now)) for channel, alerts in told]
            for channel, refreshed in sent:
                with item(channel.name):
                    _note(channel, refreshed.result(), now)
    return len(told)


def _note(channel: Channel, error: str | None, now: datetime) -> None:
    changes: dict[str, Any] = {"delivered_at": now} if error is None else {"failed_at": now, "error": error[:200]}
    Channel.objects.filter(pk=channel.pk).update(**changes)


def _arrived(channel: Channel, firing: set[int]) -> list[Mapping[str, Any]]:
    """What was last told there of each alert that fires. One query."""
    rows = Notification.objects.filter(
        channel=channel, kind__in=TOLD, state=NotificationState.DELIVERED, alert_ids__overlap=list(firing)
    )
    found: dict[int, Mapping[str, Any]] = {}
    for payload in rows.order_by("-number").values_list("payload", flat=True)[:MOST]:
        for alert in payload["data"].get("alerts", [payload["data"]]):
            if alert.get("alert") in firing:
                found.setdefault(alert["alert"], alert)
    return list(found.values())


def _refresh(channel: Channel, alerts: list[Mapping[str, Any]], now: datetime) -> str | None:
    refresh = KINDS[channel.kind].refresh
    try:
        sender = open_sender(channel)
    except DecryptionError as error:
        return str(error)
    try:
        if refresh is not None:
            refresh(sender, alerts, now)
    except DeliveryError as error:
        log.warning("channel %s: what still fires could not be told again: %s", channel.name, error)
        return str(error)
    finally:
        sender.close()
    return None
