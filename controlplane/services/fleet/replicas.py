"""Replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from controlplane import schema_fields
from controlplane.encryption import decrypt, encrypt
from controlplane.errors import ConflictError, DecryptionError, InUseError, InvalidError
from controlplane.models import DiscoveredReplica, EventKind, Pool, Replica, ReplicaState
from controlplane.models.fleet import LONG_NAME
from controlplane.schema_fields import canonical, checked
from controlplane.services.checks import (
    address_of,
    check_destination,
    check_labels,
    check_name,
    check_replica_url,
    lock_row,
    name_conflict,
)
from controlplane.services.events import record_event
from controlplane.services.fleet.served_models import relative_error_paths
from controlplane.services.snapshots import freeze_snapshot

FACTS = ("name", "url", "state", "weight", "block_tokens", "capacity_blocks", "labels", *schema_fields.REPLICA)


class ReplicaSettings(TypedDict, total=False):
    """What may be said of a replica. What is not given stays as it is."""

    url: str
    weight: float
    labels: Mapping[str, str]
    adapters: Iterable[str] | None  # None: those that its /v1/models lists
    data_parallel_size: int
    api_key: str | None  # what the engine asks of clients; a secret. None: it asks for none


@transaction.atomic
def add_replica(pool: Pool, *, name: str, by: User | None = None, **settings: Unpack[ReplicaSettings]) -> Replica:
    """Add a replica in state ``active``; routers learn of it at once. NameTakenError (name or URL), InvalidError."""
    check_name(name, LONG_NAME, "$.name")
    replica = Replica(pool=pool, name=name)
    _change(replica, settings)
    try:
        with transaction.atomic():
            replica.save()
    except IntegrityError as error:
        raise _taken(error, replica, by) from None
    record_event(
        EventKind.REPLICA_ADDED,
        f"Replica {name} was added to pool {pool.name}.",
        pool=pool,
        replica=replica,
        by=by,
        detail={"after": facts(replica)},
    )
    with relative_error_paths():
        freeze_snapshot(reason=f"replica {name} added", by=by)
    return replica


@transaction.atomic
def update_replica(replica: Replica, *, by: User | None = None, **settings: Unpack[ReplicaSettings]) -> Replica:
    """Change what is given. The name stays: it is the replica's identity on every ring.

    An API key is never sent to another address than it was given for: InvalidError where the URL changes without it.
    """
    replica = _locked(replica)
    if "url" in settings and "api_key" not in settings:
        _check_key_stays(replica, settings["url"])
    return _updated(replica, settings, by)


@transaction.atomic
def move_replica(replica: Replica, url: str, *, aside: bool = False) -> Replica:
    """Follow an engine to the address that its source names now, with its API key.

    InvalidError where the source's settings changed after the key was given: it was given for what the source found
    before. ``aside`` is for an address in between that no router learns of.
    """
    replica = _locked(replica)
    if not aside and _source_changed(replica):
        _check_key_stays(replica, url)
    return _updated(replica, {"url": url}, None)


def may_move(replica: Replica, url: str) -> bool:
    """Whether ``move_replica`` would take it there."""
    try:
        if _source_changed(replica):
            _check_key_stays(replica, url)
    except InvalidError:
        return False
    return True


def _updated(replica: Replica, settings: ReplicaSettings, by: User | None) -> Replica:
    """Change a row that is locked."""
    before = facts(replica)
    _change(replica, settings)
    try:
        with transaction.atomic():
            replica.save()
    except IntegrityError as error:
        raise _taken(error, replica, by) from None
    return _changed(replica, before, EventKind.REPLICA_CHANGED, f"Replica {replica.name} was changed.", by)


@transaction.atomic
def set_replica_state(replica: Replica, state: ReplicaState, *, by: User | None = None) -> Replica:
    """Say what is wanted of a replica: ``active``, ``draining`` (finishes, takes nothing new) or ``disabled``."""
    replica = _locked(replica)
    before = facts(replica)
    replica.state = ReplicaState(state)
    replica.save()
    summary = f"Replica {replica.name} is now {replica.state} (was {before['state']})."
    return _changed(replica, before, EventKind.REPLICA_STATE_CHANGED, summary, by)


@transaction.atomic
def remove_replica(replica: Replica, *, by: User | None = None) -> None:
    """Remove a replica; InUseError if it is the last one of a task group's subset, which would then widen to all.

    Subsets are looked at when the configuration is frozen: until then somebody else may remove the other one.
    """
    replica = lock_row(Replica.objects.select_for_update(of=("self",)).select_related("pool"), replica.pk)
    before, pool, groups = facts(replica), replica.pool, list(replica.groups.all())
    replica.delete()
    summary = f"Replica {replica.name} was removed from pool {pool.name}."
    record_event(EventKind.REPLICA_REMOVED, summary, pool=pool, by=by, detail={"before": before})
    with relative_error_paths():
        freeze_snapshot(reason=f"replica {replica.name} removed", by=by)
    for group in groups:
        if not group.replicas.exists():
            raise InUseError(f"Replica {replica.name} is the only one of task group {group}; change the group first.")


def record_engine_facts(replica: Replica, *, block_tokens: int | None, capacity_blocks: int | None) -> bool:
    """Note what the engine said of its KV cache; whether that was news. None leaves what is known.

    Cheap when nothing changed: one query and no lock. No news is also what a replica says that was removed meanwhile.
    """
    told = {"block_tokens": block_tokens, "capacity_blocks": capacity_blocks}
    told = {name: value for name, value in told.items() if value is not None}
    known = Replica.objects.filter(pk=replica.pk).values(*told).first() if told else None
    if known is None or known == told:
        return False
    return _note_engine_facts(replica, told)


def facts(replica: Replica) -> dict[str, Any]:
    """What an event shows of a replica before and after a change."""
    set_at = replica.api_key_set_at
    return {name: getattr(replica, name) for name in FACTS} | {"api_key_set_at": set_at and set_at.isoformat()}


@transaction.atomic
def _note_engine_facts(replica: Replica, told: dict[str, int | None]) -> bool:
    """Write them, unless another scrape did in the meantime."""
    replica = _locked(replica)
    before = facts(replica)
    for name, value in told.items():
        setattr(replica, name, value)
    replica.save()
    cache = f"{replica.capacity_blocks} blocks of {replica.block_tokens} tokens"
    _changed(replica, before, EventKind.REPLICA_CHANGED, f"Replica {replica.name} told its cache: {cache}.", None)
    return facts(replica) != before


def _locked(replica: Replica) -> Replica:
    return lock_row(Replica.objects.select_for_update(of=("self",), no_key=True).select_related("pool"), replica.pk)


def _changed(replica: Replica, before: dict[str, Any], kind: EventKind, summary: str, by: User | None) -> Replica:
    """Record a change and freeze it, where there is one."""
    after = facts(replica)
    if after != before:
        detail = {"before": before, "after": after}
        record_event(kind, summary, pool=replica.pool, replica=replica, by=by, detail=detail)
        with relative_error_paths():
            freeze_snapshot(reason=f"replica {replica.name} changed", by=by)
    return replica


def _change(replica: Replica, settings: ReplicaSettings) -> None:
    """Put what is given on the row, unsaved; InvalidError."""
    if "api_key" in settings:
        _set_api_key(replica, settings.pop("api_key"))
    if "url" in settings:
        settings["url"] = _checked_url(settings["url"])
    if "weight" in settings and not 0 < settings["weight"] <= 1000:
        raise InvalidError("$.weight", "expected more than 0 and at most 1000")
    if "labels" in settings:
        check_labels(settings["labels"])
    if settings.get("adapters") is not None:
        settings["adapters"] = sorted(set(settings["adapters"] or ()))
    for name, value in checked(schema_fields.REPLICA, settings).items():
        setattr(replica, name, value)


def _set_api_key(replica: Replica, key: str | None) -> None:
    """Encrypt it; a key that is the same as before is no change. What is wrong with one is said without it."""
    if key is None:
        replica.api_key_encrypted = replica.api_key_set_at = None
        return
    try:
        canonical(schema_fields.API_KEY, key, "$.api_key")
    except InvalidError:
        raise InvalidError("$.api_key", "expected 1 to 1,024 visible ASCII characters, without blanks") from None
    if _api_key(replica) != key.encode() or _source_changed(replica):
        replica.api_key_encrypted, replica.api_key_set_at = encrypt(key.encode()), timezone.now()


def _check_key_stays(replica: Replica, url: str) -> None:
    """InvalidError where a key that is kept would be sent to another address."""
    if replica.api_key_encrypted is not None:
        before, after = address_of(replica.url), address_of(_checked_url(url))
        check_destination("$.api_key", "API key", before=before, after=after)


def _source_changed(replica: Replica) -> bool:
    """Whether the source that a replica follows looks elsewhere than when the replica's API key was given."""
    if replica.api_key_set_at is None:
        return False
    followed = DiscoveredReplica.objects.filter(replica=replica)
    return followed.filter(source__settings_changed_at__gt=replica.api_key_set_at).exists()


def _checked_url(url: str) -> str:
    """The URL without its final slash, so that one engine has one spelling."""
    check_replica_url(url, "$.url")
    return url.rstrip("/")


def _taken(error: IntegrityError, replica: Replica, by: User | None) -> ConflictError:
    if "url" in str(error):
        return name_conflict("replica at", replica.url, Replica.objects.filter(url=replica.url), by)
    return name_conflict("replica", replica.name, Replica.objects.filter(name=replica.name), by)


def _api_key(replica: Replica) -> bytes | None:
    """The key in force; None where there is none, or none that can be read."""
    try:
        return None if replica.api_key_encrypted is None else decrypt(replica.api_key_encrypted)
    except DecryptionError:
        return None
