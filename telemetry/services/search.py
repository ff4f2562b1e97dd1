"""Finding pools, task groups, replicas and policies by a part of their name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from django.db.models import Model, QuerySet

from controlplane.access.actor import Actor, visible
from controlplane.models import Pool, Replica, RoutingPolicy, TaskGroup

Row = TypeVar("Row", bound=Model)
MOST = 8  # of each kind


@dataclass(frozen=True, slots=True)
class Found:
    """Something by that name. ``key`` is what its page is addressed by."""

    kind: str  # "pool", "task group", "replica" or "policy"
    name: str
    key: tuple[str, ...]


def search(actor: Actor, text: str) -> list[Found]:
    """What the actor may see whose name holds a text; names that begin with it first. Four queries; [] for nothing."""
    wanted = text.strip().lower()[:63]
    if not wanted:
        return []
    found = [Found("pool", row.name, (row.name,)) for row in _named(actor, Pool.objects.all(), wanted)]
    groups = _named(actor, TaskGroup.objects.select_related("pool"), wanted)
    found += [Found("task group", row.name, (row.pool.name, row.name)) for row in groups]
    found += [Found("replica", row.name, (row.name,)) for row in _named(actor, Replica.objects.all(), wanted)]
    policies = _named(actor, RoutingPolicy.objects.all(), wanted)
    found += [Found("policy", row.name, (str(row.pk),)) for row in policies]
    return sorted(found, key=lambda one: not one.name.startswith(wanted))


def _named(actor: Actor, rows: QuerySet[Row], text: str) -> list[Row]:
    return list(visible(actor, rows).filter(name__contains=text).order_by("name")[:MOST])
