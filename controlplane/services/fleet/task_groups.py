"""Task groups: requests with one purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction

from controlplane import schema_fields
from controlplane.errors import InvalidError, NameTakenError
from controlplane.models import ClientKey, EventKind, Pool, Replica, TaskGroup
from controlplane.models.fleet import SHORT_NAME
from controlplane.schema_fields import canonical, checked
from controlplane.services.checks import check_name, lock_row
from controlplane.services.events import record_event
from controlplane.services.fleet.served_models import relative_error_paths
from controlplane.services.snapshots import freeze_snapshot

FACTS = ("name", "owner", "description", *schema_fields.GROUP, "expected_tier1", "hit_rate_objective")


class GroupSettings(TypedDict, total=False):
    """What may be said of a task group. What is not given stays as it is; None takes a setting back."""

    owner: str
    description: str
    replicas: Iterable[Replica]  # none: all of the pool's
    match: Mapping[str, Any] | None  # and so on: parts of routing.schema.TaskGroupConfig
    tier1: Mapping[str, Any] | None
    auto_replicas: Mapping[str, Any] | None
    priority: int
    concurrency: Mapping[str, Any] | None
    caps: Mapping[str, Any] | None
    expected_tier1: str  # 16 hex digits; "": unsaid
    hit_rate_objective: float | None  # ratio, more than 0


@transaction.atomic
def create_task_group(pool: Pool, name: str, *, by: User | None = None, **settings: Unpack[GroupSettings]) -> TaskGroup:
    """Create a group, placed by the pool's policy until it has one of its own. InvalidError, NameTakenError."""
    check_name(name, SHORT_NAME, "$.name")
    chosen = _of_pool(pool, settings.pop("replicas", ()))
    group = TaskGroup(pool=pool, name=name, **_settings(settings))
    _check_keys(group)
    try:
        with transaction.atomic():
            group.save()
    except IntegrityError:
        raise NameTakenError("task group", name) from None
    group.replicas.set(chosen)
    summary = f"Task group {group} was created."
    record_event(EventKind.GROUP_CREATED, summary, pool=pool, by=by, detail={"after": facts(group)})
    with relative_error_paths():
        freeze_snapshot(reason=f"task group {group} created", by=by)
    return group


@transaction.atomic
def update_task_group(group: TaskGroup, *, by: User | None = None, **settings: Unpack[GroupSettings]) -> TaskGroup:
    """Change what is given; InvalidError."""
    group = lock_row(TaskGroup.objects.select_for_update(of=("self",), no_key=True).select_related("pool"), group.pk)
    before = facts(group)
    if "replicas" in settings:
        group.replicas.set(_of_pool(group.pool, settings.pop("replicas")))
    for name, value in _settings(settings).items():
        setattr(group, name, value)
    if group.match != before["match"]:
        _check_keys(group)
    group.save()
    after = facts(group)
    if after != before:
        change = {"before": before, "after": after}
        summary = f"Task group {group} was changed."
        record_event(EventKind.GROUP_CHANGED, summary, pool=group.pool, by=by, detail=change)
        with relative_error_paths():
            freeze_snapshot(reason=f"task group {group} changed", by=by)
    return group


@transaction.atomic
def remove_task_group(group: TaskGroup, *, by: User | None = None) -> None:
    """Remove a group with its policy; its requests become the pool's own. The snapshots keep what it once was."""
    group = lock_row(TaskGroup.objects.select_for_update(of=("self",)).select_related("pool"), group.pk)
    before, name, pool = facts(group), str(group), group.pool
    group.delete()
    record_event(
        EventKind.GROUP_REMOVED, f"Task group {name} was removed.", pool=pool, by=by, detail={"before": before}
    )
    freeze_snapshot(reason=f"task group {name} removed", by=by)


def facts(group: TaskGroup) -> dict[str, Any]:
    """What an event shows of a group before and after a change; a query."""
    replicas = sorted(group.replicas.values_list("name", flat=True))
    return {**{name: getattr(group, name) for name in FACTS}, "replicas": replicas}


def _settings(given: GroupSettings) -> dict[str, Any]:
    """Checked, and in an order that does not depend on who wrote them down."""
    values = checked(schema_fields.GROUP, given)
    if match := values.get("match"):
        values["match"] = (
            {field: sorted(set(claimed)) for field, claimed in match.items()} if any(match.values()) else None
        )
    if values.get("expected_tier1"):
        _check_hash(values["expected_tier1"])
    objective = values.get("hit_rate_objective")
    if objective is not None and not 0 < objective <= 1:
        raise InvalidError("$.hit_rate_objective", "expected a ratio: more than 0 and at most 1, such as 0.6")
    return values


def _check_hash(text: str) -> None:
    try:
        canonical(schema_fields.TIER1_HASHES, [text], "$.expected_tier1")
    except InvalidError:
        raise InvalidError("$.expected_tier1", "expected 16 hex digits, as decisions show a tier-1 prefix") from None


def _check_keys(group: TaskGroup) -> None:
    """InvalidError unless the client keys that it claims are of its pool's project, and work."""
    names: list[str] = (group.match or {}).get("api_keys", [])
    known = ClientKey.objects.filter(project=group.pool.project_id, revoked_at=None, name__in=names)
    known_names = set(known.values_list("name", flat=True)) if names else set()
    for position, name in enumerate(names):
        if name not in known_names:
            raise InvalidError(f"$.match.api_keys[{position}]", f"the pool's project has no client key {name!r}")


def _of_pool(pool: Pool, replicas: Iterable[Replica]) -> list[Replica]:
    chosen = list(replicas)
    for position, replica in enumerate(chosen):
        if replica.pool_id != pool.pk:
            raise InvalidError(f"$.replicas[{position}]", f"replica {replica.name} is not in pool {pool.name}")
    return chosen
