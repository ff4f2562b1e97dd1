"""Replica sources: where to look for a pool's replicas."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from controlplane.celery import wake
from controlplane.discovery import SourceKind, canonical_settings, kind_named
from controlplane.encryption import encrypt
from controlplane.errors import ConflictError, InvalidError
from controlplane.models import Adoption, EventKind, Pool, ReplicaSource
from controlplane.models.fleet import SHORT_NAME
from controlplane.services.checks import address_of, check_destination, check_name, lock_row, name_conflict
from controlplane.services.events import record_event

LOOK = "controlplane.tasks.poll_sources"
LONGEST_SECRET = 16_384  # characters; a service account's token has about a thousand
RANGES: dict[str, tuple[float, float]] = {
    "interval_s": (5, 86_400),
    "deadline_s": (1, 60),
    "drain_after_s": (0, 604_800),
    "remove_after_s": (0, 2_592_000),
    "max_vanished_ratio": (0.01, 1),
    "max_targets": (1, 1000),
}
_SHOWN = ("name", "kind", "settings", "adoption", "enabled", *RANGES)


@transaction.atomic
def create_source(
    pool: Pool, *, name: str, kind: str, settings: dict[str, Any], secret: str = "", by: User | None = None, **how: Any
) -> ReplicaSource:
    """Add a source, which is looked at soon. ``how`` are ``adoption``, ``enabled`` and the keys of ``RANGES``.

    NameTakenError, InvalidError.
    """
    check_name(name, SHORT_NAME, "$.name")
    source = ReplicaSource(pool=pool, name=name, kind=kind_named(kind).name)
    _change(source, {"settings": settings, **how}, secret)
    try:
        with transaction.atomic():
            source.save()
    except IntegrityError:
        raise name_conflict("replica source", name, ReplicaSource.objects.filter(name=name), by) from None
    detail = {"after": facts(source)}
    summary = f"Replica source {name} was added to pool {pool.name}."
    record_event(EventKind.SOURCE_ADDED, summary, pool=pool, by=by, detail=detail)
    wake(LOOK)
    return source


@transaction.atomic
def update_source(
    source: ReplicaSource, *, secret: str | None = None, by: User | None = None, **changes: Any
) -> ReplicaSource:
    """Change what is given; a look that is under way does not count any more. Name, kind and pool stay.

    An empty ``secret`` forgets it. A secret is never sent to another server than it was given for: InvalidError.
    """
    source = lock_row(
        ReplicaSource.objects.select_for_update(of=("self",), no_key=True).select_related("pool"), source.pk
    )
    before = facts(source)
    server = _server(source)
    _change(source, changes, secret)
    if source.encrypted is not None and secret is None:
        check_destination("$.secret", "token", before=server, after=_server(source))
    if facts(source) == before and secret is None:
        return source
    if source.settings != before["settings"]:
        source.settings_changed_at = timezone.now()
    source.looks += 1
    source.next_look_at = timezone.now()
    source.save()
    detail = {"before": before, "after": facts(source)}
    summary = f"Replica source {source.name} was changed."
    record_event(EventKind.SOURCE_CHANGED, summary, pool=source.pool, by=by, detail=detail)
    wake(LOOK)
    return source


@transaction.atomic
def remove_source(source: ReplicaSource, *, by: User | None = None) -> None:
    """Forget a source and what it proposed. Replicas that it found stay as they are, and nobody follows them."""
    source = lock_row(ReplicaSource.objects.select_for_update(of=("self",)).select_related("pool"), source.pk)
    before = facts(source)
    source.delete()
    summary = f"Replica source {before['name']} was removed from pool {source.pool.name}; its replicas stay."
    record_event(EventKind.SOURCE_REMOVED, summary, pool=source.pool, by=by, detail={"before": before})


def request_poll(source: ReplicaSource) -> None:
    """Have a source looked at now; ConflictError while it is paused."""
    if not ReplicaSource.objects.filter(pk=source.pk, enabled=True).update(next_look_at=timezone.now()):
        raise ConflictError(f"Replica source {source.name} is paused; enable it first.")
    wake(LOOK)


def facts(source: ReplicaSource) -> dict[str, Any]:
    """What an event shows of a source; of its secret, only whether it has one."""
    shown = {name: getattr(source, name) for name in _SHOWN}
    return {**shown, "adoption": str(source.adoption), "has_secret": source.encrypted is not None}


def _change(source: ReplicaSource, changes: dict[str, Any], secret: str | None) -> None:
    kind = kind_named(source.kind)
    for name, value in changes.items():
        setattr(source, name, _checked(kind, name, value, source))
    if source.remove_after_s < source.drain_after_s:
        raise InvalidError("$.remove_after_s", "expected no less than drain_after_s: a replica drains before it goes")
    if secret is not None:
        source.encrypted = encrypt(_checked_secret(kind, secret).encode()) if secret else None


def _server(source: ReplicaSource) -> str:
    """Where its secret is sent: the server, and the authority that says which server has that name."""
    url, authority = source.settings.get("api_url", ""), source.settings.get("ca", "")
    return f"{address_of(url) if url else ''} {authority.strip()}"


def _checked(kind: SourceKind, name: str, value: Any, source: ReplicaSource) -> Any:
    """A new value, as it is kept."""
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
        raise TypeError(f"{source} has no {name} that can be changed")
    return bool(value)


def _checked_secret(kind: SourceKind, secret: str) -> str:
    """A secret as it is encrypted. No error quotes it."""
    if not kind.secret:
        raise InvalidError("$.secret", f"a source of kind {kind.name} has none")
    plain = secret.strip()
    if not plain.isascii() or not plain.isprintable() or " " in plain or len(plain) > LONGEST_SECRET:
        raise InvalidError("$.secret", f"expected one line of up to {LONGEST_SECRET} characters without blanks")
    return plain
