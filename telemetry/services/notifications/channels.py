"""Creates, changes, tests and removes channels. Configs are encrypted at rest and decrypted only to send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any
from uuid import UUID, uuid5

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F, QuerySet
from django.utils import timezone

from controlplane.celery import wake
from controlplane.database.transactions import retry_on_conflict
from controlplane.encryption import decrypt, encrypt
from controlplane.errors import GoneError, InvalidError, NameTakenError
from controlplane.models import Event, EventKind
from controlplane.services.checks import check_destination, checked_text, lock_row, unique_or
from controlplane.services.events import record_event
from telemetry.channels import KINDS
from telemetry.channels.base import ChannelKind, ConfigError, Message, Receipt
from telemetry.channels.enqueue import DELIVER, lock_channels
from telemetry.matchers import MatcherInput, match_all, parse_stored, read_matchers
from telemetry.models import Channel, Notification, NotificationKind, NotificationState, Topic

ROLLOUT_EVENTS = (
    EventKind.ROLLOUT_PROPOSED,
    EventKind.ROLLOUT_STARTED,
    EventKind.ROLLOUT_PROMOTED,
    EventKind.ROLLOUT_HELD,
    EventKind.ROLLOUT_ROLLED_BACK,
    EventKind.ROLLOUT_ABORTED,
    EventKind.ROLLOUT_SUPERSEDED,
    EventKind.ROLLOUT_COMPLETED,
)
ROLLOUT_AGE = timedelta(hours=1)  # older steps are not notified any more
_KEYS = UUID("7f6a2c1e-5d1b-4b0e-9c55-2f0c8a4f6d3b")  # namespace of the ids of messages that are sent once


def channels() -> QuerySet[Channel]:
    """Every channel with its owner, by name."""
    return Channel.objects.select_related("owner").order_by("name")


@transaction.atomic
def create_channel(
    name: str,
    *,
    kind: str = "webhook",
    config: Mapping[str, Any],
    matchers: Sequence[MatcherInput] = (),
    topics: Sequence[str] = (),
    enabled: bool = True,
    by: User | None = None,
) -> Channel:
    """Create a channel; a missing secret is generated (``reveal_secret``). InvalidError, NameTakenError."""
    if kind not in KINDS:
        raise InvalidError("$.kind", f"expected one of {', '.join(KINDS)}")
    channel = Channel(name=checked_text("$.name", name, at_most=100), kind=kind, enabled=enabled, owner=by)
    channel.encrypted, channel.matchers = _encrypt_config(_complete(KINDS[kind], config)), _checked_matchers(matchers)
    channel.topics = _checked_topics(KINDS[kind], topics)
    with unique_or(lambda _: NameTakenError("channel", channel.name)):
        channel.save()
    summary = f"Channel {channel.name} was created."
    record_event(EventKind.CHANNEL_CREATED, summary, by=by, detail={"after": _event_detail(channel)})
    return channel


@transaction.atomic
def update_channel(
    channel: Channel,
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    matchers: Sequence[MatcherInput] | None = None,
    topics: Sequence[str] | None = None,
    enabled: bool | None = None,
    by: User | None = None,
) -> Channel:
    """Change the given values. In ``config``, other fields stay and null removes a field. InvalidError.

    A secret is never sent to another address than the one it was set for, and signs nothing sent to another origin.
    """
    channel = lock_row(Channel.objects.select_for_update(), channel.pk)
    before = _event_detail(channel)
    if name is not None:
        channel.name = checked_text("$.name", name, at_most=100)
    if config is not None:
        channel.encrypted = _encrypt_config(_merged_config(channel, config))
        _restart_schedule(channel)  # the change may have repaired it
    if matchers is not None:
        channel.matchers, channel.catches_up = _checked_matchers(matchers), True
    if topics is not None:
        channel.topics = _checked_topics(KINDS[channel.kind], topics)
    if enabled is not None:
        _set_enabled(channel, enabled=enabled)
    with unique_or(lambda _: NameTakenError("channel", channel.name)):
        channel.save()
    change = {"before": before, "after": _event_detail(channel), "config": "replaced" if config is not None else "kept"}
    record_event(EventKind.CHANNEL_CHANGED, f"Channel {channel.name} was changed.", by=by, detail=change)
    return channel


def _restart_schedule(channel: Channel) -> None:
    """Make the pending messages of a channel due, with a new retry schedule."""
    pending = Notification.objects.filter(channel=channel, state=NotificationState.PENDING)
    pending.update(next_at=timezone.now(), tried_before=F("attempts"))
    wake(DELIVER)


def _set_enabled(channel: Channel, *, enabled: bool) -> None:
    """Enable or disable. Messages that waited for an enabled channel start their retry schedule anew."""
    if enabled and not channel.enabled:
        channel.catches_up = True
        _restart_schedule(channel)
    channel.enabled = enabled
    channel.disabled_reason = "" if enabled else channel.disabled_reason


@transaction.atomic
def rotate_secret(channel: Channel, *, by: User | None = None) -> str:
    """Sign with a new secret, and with the old one until it is removed; returns the new one. InvalidError."""
    if "previous_secret" not in {field.name for field in KINDS[channel.kind].fields}:
        raise InvalidError("$.kind", f"a channel of kind {channel.kind} has no signing secret")
    old = open_config(channel)["secret"]
    channel = update_channel(channel, config={"previous_secret": old, "secret": None}, by=by)
    return str(open_config(channel)["secret"])


@retry_on_conflict
@transaction.atomic
def delete_channel(channel: Channel, *, by: User | None = None) -> None:
    """Remove a channel with its pending messages."""
    channel = lock_row(Channel.objects.select_for_update(), channel.pk)
    pending = channel.notifications.filter(state=NotificationState.PENDING).select_for_update().order_by("number")
    list(pending.values_list("pk"))  # locked, so that no worker claims one and writes an attempt
    summary = f"Channel {channel.name} was removed."
    record_event(EventKind.CHANNEL_REMOVED, summary, by=by, detail={"before": _event_detail(channel)})
    channel.delete()


def _event_detail(channel: Channel) -> dict[str, Any]:
    """The values that an event records of a channel; its config is left out."""
    return {name: getattr(channel, name) for name in ("name", "kind", "enabled", "matchers", "topics")}


@transaction.atomic
def disable_channel(channel: Channel, *, reason: str, now: datetime) -> None:
    """Disable a channel whose receiver accepts no messages, and send a notice to all other channels."""
    other_channels = list(Channel.objects.filter(enabled=True).exclude(pk=channel.pk))
    existing = lock_channels([other.pk for other in other_channels])  # before the logs
    if not Channel.objects.filter(pk=channel.pk, enabled=True).update(enabled=False, disabled_reason=reason[:200]):
        return
    summary = f"Channel {channel.name} was disabled: {reason}."
    record_event(EventKind.CHANNEL_DISABLED, summary, detail={"channel": channel.name})
    data = {"state": "notice", "summary": summary, "channel": channel.name, "path": "/channels/"}
    for other in (other for other in other_channels if other.pk in existing):
        _enqueue(other, NotificationKind.NOTICE, "channel.disabled", {**data, **_extra_recipients(channel, other)}, now)


def _extra_recipients(channel: Channel, other: Channel) -> dict[str, Any]:
    """``also_to`` with the owner's address, for a notice by e-mail; else {}."""
    owner = channel.owner
    return {"also_to": [owner.email]} if owner is not None and owner.email and other.kind == "email" else {}


