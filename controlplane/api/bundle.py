"""The kinds of object that a bundle holds: how each is shown, made, changed and removed.

From rows to a bundle. Equal fleets give equal bytes: everything is ordered by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.db.models import Model, Prefetch
from rest_framework import serializers

from controlplane.access.actor import Actor, visible
from controlplane.api.serializers.discovery import SourceChange, SourceInput, SourceSerializer
from controlplane.api.serializers.fleet import (
    PoolChange,
    PoolInput,
    PoolSerializer,
    ReplicaChange,
    ReplicaInput,
    ReplicaSerializer,
    TaskGroupChange,
    TaskGroupInput,
    TaskGroupSerializer,
)
from controlplane.database.transactions import repeatable_read
from controlplane.models import PolicyRevision, Pool, Replica, ReplicaSource, RevisionState, RoutingPolicy, TaskGroup
from controlplane.services.discovery import sources
from controlplane.services.fleet import pools, replicas, task_groups

SECRET = "(a secret)"  # noqa: S105 - what is shown in its place


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object. Its serializers are those of its own address, so a new field is in bundles by itself."""

    noun: str
    route: str  # the stem of its addresses' names in the rule table
    shown: type[serializers.ModelSerializer[Any]]
    made: type[serializers.Serializer[Any]]
    changed: type[serializers.Serializer[Any]]
    create: Callable[..., Model]
    update: Callable[..., Model]
    remove: Callable[..., None]
    fixed: tuple[str, ...] = ()  # said when it is made, and for good
    placed: tuple[str, ...] = ("pool",)  # what says where it is made; a bundle's nesting says that

    def fields(self) -> tuple[str, ...]:
        """What a bundle may say of it, in the order of its address."""
        return tuple(name for name in self.made().get_fields() if name not in self.placed)

    def export(self, row: Model) -> dict[str, Any]:
        """What it is, in the fields that a bundle may say; secrets are left out."""
        shown = self.shown(row).data
        return {name: _plain(shown[name]) for name in self.fields() if name in shown}


def _plain(value: Any) -> Any:
    """DRF's ordered kinds as JSON's own."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


POOL = Kind(
    "pool",
    "api:pool",
    PoolSerializer,
    PoolInput,
    PoolChange,
    pools.create_pool,
    pools.update_pool,
    pools.remove_pool,
    fixed=("project",),
    placed=(),
)
REPLICA = Kind(
    "replica",
    "api:replica",
    ReplicaSerializer,
    ReplicaInput,
    ReplicaChange,
    replicas.add_replica,
    replicas.update_replica,
    replicas.remove_replica,
)
GROUP = Kind(
    "task group",
    "api:task-group",
    TaskGroupSerializer,
    TaskGroupInput,
    TaskGroupChange,
    task_groups.create_task_group,
    task_groups.update_task_group,
    task_groups.remove_task_group,
)
SOURCE = Kind(
    "replica source",
    "api:replica-source",
    SourceSerializer,
    SourceInput,
    SourceChange,
    sources.create_source,
    sources.update_source,
    sources.remove_source,
    fixed=("kind",),
)

# A pool's members: the bundle's key, their kind, and the rows. What others rely on comes before them.
MEMBERS: dict[str, tuple[Kind, Callable[[Pool], Mapping[str, Replica | TaskGroup | ReplicaSource]]]] = {
    "replicas": (REPLICA, lambda pool: {row.name: row for row in pool.replicas.select_related("pool")}),
    "groups": (GROUP, lambda pool: {row.name: row for row in pool.groups.select_related("pool")}),
    "sources": (SOURCE, lambda pool: {row.name: row for row in pool.sources.select_related("pool")}),
}


def followers(pool: Pool) -> set[str]:
    """The names of replicas that follow a source: they come and go with what it finds, and not with a bundle."""
    return set(pool.replicas.exclude(discovered=None).values_list("name", flat=True))


FORMAT = 1


def export_bundle(actor: Actor) -> dict[str, Any]:
    """The pools that the actor may see, with all that belongs to them at one moment; a fixed number of queries."""
    with repeatable_read():
        pools = _pools(actor)
    return {"format": FORMAT, "pools": [_pool(pool) for pool in pools]}


def _pools(actor: Actor) -> list[Pool]:
    live = PolicyRevision.objects.filter(state=RevisionState.LIVE)
    policies = RoutingPolicy.objects.prefetch_related(Prefetch("revisions", live, to_attr="in_force"))
    groups = TaskGroup.objects.order_by("name").select_related("pool")
    own = Replica.objects.filter(discovered=None)  # others are found again by their source
    rows = visible(actor, Pool.objects.order_by("name").select_related("project"))
    return list(
        rows.prefetch_related(
            Prefetch("replicas", own.order_by("name").select_related("pool")),
            Prefetch("sources", ReplicaSource.objects.order_by("name").select_related("pool")),
            Prefetch("groups", groups.prefetch_related("replicas", Prefetch("policy", policies))),
            Prefetch("policies", policies.filter(group=None), to_attr="own"),
        )
    )


def _pool(pool: Pool) -> dict[str, Any]:
    return {
        **POOL.export(pool),
        "policy": _settings(pool.own[0]),  # type: ignore[attr-defined]  # prefetched above
        "replicas": [REPLICA.export(replica) | {"state": replica.state} for replica in pool.replicas.all()],
        "groups": [_group(group) for group in pool.groups.all()],
        "sources": [SOURCE.export(source) for source in pool.sources.all()],
    }


def _group(group: TaskGroup) -> dict[str, Any]:
    policy: RoutingPolicy | None = getattr(group, "policy", None)
    return {**GROUP.export(group), "policy": _settings(policy) if policy else None}


def _settings(policy: RoutingPolicy) -> dict[str, Any] | None:
    """Those in force; None for a group's policy that was never published."""
    live: list[PolicyRevision] = policy.in_force  # type: ignore[attr-defined]  # prefetched above
    return live[0].settings if live else None
