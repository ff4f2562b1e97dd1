"""From rows to a bundle. Equal fleets give equal bytes: everything is ordered by name."""

from __future__ import annotations

from typing import Any

from django.db.models import Prefetch

from controlplane.access.asker import Asker
from controlplane.access.scope import visible
from controlplane.database.moment import one_moment
from controlplane.models import (
    PolicyRevision,
    Pool,
    Replica,
    ReplicaSource,
    RevisionState,
    RoutingPolicy,
    TaskGroup,
)

from .kinds import GROUP, POOL, REPLICA, SOURCE

FORMAT = 1


def export_bundle(asker: Asker) -> dict[str, Any]:
    """The pools that the asker may see, with all that belongs to them at one moment; a fixed number of queries."""
    with one_moment():
        pools = _pools(asker)
    return {"format": FORMAT, "pools": [_pool(pool) for pool in pools]}


def _pools(asker: Asker) -> list[Pool]:
    live = PolicyRevision.objects.filter(state=RevisionState.LIVE)
    policies = RoutingPolicy.objects.prefetch_related(Prefetch("revisions", live, to_attr="in_force"))
    groups = TaskGroup.objects.order_by("name").select_related("pool")
    own = Replica.objects.filter(discovered=None)  # others are found again by their source
    rows = visible(asker, Pool.objects.order_by("name").select_related("project"))
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
