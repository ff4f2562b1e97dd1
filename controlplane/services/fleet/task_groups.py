"""Create, change and remove task groups, and purge their response caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.db import transaction

from controlplane import schema_fields
from controlplane.egress import fleet_rules, guarded_client
from controlplane.errors import ConflictError, InvalidError, NameTakenError, PurgeIncompleteError
from controlplane.models import ClientKey, EventKind, Pool, Replica, Router, TaskGroup
from controlplane.models.fleet import SHORT_NAME, NextVersion
from controlplane.push.client import Unreachable, purge_responses
from controlplane.schema_fields import canonical, canonical_fields
from controlplane.services.checks import check_name, lock_row, unique_or
from controlplane.services.events import record_event
from controlplane.services.fleet.served_models import relative_error_paths
from controlplane.services.snapshots import freeze_snapshot
from routing.schema import CachePurge

CACHE_KEY_EXPECTED = "expected 16 to 64 of the characters 0-9 and a-f, as responses have in X-Warmpath-Cache-Key"

MAX_PARALLEL_PURGES = 128
_FIELDS = ("name", "owner", "description", *schema_fields.GROUP, "expected_tier1", "hit_rate_objective")


class GroupSettings(TypedDict, total=False):
    """Settings of a task group. Omitted: unchanged; None: the default."""

    owner: str
    description: str
    replicas: Iterable[Replica]  # empty: all of the pool
    match: Mapping[str, Any] | None  # this and the following: fields of routing.schema.TaskGroupConfig
    tier1: Mapping[str, Any] | None
    priority: int
    ttft_objective_ms: int | None
    concurrency: Mapping[str, Any] | None
    caps: Mapping[str, Any] | None
    response_cache: Mapping[str, Any] | None
    semantic_cache: Mapping[str, Any] | None
    expected_tier1: str  # 16 hex digits; "": none
    hit_rate_objective: float | None  # ratio, more than 0


@transaction.atomic
def create_task_group(pool: Pool, name: str, *, by: User | None = None, **settings: Unpack[GroupSettings]) -> TaskGroup:
    """Create a group, placed by the pool's policy until it has its own. InvalidError, NameTakenError."""
    check_name(name, SHORT_NAME, "$.name")
    replicas = _check_replicas(pool, settings.pop("replicas", ()))
    group = TaskGroup(pool=pool, name=name, **_checked(settings))
    _check_keys(group)
    _check_embedding_pool(group)
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
    if group.semantic_cache != before["semantic_cache"]:
        _check_embedding_pool(group)
    after = _event_fields(group)
    if after != before:
        group.version = NextVersion()  # for a change of ``replicas``, which are another table's rows
        group.save()
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


def _check_embedding_pool(group: TaskGroup) -> None:
    """InvalidError unless the pool that gets texts of its requests is one of its own project."""
    name = (group.semantic_cache or {}).get("embedding_pool")
    if name is not None and not Pool.objects.filter(project=group.pool.project_id, name=name).exists():
        raise InvalidError("$.semantic_cache.embedding_pool", f"the pool's project has no pool {name!r}")


def _check_replicas(pool: Pool, replicas: Iterable[Replica]) -> list[Replica]:
    replicas = list(replicas)
    for position, replica in enumerate(replicas):
        if replica.pool_id != pool.pk:
            raise InvalidError(f"$.replicas[{position}]", f"replica {replica.name} is not in pool {pool.name}")
    return replicas


# --- response caches --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouterPurge:
    """Entries of a response cache that one router removed. Unknown is None; so is the store's part without a store."""

    router: str
    memory_entries: int | None = None
    store_entries: int | None = None
    remaining_entries: int | None = None  # in the store, by a scan after the removal
    problem: str | None = None  # why entries may be left; None: the router removed all


@dataclass(frozen=True, slots=True)
class CachePurgeResult:
    """A purge of a group's response cache by all routers."""

    group: str
    routers: tuple[RouterPurge, ...]

    @property
    def entries(self) -> int:
        """Removed entries. Those in memory are copies of those in the store, where there is one."""
        stored = [row.store_entries for row in self.routers if row.store_entries is not None]
        return sum(stored) if stored else sum(row.memory_entries or 0 for row in self.routers)

    @property
    def incomplete(self) -> PurgeIncompleteError | None:
        """The error that names each router where entries may be left; None if there is none."""
        problems = [f"router {row.router}: {row.problem}" for row in self.routers if row.problem]
        if not problems:
            return None
        detail = (
            f"Stored responses of task group {self.group} may be left at {len(problems)} of {len(self.routers)} "
            f"routers. Purge again when they respond; remove routers that no longer exist. {'; '.join(problems)}."
        )
        return PurgeIncompleteError(detail, {"routers": [asdict(row) for row in self.routers]})


def purge_response_cache(
    group: TaskGroup,
    *,
    model: str | None = None,
    namespace: str | None = None,
    key: str | None = None,
    by: User | None = None,
    dry_run: bool = False,
) -> CachePurgeResult:
    """Make every router remove the stored responses of a group, of one model or namespace of it, or one by its key.

    ``dry_run``: routers count them only. InvalidError for a model that the pool does not serve, ConflictError without
    routers. A router that fails or does not respond is part of the result.
    """
    purge = CachePurge(group.pool.name, group.name, _engine_model(group.pool, model), namespace, key, dry_run)
    routers = list(Router.objects.order_by("name"))
    if not routers:
        raise ConflictError("No router has announced itself, so no stored response can be removed.")
    with guarded_client(fleet_rules()) as http, ThreadPoolExecutor(min(len(routers), MAX_PARALLEL_PURGES)) as threads:
        call = partial(purge_responses, http, purge=purge, token=django_settings.ROUTER_ADMIN_TOKEN)
        outcomes = list(threads.map(call, [router.admin_url for router in routers]))
    rows = [
        RouterPurge(router.name, problem=outcome.reason)
        if isinstance(outcome, Unreachable)
        else RouterPurge(
            router.name, outcome.memory_entries, outcome.store_entries, outcome.remaining_entries, outcome.problem
        )
        for router, outcome in zip(routers, outcomes, strict=True)
    ]
    _record_purge(group, purge, rows, by)
    return CachePurgeResult(str(group), tuple(rows))


def _record_purge(group: TaskGroup, purge: CachePurge, rows: list[RouterPurge], by: User | None) -> None:
    """Record a purge after it was done: the lock of the audit log is not held while routers respond."""
    done = sum(row.problem is None for row in rows)
    scope = {"model": purge.model, "namespace": purge.namespace, "key": purge.key}
    limits = [f"{name} {value!r}" for name, value in scope.items() if value is not None]
    at = "" if done == len(rows) else f" at {done} of {len(rows)} routers only"
    summary = f"The response cache of task group {group} was purged{at}{': ' if limits else ''}{', '.join(limits)}."
    detail = {"after": {**scope, "group": str(group), "routers": [asdict(row) for row in rows]}}
    record_event(EventKind.RESPONSE_CACHE_PURGED, summary, pool=group.pool, by=by, detail=detail)


def _engine_model(pool: Pool, name: str | None) -> str | None:
    """A model's name as engines know it. InvalidError for one that the pool does not serve."""
    aliases = {alias["name"]: alias["model"] for alias in pool.aliases}
    if name is None or name in aliases:
        return None if name is None else aliases[name]
    if pool.models and name not in {*pool.models, *(adapter["name"] for adapter in pool.adapters)}:
        raise InvalidError("$.model", f"pool {pool.name} serves no model {name[:100]!r}")
    return name
