"""Pools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction

from controlplane.errors import InUseError, NameTakenError
from controlplane.models import EventKind, Pool, Project
from controlplane.models.names import SHORT_NAME

from .checks import check_name
from .events import record_event
from .policies import create_policy, first_revision
from .projects import default_project
from .snapshots import freeze_snapshot


@transaction.atomic
def create_pool(
    name: str,
    *,
    project: Project | None = None,
    models: Iterable[str] = (),
    description: str = "",
    by: User | None = None,
    strategy: str = "lowest_cost",
) -> Pool:
    """Create a pool with a policy of its own, live from the start with the strategy's defaults.

    ``models`` are the served names, none for any model; without a ``project`` it belongs to the one called
    ``default``. NameTakenError, InvalidError.
    """
    check_name(name, SHORT_NAME, "$.name")
    project = project or default_project()
    try:
        with transaction.atomic():
            pool = Pool.objects.create(project=project, name=name, models=sorted(set(models)), description=description)
    except IntegrityError:
        raise NameTakenError("pool", name) from None
    record_event(EventKind.POOL_CREATED, f"Pool {name} was created.", pool=pool, by=by, detail={"after": facts(pool)})
    first_revision(create_policy(pool), {"strategy": strategy}, by=by)
    freeze_snapshot(reason=f"pool {name} created", by=by)
    return pool


@transaction.atomic
def update_pool(
    pool: Pool, *, models: Iterable[str] | None = None, description: str | None = None, by: User | None = None
) -> Pool:
    """Change what is given; InvalidError when another pool already serves a model."""
    pool = Pool.objects.select_for_update(no_key=True).get(pk=pool.pk)
    before = facts(pool)
    if models is not None:
        pool.models = sorted(set(models))
    if description is not None:
        pool.description = description
    if facts(pool) == before:
        return pool
    pool.save()
    change = {"before": before, "after": facts(pool)}
    record_event(EventKind.POOL_CHANGED, f"Pool {pool.name} was changed.", pool=pool, by=by, detail=change)
    freeze_snapshot(reason=f"pool {pool.name} changed", by=by)
    return pool


@transaction.atomic
def remove_pool(pool: Pool, *, by: User | None = None) -> None:
    """Remove an empty pool with its policy; InUseError while it has replicas or task groups."""
    pool = Pool.objects.select_for_update().get(pk=pool.pk)
    if pool.replicas.exists() or pool.groups.exists():
        raise InUseError(f"Pool {pool.name} still has replicas or task groups; remove those first.")
    before = facts(pool)
    pool.delete()
    record_event(
        EventKind.POOL_REMOVED,
        f"Pool {pool.name} was removed.",
        project=pool.project,
        by=by,
        detail={"before": before},
    )
    freeze_snapshot(reason=f"pool {pool.name} removed", by=by)


def facts(pool: Pool) -> dict[str, Any]:
    """What an event shows of a pool before and after a change."""
    names = ("name", "models", "description")
    return {"project": pool.project.name, **{name: getattr(pool, name) for name in names}}
