"""Channels: made, changed, tried out. Their configs are encrypted on the way in and opened only to send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import F, QuerySet
from django.utils import timezone

from controlplane.celery import wake
from controlplane.database.transactions import retry_on_conflict
from controlplane.encryption import decrypt, encrypt
from controlplane.errors import GoneError, InvalidError, NameTakenError
from controlplane.models import EventKind
from controlplane.services.checks import check_destination, lock_row
from controlplane.services.events import record_event
from telemetry.channels.base import ChannelKind, ConfigError, Sender
from telemetry.channels.enqueue import DELIVER, hold_channels
from telemetry.channels.registry import KINDS
from telemetry.matchers import Given, read_matchers
from telemetry.models import Channel, Notification, NotificationKind, NotificationState


def channels() -> QuerySet[Channel]:
    """Every channel with its owner, by name."""
    return Channel.objects.select_related("owner").order_by("name")


def notified_by() -> Literal["channels", "none", "off"]:
    """Whether a channel is on, none is set up, or all of them are off. One query."""
    enabled = list(Channel.objects.values_list("enabled", flat=True).distinct())
    if any(enabled):
        return "channels"
    return "off" if enabled else "none"


@transaction.atomic
def create_channel(
    name: str,
    *,
    kind: str = "webhook",
    config: Mapping[str, Any],
    matchers: Sequence[Given] = (),
    enabled: bool = True,
    by: User | None = None,
) -> Channel:
    """Create a channel; a secret that is not given is made (``reveal_secret``). InvalidError, NameTakenError."""
    if kind not in KINDS:
        raise InvalidError("$.kind", f"expected one of {', '.join(KINDS)}")
    channel = Channel(name=_checked_name(name), kind=kind, enabled=enabled, owner=by)
    channel.encrypted, channel.matchers = _encrypted(_complete(KINDS[kind], config)), _checked_matchers(matchers)
    channel = _saved(channel)
    summary = f"Channel {channel.name} was created."
    record_event(EventKind.CHANNEL_CREATED, summary, by=by, detail={"after": facts(channel)})
    return channel


@transaction.atomic
def update_channel(
    channel: Channel,
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    matchers: Sequence[Given] | None = None,
    enabled: bool | None = None,
    by: User | None = None,
) -> Channel:
    """Change what is given. Of a config the fields given are changed, null takes one away. InvalidError.

    A secret is never sent to another address than it was given for, and signs nothing that is sent to another origin.
    """
    channel = lock_row(Channel.objects.select_for_update(), channel.pk)
    before = facts(channel)
    if name is not None:
        channel.name = _checked_name(name)
    if config is not None:
        channel.encrypted = _encrypted(_changed(channel, config))
    if matchers is not None:
        channel.matchers = _checked_matchers(matchers)
    if enabled is not None:
        _switch(channel, enabled=enabled)
    channel = _saved(channel)
    change = {"before": before, "after": facts(channel), "config": "replaced" if config is not None else "kept"}
    record_event(EventKind.CHANNEL_CHANGED, f"Channel {channel.name} was changed.", by=by, detail=change)
    return channel


def _switch(channel: Channel, *, enabled: bool) -> None:
    """On or off. What waited for a channel that comes back begins its schedule anew."""
    if enabled and not channel.enabled:
        waiting = Notification.objects.filter(channel=channel, state=NotificationState.PENDING)
        waiting.update(next_at=timezone.now(), tried_before=F("attempts"))
        wake(DELIVER)
    channel.enabled = enabled
    channel.disabled_reason = "" if enabled else channel.disabled_reason


@transaction.atomic
def rotate_secret(channel: Channel, *, by: User | None = None) -> str:
    """Sign with a fresh secret, and with the former one too until it is taken away; the fresh one. InvalidError."""
    if "previous_secret" not in {field.name for field in KINDS[channel.kind].fields}:
        raise InvalidError("$.kind", f"a channel of the kind {channel.kind} has no secret that signs")
    former = open_config(channel)["secret"]
    channel = update_channel(channel, config={"previous_secret": former, "secret": None}, by=by)
    return str(open_config(channel)["secret"])


@retry_on_conflict
@transaction.atomic
def delete_channel(channel: Channel, *, by: User | None = None) -> None:
    """Remove a channel with everything still to be sent to it."""
    channel = lock_row(Channel.objects.select_for_update(), channel.pk)
    pending = channel.notifications.filter(state=NotificationState.PENDING).select_for_update().order_by("number")
    list(pending.values_list("pk"))  # nobody claims one of them any more: that would write an attempt
    summary = f"Channel {channel.name} was removed."
    record_event(EventKind.CHANNEL_REMOVED, summary, by=by, detail={"before": facts(channel)})
    channel.delete()


def facts(channel: Channel) -> dict[str, Any]:
    """What an event shows of a channel before and after a change: never where it sends to."""
    return {"name": channel.name, "kind": channel.kind, "enabled": channel.enabled, "matchers": channel.matchers}


@transaction.atomic
def disable_channel(channel: Channel, *, reason: str, now: datetime) -> None:
    """Stop using a channel that nobody takes messages at, and tell the others: its owner is to hear of it there."""
    others = list(Channel.objects.filter(enabled=True).exclude(pk=channel.pk))
    held = hold_channels([other.pk for other in others])  # before the logs
    if not Channel.objects.filter(pk=channel.pk, enabled=True).update(enabled=False, disabled_reason=reason[:200]):
        return
    summary = f"Channel {channel.name} was disabled: {reason}."
    record_event(EventKind.CHANNEL_DISABLED, summary, detail={"channel": channel.name})
    data = {"state": "notice", "summary": summary, "channel": channel.name, "path": "/channels/"}
    for other in (other for other in others if other.pk in held):
        _put(other, NotificationKind.NOTICE, "channel.disabled", {**data, **_owner(channel, other)}, now)


def _owner(channel: Channel, other: Channel) -> dict[str, Any]:
    """Whom a mail about a channel is for as well."""
    owner = channel.owner
    return {"also_to": [owner.email]} if owner is not None and owner.email and other.kind == "email" else {}


@transaction.atomic
def test_send(channel: Channel) -> Notification:
    """Put a test message into the outbox, also for a disabled channel; its row tells how that went. GoneError."""
    if not hold_channels([channel.pk]):
        raise GoneError("channel")
    summary = f"A test of channel {channel.name}: nothing is wrong."
    data = {"state": "test", "summary": summary, "path": "/alerts/"}
    return _put(channel, NotificationKind.TEST, "alert.test", data, timezone.now())


test_send.__test__ = False  # type: ignore[attr-defined]  # its name is no test's


def _put(channel: Channel, kind: NotificationKind, word: str, data: dict[str, Any], now: datetime) -> Notification:
    """Into the outbox, what is about no alert."""
    payload = {"type": word, "timestamp": now.isoformat(timespec="milliseconds"), "data": data}
    notification = Notification.objects.create(channel=channel, kind=kind, payload=payload, next_at=now, created_at=now)
    wake(DELIVER)
    return notification


def public_config(channel: Channel) -> dict[str, Any]:
    """What may be shown of a config: no secret, no URL's path."""
    return KINDS[channel.kind].public(open_config(channel))


