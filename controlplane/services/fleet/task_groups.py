"""Create, change and remove task groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack

from django.contrib.auth.models import User
from django.db import transaction

from controlplane import schema_fields
from controlplane.errors import InvalidError, NameTakenError
from controlplane.models import ClientKey, EventKind, Pool, Replica, TaskGroup
from controlplane.models.fleet import SHORT_NAME
from controlplane.schema_fields import canonical, canonical_fields
from controlplane.services.checks import check_name, lock_row, unique_or
from controlplane.services.events import record_event
from controlplane.services.fleet.served_models import relative_error_paths
from controlplane.services.snapshots import freeze_snapshot

_FIELDS = ("name", "owner", "description", *schema_fields.GROUP, "expected_tier1", "hit_rate_objective")


class GroupSettings(TypedDict, total=False):
    """Settings of a task group. Omitted: unchanged; None: the default."""

    owner: str
    description: str
    replicas: Iterable[Replica]  # empty: all of the pool
    match: Mapping[str, Any] | None  # this and the following: fields of routing.schema.TaskGroupConfig
    tier1: Mapping[str, Any] | None
    auto_replicas: Mapping[str, Any] | None
    priority: int
    concurrency: Mapping[str, Any] | None
    caps: Mapping[str, Any] | None
    response_cache: Mapping[str, Any] | None
    expected_tier1: str  # 16 hex digits; "": none
    hit_rate_objective: float | None  # ratio, more than 0


@transaction.atomic
def create_task_group(pool: Pool, name: str, *, by: User | None = None, **settings: Unpack[GroupSettings]) -> TaskGroup:
    """Create a group, placed by the pool's policy until it has its own. InvalidError, NameTakenError."""
    check_name(name, SHORT_NAME, "$.name")
    replicas = _check_replicas(pool, settings.pop("replicas", ()))
    group = TaskGroup(pool=pool, name=name, **_checked(settings))
    _check_keys(group)
    with unique_or(lambda _: NameTakenError("task group", name)):
        group.save()
    group.replicas.set(replicas)
    summary = f"Task group {group} was created."
    record_event(EventKind.GROUP_CREATED, summary, pool=pool, by=by, detail={"after": _event_fields(group)})
    with relative_error_paths():
        freeze_snapshot(reason=f"task group {group} created", by=by)
    return group


@transaction.atomic
def update_task_group(group: TaskGroup, *, by: User | None = None, **settings: Unpack[GroupSettings]) -> TaskGroup:
    """Change a group; InvalidError."""
    group = lock_row(TaskGroup.objects.select_for_update(of=("self",), no_key=True).select_related("pool"), group.pk)
    before = _event_fields(group)
    if "replicas" in settings:
        group.replicas.set(_check_replicas(group.pool, settings.pop("replicas")))
    for name, value in _checked(settings).items():
        setattr(group, name, value)
    if group.match != before["match"]:
        _check_keys(group)
    group.save()
    after = _event_fields(group)
    if after != before:
        change = {"before": before, "after": after}
        summary = f"Task group {group} was changed."
        record_event(EventKind.GROUP_CHANGED, summary, pool=group.pool, by=by, detail=change)
        with relative_error_paths():
            freeze_snapshot(reason=f"task group {group} changed", by=by)
    return group


@transaction.atomic
def remove_task_group(group: TaskGroup, *, by: User | None = None) -> None:
    """Remove a group with its policy; its requests become the pool's own."""
    group = lock_row(TaskGroup.objects.select_for_update(of=("self",)).select_related("pool"), group.pk)
    detail, name, pool = {"before": _event_fields(group)}, str(group), group.pool
    group.delete()
    record_event(EventKind.GROUP_REMOVED, f"Task group {name} was removed.", pool=pool, by=by, detail=detail)
    freeze_snapshot(reason=f"task group {name} removed", by=by)


def _event_fields(group: TaskGroup) -> dict[str, Any]:
    """The part of a group that events show; a query."""
    replicas = sorted(group.replicas.values_list("name", flat=True))
    return {**{name: getattr(group, name) for name in _FIELDS}, "replicas": replicas}


def _checked(settings: GroupSettings) -> dict[str, Any]:
    """Validated settings in a canonical order."""
    values = canonical_fields(schema_fields.GROUP, settings)
    if match := values.get("match"):
        names = {field: sorted(set(members)) for field, members in match.items()}
        values["match"] = names if any(names.values()) else None
    if prefix_hash := values.get("expected_tier1"):
        try:
            canonical(schema_fields.TIER1_HASHES, [prefix_hash], "$.expected_tier1")
        except InvalidError:
            reason = "expected 16 hex digits, as shown for the tier-1 prefix of a request"
            raise InvalidError("$.expected_tier1", reason) from None
    objective = values.get("hit_rate_objective")
    if objective is not None and not 0 < objective <= 1:
        raise InvalidError("$.hit_rate_objective", "expected a ratio: more than 0 and at most 1, such as 0.6")
    return values


def _check_keys(group: TaskGroup) -> None:
    """InvalidError unless the client keys that it matches belong to its pool's project and are not revoked."""
    names: list[str] = (group.match or {}).get("api_keys", [])
    keys = ClientKey.objects.filter(project=group.pool.project_id, revoked_at=None, name__in=names)
    existing = set(keys.values_list("name", flat=True)) if names else set()
    for position, name in enumerate(names):
        if name not in existing:
            raise InvalidError(f"$.match.api_keys[{position}]", f"the pool's project has no client key {name!r}")


def _check_replicas(pool: Pool, replicas: Iterable[Replica]) -> list[Replica]:
    replicas = list(replicas)
    for position, replica in enumerate(replicas):
        if replica.pool_id != pool.pk:
            raise InvalidError(f"$.replicas[{position}]", f"replica {replica.name} is not in pool {pool.name}")
    return replicas
