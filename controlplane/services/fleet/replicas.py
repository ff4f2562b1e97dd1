"""Add, change, move, drain and remove replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack
from urllib.parse import urlsplit

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from controlplane import schema_fields
from controlplane.encryption import decrypt, encrypt
from controlplane.errors import ConflictError, DecryptionError, InUseError, InvalidError
from controlplane.models import DiscoveredReplica, EventKind, Pool, Replica, ReplicaState
from controlplane.models.fleet import LONG_NAME
from controlplane.schema_fields import canonical, canonical_fields
from controlplane.services.checks import (
    address_of,
    check_destination,
    check_labels,
    check_name,
    check_replica_url,
    lock_row,
    name_conflict,
    unique_or,
)
from controlplane.services.events import record_event
from controlplane.services.fleet.served_models import relative_error_paths
from controlplane.services.snapshots import freeze_snapshot

_FIELDS = ("name", "url", "state", "weight", "block_tokens", "capacity_blocks", "labels", *schema_fields.REPLICA)


class ReplicaSettings(TypedDict, total=False):
    """Settings of a replica. Omitted: unchanged."""

    url: str
    weight: float
    labels: Mapping[str, str]
    adapters: Iterable[str] | None  # None: those in its /v1/models
    data_parallel_size: int
    kv_events: Mapping[str, Any] | None  # routing.schema.KvEvents; None: what it has cached is estimated
    role: str  # a routing.schema.ReplicaRole
    api_key: str | None  # the API key that the engine requires, a secret; None: none


@transaction.atomic
def add_replica(pool: Pool, *, name: str, by: User | None = None, **settings: Unpack[ReplicaSettings]) -> Replica:
    """Add an active replica. NameTakenError (name or URL), InvalidError."""
    check_name(name, LONG_NAME, "$.name")
    replica = Replica(pool=pool, name=name)
    _set_fields(replica, settings)
    _save(replica, by)
    detail = {"after": _event_fields(replica)}
    summary = f"Replica {name} was added to pool {pool.name}."
    record_event(EventKind.REPLICA_ADDED, summary, pool=pool, replica=replica, by=by, detail=detail)
    with relative_error_paths():
        freeze_snapshot(reason=f"replica {name} added", by=by)
    return replica


@transaction.atomic
def update_replica(replica: Replica, *, by: User | None = None, **settings: Unpack[ReplicaSettings]) -> Replica:
    """Change a replica. Its name cannot change: it is its identity on every hash ring.

    InvalidError if a stored API key would be sent to a different address.
    """
    replica = _lock(replica)
    if "url" in settings and "api_key" not in settings:
        _check_key_destination(replica, settings["url"])
    before = _event_fields(replica)
    _set_fields(replica, settings)
    return _finish_change(replica, before, EventKind.REPLICA_CHANGED, f"Replica {replica.name} was changed.", by)


@transaction.atomic
def move_replica(replica: Replica, url: str) -> Replica:
    """Follow an engine to its new address with its API key.

    InvalidError if the source's settings changed after the key was entered, because the key was meant for what the
    source found before.
    """
    replica = _lock(replica)
    if _source_changed(replica):
        _check_key_destination(replica, url)
    before = _event_fields(replica)
    _set_fields(replica, {"url": url, "kv_events": events_at_host(replica, url)})
    return _finish_change(replica, before, EventKind.REPLICA_CHANGED, f"Replica {replica.name} was changed.", None)


def may_move(replica: Replica, url: str) -> bool:
    """Whether ``move_replica`` would accept the address."""
    try:
        if _source_changed(replica):
            _check_key_destination(replica, url)
    except InvalidError:
        return False
    return True


@transaction.atomic
def set_replica_state(replica: Replica, state: ReplicaState, *, by: User | None = None) -> Replica:
    """Set the desired state: ``active``, ``draining`` (no new requests) or ``disabled`` (no health checks either)."""
    replica = _lock(replica)
    before = _event_fields(replica)
    replica.state = ReplicaState(state)
    summary = f"Replica {replica.name} is now {replica.state} (was {before['state']})."
    return _finish_change(replica, before, EventKind.REPLICA_STATE_CHANGED, summary, by)


@transaction.atomic
def remove_replica(replica: Replica, *, by: User | None = None) -> None:
    """Remove a replica; InUseError for the last one of a task group's subset, which would then mean all replicas.

    Subsets are checked after the snapshot took its lock: before that, another replica may be removed concurrently.
    """
    replica = lock_row(Replica.objects.select_for_update(of=("self",)).select_related("pool"), replica.pk)
    before, pool, groups = _event_fields(replica), replica.pool, list(replica.groups.all())
    detail = {"before": before, "replica_id": replica.pk}  # its readings stay, and count for the pool
    replica.delete()
    summary = f"Replica {replica.name} was removed from pool {pool.name}."
    record_event(EventKind.REPLICA_REMOVED, summary, pool=pool, by=by, detail=detail)
    with relative_error_paths():
        freeze_snapshot(reason=f"replica {replica.name} removed", by=by)
    for group in groups:
        if not group.replicas.exists():
            raise InUseError(f"Replica {replica.name} is the only one of task group {group}; change the group first.")


def record_engine_facts(replica: Replica, *, block_tokens: int | None, capacity_blocks: int | None) -> bool:
    """Store the cache size that an engine reports; whether it changed. None is ignored.

    One query and no lock if nothing changed, or the replica was removed.
    """
    reported = {"block_tokens": block_tokens, "capacity_blocks": capacity_blocks}
    reported = {name: value for name, value in reported.items() if value is not None}
    stored = Replica.objects.filter(pk=replica.pk).values(*reported).first() if reported else None
    if stored is None or stored == reported:
        return False
    with transaction.atomic():
        replica = _lock(replica)
        before = _event_fields(replica)
        for name, value in reported.items():
            setattr(replica, name, value)
        size = f"{replica.capacity_blocks:,} blocks of {replica.block_tokens} tokens"
        summary = f"Replica {replica.name} reported its cache: {size}."
        _finish_change(replica, before, EventKind.REPLICA_CHANGED, summary, None)
    return _event_fields(replica) != before


def events_at_host(replica: Replica, url: str) -> dict[str, Any] | None:
    """The replica's ``kv_events`` after its engine moved; endpoints at other hosts than its own stay."""
    if replica.kv_events is None:
        return None
    before, after = urlsplit(replica.url).hostname, urlsplit(url).hostname or ""
    netloc = f"[{after}]" if ":" in after else after
    moved = dict(replica.kv_events)
    for name in ("endpoint", "replay_endpoint"):
        if moved[name] and urlsplit(moved[name]).hostname == before:
            moved[name] = f"tcp://{netloc}:{urlsplit(moved[name]).port}"
    return moved


