"""The kinds of object that a bundle holds: how each is shown, made, changed and removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.db.models import Model
from rest_framework import serializers

from controlplane.api.serializers.pools import PoolChange, PoolInput, PoolSerializer
from controlplane.api.serializers.replicas import ReplicaChange, ReplicaInput, ReplicaSerializer
from controlplane.api.serializers.sources import SourceChange, SourceInput, SourceSerializer
from controlplane.api.serializers.task_groups import TaskGroupChange, TaskGroupInput, TaskGroupSerializer
from controlplane.models import Pool, Replica, ReplicaSource, TaskGroup
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
