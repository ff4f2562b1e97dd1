"""Channels: made, changed, tried out. Their configs are sealed on the way in and opened only to send."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.celery import wake
from controlplane.errors import InvalidError, NameTakenError
from controlplane.models import EventKind
from controlplane.sealing import seal, unseal
from controlplane.services.events import record_event
from telemetry.channels.base import ConfigError, Sender
from telemetry.channels.enqueue import DELIVER
from telemetry.channels.registry import KINDS
from telemetry.models import Channel, Notification, NotificationKind


def channels() -> QuerySet[Channel]:
    """Every channel, by name."""
    return Channel.objects.order_by("name")


def deliveries(limit: int = 50, *, channel: Channel | None = None) -> list[Notification]:
    """The newest notifications with their attempts, alert and channel. Two queries."""
    found = (
        Notification.objects.select_related("channel", "alert").prefetch_related("log").order_by("-created_at", "-id")
    )
    return list((found if channel is None else found.filter(channel=channel))[:limit])


@transaction.atomic
def create_channel(
    name: str, *, kind: str = "webhook", config: Mapping[str, Any], enabled: bool = True, by: User | None = None
) -> Channel:
    """Create a channel; a secret that is not given is made (``reveal_secret``). InvalidError, NameTakenError."""
    if kind not in KINDS:
        raise InvalidError("$.kind", f"expected one of {', '.join(KINDS)}")
    channel = _saved(Channel(name=_checked_name(name), kind=kind, sealed=_sealed(kind, config), enabled=enabled))
    summary = f"Channel {channel.name} was created."
    record_event(EventKind.CHANNEL_CREATED, summary, by=by, detail={"after": facts(channel)})
    return channel


@transaction.atomic
def update_channel(
    channel: Channel,
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    enabled: bool | None = None,
    by: User | None = None,
) -> Channel:
    """Change what is given. Of a config the fields given are changed, null takes one away. InvalidError."""
    channel = Channel.objects.select_for_update().get(pk=channel.pk)
    before = facts(channel)
    if name is not None:
        channel.name = _checked_name(name)
    if config is not None:
        merged = {**open_config(channel), **config}
        channel.sealed = _sealed(channel.kind, {field: value for field, value in merged.items() if value is not None})
    if enabled is not None:
        channel.enabled = enabled
        channel.disabled_reason = "" if enabled else channel.disabled_reason
    channel = _saved(channel)
    change = {"before": before, "after": facts(channel), "config": "replaced" if config is not None else "kept"}
    record_event(EventKind.CHANNEL_CHANGED, f"Channel {channel.name} was changed.", by=by, detail=change)
    return channel


@transaction.atomic
def delete_channel(channel: Channel, *, by: User | None = None) -> None:
    """Remove a channel with everything still to be sent to it."""
    summary = f"Channel {channel.name} was removed."
    record_event(EventKind.CHANNEL_REMOVED, summary, by=by, detail={"before": facts(channel)})
    channel.delete()


def facts(channel: Channel) -> dict[str, Any]:
    """What an event shows of a channel before and after a change: never where it sends to."""
    return {"name": channel.name, "kind": channel.kind, "enabled": channel.enabled}


@transaction.atomic
def disable_channel(channel: Channel, *, reason: str) -> None:
    """Stop using a channel whose receiver said that it wants nothing any more."""
    Channel.objects.filter(pk=channel.pk, enabled=True).update(enabled=False, disabled_reason=reason[:200])


@transaction.atomic
def test_send(channel: Channel) -> Notification:
    """Put a test message into the outbox, also for a disabled channel; its row tells how that went."""
    now = timezone.now()
    payload = {
        "type": "alert.test",
        "timestamp": now.isoformat(timespec="milliseconds"),
        "data": {
            "state": "test",
            "summary": f"A test of channel {channel.name}: nothing is wrong.",
            "path": "/alerts/",
        },
    }
    notification = Notification.objects.create(
        channel=channel, kind=NotificationKind.TEST, payload=payload, next_at=now, created_at=now
    )
    wake(DELIVER)
    return notification


test_send.__test__ = False  # type: ignore[attr-defined]  # its name is no test's


def public_config(channel: Channel) -> dict[str, Any]:
    """What may be shown of a config: no secret, no URL's path."""
    return KINDS[channel.kind].public(open_config(channel))


def reveal_secret(channel: Channel) -> str | None:
    """The secret that signs, to be shown once to the person who created the channel."""
    secret = open_config(channel).get("secret")
    return None if secret is None else str(secret)


def open_config(channel: Channel) -> dict[str, Any]:
    """The config itself; SealBrokenError when the key that sealed it is gone."""
    config: dict[str, Any] = json.loads(unseal(bytes(channel.sealed)))
    return config


def open_sender(channel: Channel) -> Sender:
    """The channel, ready to send; close it."""
    return KINDS[channel.kind].open(open_config(channel))


def _sealed(kind: str, config: Mapping[str, Any]) -> bytes:
    try:
        return seal(json.dumps(KINDS[kind].complete(config)).encode())
    except ConfigError as error:
        raise InvalidError(f"$.config.{error.field}", error.reason) from None


def _checked_name(name: str) -> str:
    if not name.strip() or len(name) > 100:
        raise InvalidError("$.name", "expected 1 to 100 characters")
    return name.strip()


def _saved(channel: Channel) -> Channel:
    try:
        with transaction.atomic():
            channel.save()
    except IntegrityError:
        raise NameTakenError("channel", channel.name) from None
    return channel
