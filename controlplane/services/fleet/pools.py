"""Pools.

What holds for all routers: who is let in, and what they accept and wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict, Unpack

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction

from controlplane import schema_fields
from controlplane.errors import InUseError
from controlplane.models import EventKind, FleetSettings, Pool, Project
from controlplane.models.fleet import SHORT_NAME
from controlplane.schema_fields import checked
from controlplane.services.access.projects import default_project
from controlplane.services.checks import check_name, hold, taken
from controlplane.services.events import record_event
from controlplane.services.fleet.served_models import told_of_models
from controlplane.services.policies.lifecycle import create_policy, first_revision
from controlplane.services.snapshots import freeze_snapshot

LISTS: tuple[Literal["models", "aliases", "adapters"], ...] = ("models", "aliases", "adapters")
FACTS = ("name", "description", *schema_fields.POOL)


class PoolSettings(TypedDict, total=False):
    """What may be said of a pool. What is not given stays as it is; None takes a setting back to the routers' own."""

    models: Iterable[str]  # served names, none for any model
    aliases: Iterable[Mapping[str, Any]]  # routing.schema.Alias each
    adapters: Iterable[Mapping[str, Any]]  # routing.schema.Adapter each
    description: str
    health: Mapping[str, Any] | None  # and so on: parts of routing.schema.PoolConfig
    breaker: Mapping[str, Any] | None
    caps: Mapping[str, Any] | None
    concurrency: Mapping[str, Any] | None
    tier1: Mapping[str, Any] | None
    share_half_life: int | None
    stream_usage: str | None  # a routing.schema.StreamUsage
    warm_up: Mapping[str, Any] | None


@transaction.atomic
def create_pool(
    name: str,
    *,
    project: Project | None = None,
    by: User | None = None,
    strategy: str = "lowest_cost",
    **settings: Unpack[PoolSettings],
) -> Pool:
    """Create a pool with a policy of its own, live from the start with the strategy's defaults.

    Without a ``project`` it belongs to the one called ``default``. NameTakenError, InvalidError.
    """
    check_name(name, SHORT_NAME, "$.name")
    pool = Pool(project=project or default_project(), name=name, **_settings(settings))
    try:
        with transaction.atomic():
            pool.save()
    except IntegrityError:
        raise taken("pool", name, Pool.objects.filter(name=name), by) from None
    record_event(EventKind.POOL_CREATED, f"Pool {name} was created.", pool=pool, by=by, detail={"after": facts(pool)})
    first_revision(create_policy(pool), {"strategy": strategy}, by=by)
    with told_of_models(pool, by):
        freeze_snapshot(reason=f"pool {name} created", by=by)
    return pool


@transaction.atomic
def update_pool(pool: Pool, *, by: User | None = None, **settings: Unpack[PoolSettings]) -> Pool:
    """Change what is given; InvalidError when another pool already serves a model, or what goes is still used."""
    pool = hold(Pool.objects.select_for_update(no_key=True), pool.pk)
    before = facts(pool)
    for name, value in _settings(settings).items():
        setattr(pool, name, value)
    if facts(pool) == before:
        return pool
    pool.save()
    change = {"before": before, "after": facts(pool)}
    record_event(EventKind.POOL_CHANGED, f"Pool {pool.name} was changed.", pool=pool, by=by, detail=change)
    with told_of_models(pool, by):
        freeze_snapshot(reason=f"pool {pool.name} changed", by=by)
    return pool


@transaction.atomic
def remove_pool(pool: Pool, *, by: User | None = None) -> None:
    """Remove an empty pool with its policy; InUseError while it has replicas, replica sources or task groups."""
    pool = hold(Pool.objects.select_for_update(), pool.pk)
    if pool.replicas.exists() or pool.sources.exists() or pool.groups.exists():
        raise InUseError(f"Pool {pool.name} still has replicas, replica sources or task groups; remove those first.")
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
    return {"project": pool.project.name, **{name: getattr(pool, name) for name in FACTS}}


def _listed(value: Any) -> Any:
    """A list of what can be one; what cannot is left to the check, which says where it stands."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | dict) else value


def _settings(given: PoolSettings) -> dict[str, Any]:
    """Checked, and in an order that does not depend on who wrote them down."""
    listed: dict[str, Any] = {name: _listed(given[name]) for name in LISTS if name in given}
    values: dict[str, Any] = checked(schema_fields.POOL, {**given, **listed})
    if "models" in values:
        values["models"] = sorted(set(values["models"]))
    for name in ("aliases", "adapters"):
        if name in values:
            values[name] = sorted(values[name], key=lambda one: (one["name"], one["model"]))
    return values


SETTINGS_FACTS = ("needs_key", "limits")


class Settings(TypedDict, total=False):
    """What may be said of the fleet. What is not given stays as it is."""

    needs_key: bool  # whether only clients with a key are let in
    limits: Mapping[str, Any] | None  # routing.schema.Limits; None: the routers' own


def fleet_settings() -> FleetSettings:
    """What was said; the defaults where nothing was. A query."""
    return FleetSettings.objects.get_or_create(pk=1)[0]


@transaction.atomic
def update_fleet_settings(*, by: User | None = None, **settings: Unpack[Settings]) -> FleetSettings:
    """Change what is given; InvalidError for limits that routers would refuse."""
    values = checked(schema_fields.FLEET, settings)
    row = FleetSettings.objects.select_for_update().get(pk=fleet_settings().pk)
    before = settings_facts(row)
    for name, value in values.items():
        setattr(row, name, value)
    if settings_facts(row) == before:
        return row
    row.save()
    summary = "Limits of the routers were changed." if row.needs_key == before["needs_key"] else _admitting(row)
    record_event(EventKind.FLEET_CHANGED, summary, by=by, detail={"before": before, "after": settings_facts(row)})
    freeze_snapshot(reason=summary.rstrip("."), by=by)
    return row


def settings_facts(row: FleetSettings) -> dict[str, Any]:
    """What an event shows of the fleet's settings before and after a change."""
    return {name: getattr(row, name) for name in SETTINGS_FACTS}


def _admitting(row: FleetSettings) -> str:
    return "Only clients with a key are let in." if row.needs_key else "Clients are let in without a key."