def _event_fields(replica: Replica) -> dict[str, Any]:
    """The part of a replica that events show."""
    set_at = replica.api_key_set_at
    return {name: getattr(replica, name) for name in _FIELDS} | {"api_key_set_at": set_at and set_at.isoformat()}


def _lock(replica: Replica) -> Replica:
    return lock_row(Replica.objects.select_for_update(of=("self",), no_key=True).select_related("pool"), replica.pk)


def _save(replica: Replica, by: User | None) -> None:
    def conflict(error: IntegrityError) -> ConflictError:
        if "url" in str(error):
            return name_conflict("replica at", replica.url, Replica.objects.filter(url=replica.url), by)
        return name_conflict("replica", replica.name, Replica.objects.filter(name=replica.name), by)

    with unique_or(conflict):
        replica.save()


def _finish_change(replica: Replica, before: dict[str, Any], kind: EventKind, summary: str, by: User | None) -> Replica:
    """Save a change of a locked row, record it and freeze a snapshot; does nothing if no field changed."""
    after = _event_fields(replica)
    if after != before:
        _save(replica, by)
        detail = {"before": before, "after": after}
        record_event(kind, summary, pool=replica.pool, replica=replica, by=by, detail=detail)
        with relative_error_paths():
            freeze_snapshot(reason=f"replica {replica.name} changed", by=by)
    return replica


def _set_fields(replica: Replica, settings: ReplicaSettings) -> None:
    """Set validated fields without saving; InvalidError."""
    if "api_key" in settings:
        _set_api_key(replica, settings.pop("api_key"))
    if "url" in settings:
        settings["url"] = check_replica_url(settings["url"], "$.url")
    if "weight" in settings and not 0 < settings["weight"] <= 1000:
        raise InvalidError("$.weight", "expected more than 0 and at most 1000")
    if "labels" in settings:
        check_labels(settings["labels"])
    if settings.get("adapters") is not None:
        settings["adapters"] = sorted(set(settings["adapters"] or ()))
    values = canonical_fields(schema_fields.REPLICA, settings)
    _check_event_endpoints(values.get("kv_events") or {})
    for name, value in values.items():
        setattr(replica, name, value)


def _check_event_endpoints(events: Mapping[str, Any]) -> None:
    """InvalidError for an address that routers may not connect to; the snapshot checks the ports of all ranks."""
    for name in ("endpoint", "replay_endpoint"):
        if events.get(name):
            check_replica_url(f"http{events[name].removeprefix('tcp')}", f"$.kv_events.{name}")


def _set_api_key(replica: Replica, key: str | None) -> None:
    """Encrypt a key that differs from the stored one. The error does not quote it."""
    if key is None:
        replica.api_key_encrypted = replica.api_key_set_at = None
        return
    try:
        canonical(schema_fields.API_KEY, key, "$.api_key")
    except InvalidError:
        raise InvalidError("$.api_key", "expected 1 to 1,024 visible ASCII characters, without blanks") from None
    try:
        stored = None if replica.api_key_encrypted is None else decrypt(replica.api_key_encrypted)
    except DecryptionError:
        stored = None
    if stored != key.encode() or _source_changed(replica):
        replica.api_key_encrypted, replica.api_key_set_at = encrypt(key.encode()), timezone.now()


def _check_key_destination(replica: Replica, url: str) -> None:
    """InvalidError if a stored key would be sent to a different address."""
    if replica.api_key_encrypted is not None:
        before, after = address_of(replica.url), address_of(check_replica_url(url, "$.url"))
        check_destination("$.api_key", "API key", before=before, after=after)


def _source_changed(replica: Replica) -> bool:
    """Whether the replica's source was reconfigured after the replica's API key was entered."""
    if replica.api_key_set_at is None:
        return False
    discovered = DiscoveredReplica.objects.filter(replica=replica)
    return discovered.filter(source__settings_changed_at__gt=replica.api_key_set_at).exists()