def reveal_secret(channel: Channel) -> str | None:
    """The secret that signs, to be shown once to the person who created the channel; None where there is no such."""
    made = [field.name for field in KINDS[channel.kind].fields if field.secret and field.make is not None]
    return str(open_config(channel)[made[0]]) if made else None


def open_config(channel: Channel) -> dict[str, Any]:
    """The config itself; DecryptionError when the key that encrypted it is gone."""
    config: dict[str, Any] = json.loads(decrypt(bytes(channel.encrypted)))
    return config


def open_sender(channel: Channel) -> Sender:
    """The channel, ready to send; close it."""
    return KINDS[channel.kind].open(open_config(channel))


def without_secrets(channel: Channel, text: str) -> str:
    """What a receiver said, where it repeats none of the channel's secrets."""
    for secret in KINDS[channel.kind].secrets(open_config(channel)) if text else ():
        text = text.replace(secret, "...")
    return text


def _encrypted(config: Mapping[str, Any]) -> bytes:
    return encrypt(json.dumps(config).encode())


def _complete(kind: ChannelKind, config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return kind.complete(config)
    except ConfigError as error:
        raise InvalidError(f"$.config.{error.field}", error.reason) from None


def _changed(channel: Channel, given: Mapping[str, Any]) -> dict[str, Any]:
    """The whole config with what is given put in."""
    kind, known = KINDS[channel.kind], open_config(channel)
    merged = {field: value for field, value in {**known, **given}.items() if value is not None}
    config = _complete(kind, merged)
    for field in kind.fields:
        if field.secret and field.name in known and field.name not in given:
            before, after = kind.destination(known), kind.destination(config)
            check_destination(f"$.config.{field.name}", field.label.lower(), before=before, after=after)
    return config


def _checked_matchers(given: Sequence[Given]) -> list[str]:
    return [str(matcher) for matcher in read_matchers(given, everything=True)]


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
