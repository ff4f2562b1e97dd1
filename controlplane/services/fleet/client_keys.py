"""Keys of clients: made, narrowed and revoked. Their texts are shown once; routers compare digests."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.utils import timezone

from controlplane import schema_fields
from controlplane.errors import ConflictError, InvalidError, NameTakenError
from controlplane.models import ClientKey, EventKind, Project, TaskGroup
from controlplane.models.fleet import SHORT_NAME
from controlplane.push.snapshot import api_key, names_of
from controlplane.schema_fields import checked
from controlplane.services.checks import check_name, lock_row
from controlplane.services.events import record_event
from controlplane.services.snapshots import freeze_snapshot
from routing.schema import Access, ConfigError, check_access

FACTS = ("name", "hint", *schema_fields.CLIENT_KEY)
PREFIX = "wpk_"  # so that a key that leaked is known for what it is


class KeySettings(TypedDict, total=False):
    """What a key is good for. What is not given stays as it is."""

    models: Sequence[str] | None  # None: all of its project's
    groups: Sequence[str] | None  # the first is of requests that name none; None: all
    tenant: str  # "": none
    requests_per_s: float | None
    burst: int | None
    tokens_per_min: int | None
    expires_at: datetime | None  # None: it does not end by itself


@transaction.atomic
def create_client_key(
    project: Project, name: str, *, by: User | None = None, **settings: Unpack[KeySettings]
) -> tuple[ClientKey, str]:
    """A key, and its text, which is never to be had again. NameTakenError, InvalidError."""
    check_name(name, SHORT_NAME, "$.name")
    text = PREFIX + secrets.token_urlsafe(32)
    digest = hashlib.sha256(text.encode()).hexdigest()
    key = ClientKey(project=project, name=name, hint=text[:8], digest=digest, created_by=by, **_settings(settings))
    _check(key)
    try:
        with transaction.atomic():
            key.save()
    except IntegrityError:
        raise NameTakenError("client key", name) from None
    summary = f"Client key {key} was created in project {project.name}."
    record_event(EventKind.CLIENT_KEY_CREATED, summary, project=project, by=by, detail={"after": facts(key)})
    freeze_snapshot(reason=f"client key {key.full_name} created", by=by)
    return key, text


@transaction.atomic
def update_client_key(key: ClientKey, *, by: User | None = None, **settings: Unpack[KeySettings]) -> ClientKey:
    """Change what a key is good for; its text stays. ConflictError for a revoked one, InvalidError."""
    key = _locked(key)
    before = facts(key)
    for name, value in _settings(settings, key.expires_at).items():
        setattr(key, name, value)
    if facts(key) == before:
        return key
    _check(key)
    key.save()
    detail = {"before": before, "after": facts(key)}
    record_event(
        EventKind.CLIENT_KEY_CHANGED, f"Client key {key} was changed.", project=key.project, by=by, detail=detail
    )
    freeze_snapshot(reason=f"client key {key.full_name} changed", by=by)
    return key


@transaction.atomic
def revoke_client_key(key: ClientKey, *, by: User | None = None) -> None:
    """Let a key in no more, as soon as routers know; ConflictError if it was revoked before."""
    key = _locked(key)
    key.revoked_at = timezone.now()
    key.save()
    detail = {"before": facts(key)}
    record_event(
        EventKind.CLIENT_KEY_REVOKED, f"Client key {key} was revoked.", project=key.project, by=by, detail=detail
    )
    freeze_snapshot(reason=f"client key {key.full_name} revoked", by=by)


def facts(key: ClientKey) -> dict[str, Any]:
    """What an event shows of a key; never its digest."""
    ends = key.expires_at.isoformat() if key.expires_at else None
    return {"project": key.project.name, **{name: getattr(key, name) for name in FACTS}, "expires_at": ends}


def _locked(key: ClientKey) -> ClientKey:
    row = lock_row(ClientKey.objects.select_for_update(of=("self",)).select_related("project"), key.pk)
    if row.revoked_at is not None:
        raise ConflictError(f"Client key {row} was revoked; make a new one.")
    return row


def _settings(given: KeySettings, ended: datetime | None = None) -> dict[str, Any]:
    """Checked; ``ended`` is the end that the key has already, which may be past."""
    values = checked(schema_fields.CLIENT_KEY, {**given, "tenant": given.get("tenant") or None})
    if "tenant" in given:
        values["tenant"] = values["tenant"] or ""
        if values["tenant"]:
            check_name(values["tenant"], SHORT_NAME, "$.tenant")
    else:
        del values["tenant"]
    if (ends := values.get("expires_at")) is not None:
        values["expires_at"] = ends.replace(microsecond=0)  # routers count in seconds
        if values["expires_at"] != ended and ends <= timezone.now():
            raise InvalidError("$.expires_at", "That is past. Revoke the key to end it now.")
    if values.get("models"):
        values["models"] = sorted(set(values["models"]))
    return values


def _check(key: ClientKey) -> None:
    """InvalidError unless all that the key names is of its project: the routers' own rule, asked of that alone."""
    groups = set(TaskGroup.objects.filter(pool__project=key.project).values_list("name", flat=True))
    try:
        check_access(Access((api_key(key),)), groups, names_of(key.project.pools.all()))
    except ConfigError as error:
        reason = error.reason.replace("no pool has", f"no pool of project {key.project.name} has")
        raise InvalidError(error.path.replace("$.access.keys[0]", "$"), reason) from None
