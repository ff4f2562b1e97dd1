"""Projects, their pools, and the settings that apply to all pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack

from django.contrib.auth.models import User
from django.db import transaction

from controlplane import schema_fields
from controlplane.access.actor import roles_of
from controlplane.errors import InUseError, InvalidError, NameTakenError, RoleNeededError
from controlplane.kv_cache import Costs, KvCache, kv_bytes, size_relevant_keys
from controlplane.models import EventKind, FleetSettings, Pool, Project, Role
from controlplane.models.fleet import SHORT_NAME
from controlplane.schema_fields import canonical_fields
from controlplane.services.checks import change_fields, check_name, lock_row, name_conflict, unique_or
from controlplane.services.events import record_event
from controlplane.services.fleet.served_models import name_conflicting_model
from controlplane.services.policies.lifecycle import create_first_policy
from controlplane.services.policies.publish_checks import PredictionPolicy
from controlplane.services.snapshots import freeze_snapshot
from routing import schema

_LISTS = ("models", "aliases", "adapters", "session_keys", "paths", "allowed_origins")
POOL_SETTINGS: Mapping[str, Any] = {  # types by column
    **schema_fields.POOL,
    "kv_cache": KvCache | None,  # this and the following are not sent to routers
    "costs": Costs | None,
    "what_if": PredictionPolicy,
}
_POOL_FIELDS = ("name", "description", *POOL_SETTINGS)


def default_project() -> Project:
    """The project of pools that name none."""
    return Project.objects.get_or_create(name="default")[0]


@transaction.atomic
def create_project(
    name: str, *, description: str = "", needs_approval: bool = False, by: User | None = None
) -> Project:
    """Create a project. Until roles are assigned only admins of all projects see it. NameTakenError, InvalidError."""
    check_name(name, SHORT_NAME, "$.name")
    with unique_or(lambda _: NameTakenError("project", name)):
        project = Project.objects.create(name=name, description=description, needs_approval=needs_approval)
    record_event(EventKind.PROJECT_CREATED, f"Project {name} was created.", project=project, by=by)
    return project


@transaction.atomic
def update_project(
    project: Project, *, description: str | None = None, needs_approval: bool | None = None, by: User | None = None
) -> Project:
    """Change the arguments that are not None. ``needs_approval`` applies to publications from now on."""
    project = lock_row(Project.objects.select_for_update(no_key=True), project.pk)
    settings = {"description": description, "needs_approval": needs_approval}
    if change := change_fields(project, {k: v for k, v in settings.items() if v is not None}, _project_event_fields):
        summary = f"Project {project.name} was changed."
        record_event(EventKind.PROJECT_CHANGED, summary, project=project, by=by, detail=change)
    return project


@transaction.atomic
def remove_project(project: Project, *, by: User | None = None) -> None:
    """Remove a project and all roles in it; InUseError while it has pools."""
    project = lock_row(Project.objects.select_for_update(), project.pk)
    if project.pools.exists():
        raise InUseError(f"Project {project.name} still has pools; remove those first.")
    record_event(EventKind.PROJECT_REMOVED, f"Project {project.name} was removed.", project=project, by=by)
    project.delete()


def _project_event_fields(project: Project) -> dict[str, Any]:
    return {name: getattr(project, name) for name in ("name", "description", "needs_approval")}


class PoolSettings(TypedDict, total=False):
    """Settings of a pool. Omitted: unchanged; None: the routers' default."""

    models: Iterable[str]  # served names; empty: any model
    aliases: Iterable[Mapping[str, Any]]  # routing.schema.Alias
    adapters: Iterable[Mapping[str, Any]]  # routing.schema.Adapter
    description: str
    adapter_replicas: int | None  # this and the following: fields of routing.schema.PoolConfig
    health: Mapping[str, Any] | None
    breaker: Mapping[str, Any] | None
    caps: Mapping[str, Any] | None
    concurrency: Mapping[str, Any] | None
    tier1: Mapping[str, Any] | None
    stream_usage: str | None  # a routing.schema.StreamUsage
    on_stream_failure: str | None  # a routing.schema.StreamFailure
    keep_alive_s: float | None
    warm_up: Mapping[str, Any] | None
    session_keys: Iterable[str] | None  # None: routing.schema.DEFAULT_SESSION_KEYS; empty: no sessions
    paths: Iterable[str] | None  # routing.schema.DataPath; None: all
    disaggregation: Mapping[str, Any] | None
    allowed_origins: Iterable[str]  # routing.schema.Origin; empty: none
    kv_cache: Mapping[str, Any] | None  # controlplane.kv_cache.KvCache; None: unknown
    costs: Mapping[str, Any] | None  # controlplane.kv_cache.Costs; None: unknown
    what_if: Mapping[str, Any] | None  # PredictionPolicy; not sent to routers


@transaction.atomic
def create_pool(
    name: str,
    *,
    project: Project | None = None,
    by: User | None = None,
    strategy: str = "lowest_cost",
    **settings: Unpack[PoolSettings],
) -> Pool:
    """Create a pool with an active policy: the strategy's defaults. Without ``project`` it belongs to ``default``.

    NameTakenError, InvalidError.
    """
    check_name(name, SHORT_NAME, "$.name")
    pool = Pool(project=project or default_project(), name=name, **_checked(settings))
    with unique_or(lambda _: name_conflict("pool", name, Pool.objects.filter(name=name), by)):
        pool.save()
    detail = {"after": _pool_event_fields(pool)}
    record_event(EventKind.POOL_CREATED, f"Pool {name} was created.", pool=pool, by=by, detail=detail)
    create_first_policy(pool, {"strategy": strategy}, by=by)
    with name_conflicting_model(pool, by):
        freeze_snapshot(reason=f"pool {name} created", by=by)
    return pool


