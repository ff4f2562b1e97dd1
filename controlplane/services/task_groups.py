"""Task groups: requests with one purpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction

from controlplane.errors import InvalidError, NameTakenError
from controlplane.models import EventKind, Pool, Replica, TaskGroup
from controlplane.models.names import SHORT_NAME

from .checks import check_name
from .events import record_event
from .snapshots import freeze_snapshot


@transaction.atomic
def create_task_group(
    pool: Pool,
    name: str,
    *,
    owner: str = "",
    description: str = "",
    replicas: Iterable[Replica] = (),
    by: User | None = None,
) -> TaskGroup:
    """Create a group, placed by the pool's policy until it has one of its own. No ``replicas``: all of the pool's."""
    check_name(name, SHORT_NAME, "$.name")
    chosen = _of_pool(pool, replicas)
    try:
        with transaction.atomic():
            group = TaskGroup.objects.create(pool=pool, name=name, owner=owner, description=description)
    except IntegrityError:
        raise NameTakenError("task group", name) from None
    group.replicas.set(chosen)
    summary = f"Task group {group} was created."
    record_event(EventKind.GROUP_CREATED, summary, pool=pool, by=by, detail={"after": facts(group)})
    freeze_snapshot(reason=f"task group {group} created", by=by)
    return group


@transaction.atomic
def update_task_group(
    group: TaskGroup,
    *,
    owner: str | None = None,
    description: str | None = None,
    replicas: Iterable[Replica] | None = None,
    by: User | None = None,
) -> TaskGroup:
    """Change what is given; an empty ``replicas`` means all of the pool's."""
    group = TaskGroup.objects.select_for_update(of=("self",), no_key=True).select_related("pool").get(pk=group.pk)
    before = facts(group)
    if owner is not None:
        group.owner = owner
    if description is not None:
        group.description = description
    if replicas is not None:
        group.replicas.set(_of_pool(group.pool, replicas))
    group.save()
    after = facts(group)
    if after != before:
        change = {"before": before, "after": after}
        summary = f"Task group {group} was changed."
        record_event(EventKind.GROUP_CHANGED, summary, pool=group.pool, by=by, detail=change)
        freeze_snapshot(reason=f"task group {group} changed", by=by)
    return group


@transaction.atomic
def remove_task_group(group: TaskGroup, *, by: User | None = None) -> None:
    """Remove a group with its policy; its requests become the pool's own. The snapshots keep what it once was."""
    group = TaskGroup.objects.select_for_update(of=("self",)).select_related("pool").get(pk=group.pk)
    before, name, pool = facts(group), str(group), group.pool
    group.delete()
    record_event(
        EventKind.GROUP_REMOVED, f"Task group {name} was removed.", pool=pool, by=by, detail={"before": before}
    )
    freeze_snapshot(reason=f"task group {name} removed", by=by)


def facts(group: TaskGroup) -> dict[str, Any]:
    """What an event shows of a group before and after a change; a query."""
    replicas = sorted(group.replicas.values_list("name", flat=True))
    return {"name": group.name, "owner": group.owner, "description": group.description, "replicas": replicas}


def _of_pool(pool: Pool, replicas: Iterable[Replica]) -> list[Replica]:
    chosen = list(replicas)
    for position, replica in enumerate(chosen):
        if replica.pool_id != pool.pk:
            raise InvalidError(f"$.replicas[{position}]", f"replica {replica.name} is not in pool {pool.name}")
    return chosen