@transaction.atomic
def notify_topic(
    topic: Topic,
    kind: NotificationKind,
    message_type: str,
    data: dict[str, Any],
    now: datetime,
    *,
    key: str,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Put a message into the outbox for each enabled channel that asks for a topic, once for each ``key``. Of a
    channel's matchers, those on ``labels`` apply. Two queries, four for a message that is new.
    """
    chosen = [
        channel.pk
        for channel in Channel.objects.filter(enabled=True, topics__contains=[topic])
        if match_all((matcher for matcher in parse_stored(channel.matchers) if matcher.label in labels), labels)
    ]
    payload = {"type": message_type, "timestamp": now.isoformat(timespec="milliseconds"), "data": data}
    ids = {uuid5(_KEYS, f"{pk} {key}"): pk for pk in chosen}
    for written in Notification.objects.filter(pk__in=ids).values_list("pk", flat=True):
        del ids[written]
    existing = lock_channels(ids.values()) if ids else frozenset()
    rows = [
        Notification(pk=pk, channel_id=channel, kind=kind, payload=payload, next_at=now, created_at=now)
        for pk, channel in ids.items()
        if channel in existing
    ]
    Notification.objects.bulk_create(rows, ignore_conflicts=True)
    if rows:
        wake(DELIVER)


def notify_rollouts(now: datetime) -> None:
    """Notify the channels with the topic of the latest steps of rollouts, each once, unless their pool was removed."""
    if not Channel.objects.filter(enabled=True, topics__contains=[Topic.ROLLOUTS]).exists():
        return
    events = Event.objects.filter(kind__in=ROLLOUT_EVENTS, at__gte=now - ROLLOUT_AGE).select_related("pool", "actor")
    for event in events.order_by("at", "pk"):
        if event.pool is None:
            continue  # without its pool's name, channels of other pools would match
        detail, labels = event.detail, {"pool": event.pool.name}
        facts = (
            ("Policy", detail["policy"]),
            ("Revision", str(detail["revision"])),
            ("By", event.actor and event.actor.get_username()),
        )
        data = {
            "state": "rollout",
            "summary": event.summary,
            **{name: detail[name] for name in ("rollout", "policy", "revision")},
            **labels,
            "facts": [fact for fact in facts if fact[1]],
            "links": {"rollout": f"/rollouts/{detail['rollout']}/"},
        }
        message_type, key = event.kind.replace("_", ".", 1), f"event {event.pk}"
        notify_topic(Topic.ROLLOUTS, NotificationKind.ROLLOUT, message_type, data, now, key=key, labels=labels)


@transaction.atomic
def test_send(channel: Channel) -> Notification:
    """Put a test message into the outbox, also for a disabled channel. GoneError."""
    if not lock_channels([channel.pk]):
        raise GoneError("channel")
    summary = f"Test of channel {channel.name}: no action needed."
    data = {"state": "test", "summary": summary, "path": "/alerts/"}
    return _enqueue(channel, NotificationKind.TEST, "alert.test", data, timezone.now())


test_send.__test__ = False  # type: ignore[attr-defined]  # not a test in spite of its name


def _enqueue(
    channel: Channel, kind: NotificationKind, message_type: str, data: dict[str, Any], now: datetime
) -> Notification:
    payload = {"type": message_type, "timestamp": now.isoformat(timespec="milliseconds"), "data": data}
    notification = Notification.objects.create(channel=channel, kind=kind, payload=payload, next_at=now, created_at=now)
    wake(DELIVER)
    return notification


def public_config(channel: Channel) -> dict[str, Any]:
    """A config without secrets and without paths of URLs."""
    return KINDS[channel.kind].public(open_config(channel))


def reveal_secret(channel: Channel) -> str | None:
    """The generated secret, shown once to the user who created the channel; None if the kind has none."""
    generated = [field.name for field in KINDS[channel.kind].fields if field.secret and field.make is not None]
    return str(open_config(channel)[generated[0]]) if generated else None


def open_config(channel: Channel) -> dict[str, Any]:
    """The decrypted config; DecryptionError if its key is no longer configured."""
    config: dict[str, Any] = json.loads(decrypt(bytes(channel.encrypted)))
    return config


def send(channel: Channel, message: Message) -> Receipt:
    """Deliver once; DeliveryError, DecryptionError."""
    return KINDS[channel.kind].send(open_config(channel), message)


def redact_secrets(channel: Channel, text: str) -> str:
    """A response without the channel's secrets."""
    for secret in KINDS[channel.kind].secrets(open_config(channel)) if text else ():
        text = text.replace(secret, "...")
    return text


def _encrypt_config(config: Mapping[str, Any]) -> bytes:
    return encrypt(json.dumps(config).encode())


def _complete(kind: ChannelKind, config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return kind.complete(config)
    except ConfigError as error:
        raise InvalidError(f"$.config.{error.field}", error.reason) from None


def _merged_config(channel: Channel, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The complete config with some changes."""
    kind, current = KINDS[channel.kind], open_config(channel)
    merged = {field: value for field, value in {**current, **changes}.items() if value is not None}
    config = _complete(kind, merged)
    for field in kind.fields:
        if field.secret and field.name in current and field.name not in changes:
            before, after = kind.destination(current), kind.destination(config)
            check_destination(f"$.config.{field.name}", field.label.lower(), before=before, after=after)
    return config


def _checked_matchers(matchers: Sequence[MatcherInput]) -> list[str]:
    return [str(matcher) for matcher in read_matchers(matchers, may_match_all=True)]


def _checked_topics(kind: ChannelKind, topics: Sequence[str]) -> list[str]:
    if unknown := sorted(set(topics) - set(Topic.values)):
        raise InvalidError("$.topics", f"{unknown[0]!r} is no topic; expected some of {', '.join(Topic.values)}")
    if not set(topics) <= set(kind.topics):
        expected = f"at most {', '.join(kind.topics)}" if kind.topics else "none"
        raise InvalidError(
            "$.topics", f"expected {expected}: {kind.label} would treat any other message as an incident"
        )
    return sorted(set(topics))