@transaction.atomic
def update_pool(pool: Pool, *, by: User | None = None, **settings: Unpack[PoolSettings]) -> Pool:
    """Change a pool; InvalidError if another pool serves one of its models, or a removed name is still used.

    RoleNeededError if ``what_if`` changes and the user may not publish: it decides what may be published.
    """
    pool = lock_row(Pool.objects.select_for_update(no_key=True), pool.pk)
    values = _checked(settings)
    if by is not None and values.get("what_if", pool.what_if) != pool.what_if:
        _check_may_publish(by, pool)
    if change := change_fields(pool, values, _pool_event_fields):
        record_event(EventKind.POOL_CHANGED, f"Pool {pool.name} was changed.", pool=pool, by=by, detail=change)
        with name_conflicting_model(pool, by):
            freeze_snapshot(reason=f"pool {pool.name} changed", by=by)
    return pool


def _check_may_publish(by: User, pool: Pool) -> None:
    if not roles_of(by).may(Role.APPROVER, pool.project_id):
        raise RoleNeededError(
            f"what_if decides which drafts of pool {pool.name} may be published; to change it you need the role "
            f"{Role.APPROVER.label.lower()} in its project."
        )


@transaction.atomic
def remove_pool(pool: Pool, *, by: User | None = None) -> None:
    """Remove an empty pool with its policy; InUseError while it has replicas, replica sources or task groups."""
    pool = lock_row(Pool.objects.select_for_update(), pool.pk)
    if pool.replicas.exists() or pool.sources.exists() or pool.groups.exists():
        raise InUseError(f"Pool {pool.name} still has replicas, replica sources or task groups; remove those first.")
    detail = {"before": _pool_event_fields(pool)}
    pool.delete()
    summary = f"Pool {pool.name} was removed."
    record_event(EventKind.POOL_REMOVED, summary, project=pool.project, by=by, detail=detail)
    freeze_snapshot(reason=f"pool {pool.name} removed", by=by)


def _pool_event_fields(pool: Pool) -> dict[str, Any]:
    return {"project": pool.project.name, **{name: getattr(pool, name) for name in _POOL_FIELDS}}


def _checked(settings: PoolSettings) -> dict[str, Any]:
    """Validated settings in a canonical order."""
    raw: dict[str, Any] = dict(settings)
    for name in _LISTS:
        if isinstance(raw.get(name), Iterable) and not isinstance(raw[name], str | dict):
            raw[name] = list(raw[name])
    values = canonical_fields(POOL_SETTINGS, raw)
    if (kv_cache := values.get("kv_cache")) is not None:
        if kv_cache["model_config"] is not None:
            kv_cache["model_config"] = size_relevant_keys(kv_cache["model_config"])
        kv_bytes(kv_cache)  # InvalidError if no size follows from it
    _check_requests(values)
    if "models" in values:
        values["models"] = sorted(set(values["models"]))
    for name in ("aliases", "adapters"):
        if name in values:
            values[name] = sorted(values[name], key=lambda entry: (entry["name"], entry["model"]))
    return values


def _check_requests(values: dict[str, Any]) -> None:
    """Check session keys, paths and origins, and sort paths and origins; InvalidError."""
    try:
        schema.check_session_keys(values.get("session_keys") or (), "$.session_keys")
        if values.get("paths") is not None:
            schema.check_paths(values["paths"], "$.paths")
            values["paths"] = sorted(set(values["paths"]))
        if "allowed_origins" in values:
            schema.check_origins(values["allowed_origins"], "$.allowed_origins")
            values["allowed_origins"] = sorted(values["allowed_origins"])
    except schema.ConfigError as error:
        raise InvalidError(error.path, error.reason) from None


class FleetWideSettings(TypedDict, total=False):
    """Settings of the whole fleet. Omitted: unchanged."""

    needs_key: bool  # accept only requests with a client key
    limits: Mapping[str, Any] | None  # routing.schema.Limits; None: the routers' default


def fleet_settings() -> FleetSettings:
    """The fleet settings, created with defaults on first use. A query."""
    return FleetSettings.objects.get_or_create(pk=1)[0]


@transaction.atomic
def update_fleet_settings(*, by: User | None = None, **settings: Unpack[FleetWideSettings]) -> FleetSettings:
    """Change the fleet settings; InvalidError for limits that routers would reject."""
    row = FleetSettings.objects.select_for_update().get(pk=fleet_settings().pk)
    needed_key = row.needs_key
    if change := change_fields(row, canonical_fields(schema_fields.FLEET, settings), _fleet_event_fields):
        summary = "The routers' limits were changed."
        if row.needs_key != needed_key:
            summary = "Requests now need a client key." if row.needs_key else "Requests no longer need a client key."
        record_event(EventKind.FLEET_CHANGED, summary, by=by, detail=change)
        freeze_snapshot(reason=summary.rstrip("."), by=by)
    return row


def _fleet_event_fields(row: FleetSettings) -> dict[str, Any]:
    return {"needs_key": row.needs_key, "limits": row.limits}
