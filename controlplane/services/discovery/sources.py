"""Create, change, remove and poll replica sources."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from controlplane.celery import wake
from controlplane.discovery import SourceKind, canonical_settings, kind_named
from controlplane.encryption import encrypt
from controlplane.errors import ConflictError, InvalidError
from controlplane.models import Adoption, EventKind, Pool, ReplicaSource
from controlplane.models.fleet import SHORT_NAME
from controlplane.services.checks import (
    address_of,
    check_destination,
    check_name,
    lock_row,
    name_conflict,
    unique_or,
)
from controlplane.services.events import record_event

POLL_TASK = "controlplane.tasks.poll_sources"
MAX_SECRET_CHARS = 16_384  # characters; a service account's token has about a thousand
RANGES: dict[str, tuple[float, float]] = {
    "interval_s": (5, 86_400),
    "deadline_s": (1, 60),
    "drain_after_s": (0, 604_800),
    "remove_after_s": (0, 2_592_000),
    "max_vanished_ratio": (0.01, 1),
    "max_targets": (1, 1000),
}


@transaction.atomic
def create_source(
    pool: Pool,
    *,
    name: str,
    kind: str,
    settings: dict[str, Any],
    secret: str = "",
    by: User | None = None,
    **options: Any,
) -> ReplicaSource:
    """Add a source and poll it soon. ``options`` are ``adoption``, ``enabled`` and the keys of ``RANGES``.

    NameTakenError, InvalidError.
    """
    check_name(name, SHORT_NAME, "$.name")
    source = ReplicaSource(pool=pool, name=name, kind=kind_named(kind).name)
    _set_fields(source, {"settings": settings, **options}, secret)
    with unique_or(lambda _: name_conflict("replica source", name, ReplicaSource.objects.filter(name=name), by)):
        source.save()
    summary = f"Replica source {name} was added to pool {pool.name}."
    record_event(EventKind.SOURCE_ADDED, summary, pool=pool, by=by, detail={"after": _event_fields(source)})
    wake(POLL_TASK)
    return source


@transaction.atomic
def update_source(
    source: ReplicaSource, *, secret: str | None = None, by: User | None = None, **changes: Any
) -> ReplicaSource:
    """Change a source; a running poll's result is dropped. Name, kind and pool cannot change.

    An empty ``secret`` removes it. InvalidError if a stored secret would be sent to a different server.
    """
    rows = ReplicaSource.objects.select_for_update(of=("self",), no_key=True).select_related("pool")
    source = lock_row(rows, source.pk)
    before, server = _event_fields(source), _server(source)
    _set_fields(source, changes, secret)
    if source.encrypted is not None and secret is None:
        check_destination("$.secret", "token", before=server, after=_server(source))
    if _event_fields(source) == before and secret is None:
        return source
    if source.settings != before["settings"]:
        source.settings_changed_at = timezone.now()
    source.poll_number += 1
    source.next_poll_at = timezone.now()
    source.save()
    detail = {"before": before, "after": _event_fields(source)}
    summary = f"Replica source {source.name} was changed."
    record_event(EventKind.SOURCE_CHANGED, summary, pool=source.pool, by=by, detail=detail)
    wake(POLL_TASK)
    return source


@transaction.atomic
def remove_source(source: ReplicaSource, *, by: User | None = None) -> None:
    """Remove a source and its proposals. Its replicas stay and are no longer updated."""
    source = lock_row(ReplicaSource.objects.select_for_update(of=("self",)).select_related("pool"), source.pk)
    before = _event_fields(source)
    source.delete()
    summary = f"Replica source {before['name']} was removed from pool {source.pool.name}; its replicas stay."
    record_event(EventKind.SOURCE_REMOVED, summary, pool=source.pool, by=by, detail={"before": before})


def request_poll(source: ReplicaSource) -> None:
    """Poll a source now; ConflictError while it is paused."""
    if not ReplicaSource.objects.filter(pk=source.pk, enabled=True).update(next_poll_at=timezone.now()):
        raise ConflictError(f"Replica source {source.name} is paused; enable it first.")
    wake(POLL_TASK)


def _event_fields(source: ReplicaSource) -> dict[str, Any]:
    fields = ("name", "kind", "settings", "enabled", *RANGES)
    values = {name: getattr(source, name) for name in fields}
    return {**values, "adoption": str(source.adoption), "has_secret": source.encrypted is not None}


def _server(source: ReplicaSource) -> str:
    """Where the secret is sent: the server, and the certificate authority that identifies it."""
    url, authority = source.settings.get("api_url", ""), source.settings.get("ca", "")
    return f"{address_of(url) if url else ''} {authority.strip()}"


def _set_fields(source: ReplicaSource, changes: dict[str, Any], secret: str | None) -> None:
    kind = kind_named(source.kind)
    for name, value in changes.items():
        setattr(source, name, _validate(kind, name, value))
    if source.remove_after_s < source.drain_after_s:
        raise InvalidError("$.remove_after_s", "expected at least drain_after_s: a replica drains before its removal")
    if secret is not None:
        source.encrypted = encrypt(_validate_secret(kind, secret).encode()) if secret else None


def _validate(kind: SourceKind, name: str, value: Any) -> Any:
    if name == "settings":
        return canonical_settings(kind, value)
    if name in RANGES:
        low, high = RANGES[name]
        if not low <= value <= high:
            raise InvalidError(f"$.{name}", f"expected {low:g} to {high:g}")
        return value
    if name == "adoption":
        if value not in Adoption.values:
            raise InvalidError("$.adoption", f"expected one of {', '.join(Adoption.values)}")
        return Adoption(value)
    if name != "enabled":
        raise TypeError(f"a replica source has no {name} that can be changed")
    return bool(value)


def _validate_secret(kind: SourceKind, secret: str) -> str:
    """The secret without surrounding blanks. No error quotes it."""
    if not kind.secret:
        raise InvalidError("$.secret", f"a source of kind {kind.name} has none")
    text = secret.strip()
    if not text.isascii() or not text.isprintable() or " " in text or len(text) > MAX_SECRET_CHARS:
        raise InvalidError("$.secret", f"expected one line of up to {MAX_SECRET_CHARS} characters without blanks")
    return text
