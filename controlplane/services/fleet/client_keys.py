"""Create, change and revoke client keys. A key is shown once, when it is created; routers compare digests."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from controlplane import schema_fields
from controlplane.errors import ConflictError, InvalidError, NameTakenError
from controlplane.models import ClientKey, EventKind, Project, TaskGroup
from controlplane.models.fleet import SHORT_NAME
from controlplane.push.snapshot import api_key, model_names
from controlplane.schema_fields import canonical_fields
from controlplane.services.checks import check_name, lock_row, unique_or
from controlplane.services.events import record_event
from controlplane.services.snapshots import freeze_snapshot
from routing.schema import Access, ConfigError, check_access

_FIELDS = ("name", "hint", *schema_fields.CLIENT_KEY)
PREFIX = "wpk_"  # identifies a leaked key


class KeySettings(TypedDict, total=False):
    """Settings of a key. Omitted: unchanged."""

    models: Sequence[str] | None  # None: all of the project
    groups: Sequence[str] | None  # the first is the default; None: all
    tenant: str  # "": none
    requests_per_s: float | None
    burst: int | None
    tokens_per_min: int | None
    queue_weight: float
    expires_at: datetime | None  # None: never


@transaction.atomic
def create_client_key(
    project: Project, name: str, *, by: User | None = None, **settings: Unpack[KeySettings]
) -> tuple[ClientKey, str]:
    """A key, and its text, which is not stored. NameTakenError, InvalidError."""
    check_name(name, SHORT_NAME, "$.name")
    text = PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(text.encode()).hexdigest()
    key = ClientKey(project=project, name=name, hint=text[:8], digest=digest, created_by=by, **_checked(settings))
    _check_names(key)
    with unique_or(lambda _: NameTakenError("client key", name)):
        key.save()
    summary = f"Client key {key} was created in project {project.name}."
    _record(EventKind.CLIENT_KEY_CREATED, key, summary, "created", {"after": _event_fields(key)}, by)
    return key, text


@transaction.atomic
def update_client_key(key: ClientKey, *, by: User | None = None, **settings: Unpack[KeySettings]) -> ClientKey:
    """Change a key's permissions and limits; its text stays. ConflictError for a revoked key, InvalidError."""
    key = _lock(key)
    before = _event_fields(key)
    for name, value in _checked(settings, key.expires_at).items():
        setattr(key, name, value)
    if _event_fields(key) == before:
        return key
    _check_names(key)
    key.save()
    detail = {"before": before, "after": _event_fields(key)}
    _record(EventKind.CLIENT_KEY_CHANGED, key, f"Client key {key} was changed.", "changed", detail, by)
    return key


@transaction.atomic
def revoke_client_key(key: ClientKey, *, by: User | None = None) -> None:
    """Revoke a key; ConflictError if it is revoked already."""
    key = _lock(key)
    key.revoked_at = timezone.now()
    key.save()
    summary = f"Client key {key} was revoked."
    _record(EventKind.CLIENT_KEY_REVOKED, key, summary, "revoked", {"before": _event_fields(key)}, by)


def _record(
    kind: EventKind, key: ClientKey, summary: str, action: str, detail: dict[str, Any], by: User | None
) -> None:
    record_event(kind, summary, project=key.project, by=by, detail=detail)
    freeze_snapshot(reason=f"client key {key.full_name} {action}", by=by)


def _event_fields(key: ClientKey) -> dict[str, Any]:
    """The part of a key that events show, without its digest."""
    expires_at = key.expires_at.isoformat() if key.expires_at else None
    return {"project": key.project.name, **{name: getattr(key, name) for name in _FIELDS}, "expires_at": expires_at}


def _lock(key: ClientKey) -> ClientKey:
    row = lock_row(ClientKey.objects.select_for_update(of=("self",)).select_related("project"), key.pk)
    if row.revoked_at is not None:
        raise ConflictError(f"Client key {row} is revoked; create a new one.")
    return row


def _checked(settings: KeySettings, current_expiry: datetime | None = None) -> dict[str, Any]:
    """Validated settings. The current expiry is accepted although it may be in the past."""
    values = canonical_fields(schema_fields.CLIENT_KEY, {**settings, "tenant": settings.get("tenant") or None})
    values["tenant"] = values["tenant"] or ""
    if values["tenant"]:
        check_name(values["tenant"], SHORT_NAME, "$.tenant")
    if "tenant" not in settings:
        del values["tenant"]
    if (expiry := values.get("expires_at")) is not None:
        values["expires_at"] = expiry.replace(microsecond=0)  # routers count in seconds
        if values["expires_at"] != current_expiry and expiry <= timezone.now():
            raise InvalidError("$.expires_at", "expected a time in the future; revoke the key to end it now")
    if values.get("models"):
        values["models"] = sorted(set(values["models"]))
    return values


def _check_names(key: ClientKey) -> None:
    """InvalidError unless its models and task groups belong to its project, by the routers' own check."""
    groups = set(TaskGroup.objects.filter(pool__project=key.project).values_list("name", flat=True))
    try:
        check_access(Access((api_key(key),)), groups, model_names(key.project.pools.all()))
    except ConfigError as error:
        reason = error.reason.replace("no pool has", f"no pool of project {key.project.name} has")
        raise InvalidError(error.path.replace("$.access.keys[0]", "$"), reason) from None
