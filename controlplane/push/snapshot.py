"""Rows to the configuration that routers run. Equal rows give equal bytes: everything is ordered by name."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from django.db.models import Prefetch

from controlplane import router_fields
from controlplane.models import PolicyRevision, Pool, Replica, RevisionState, RoutingPolicy, TaskGroup
from controlplane.schema_fields import revived
from controlplane.sealing import unseal
from routing import schema


def build_config(hash_secret: str) -> schema.RouterConfig:
    """The configuration that the rows say, in seven queries whatever the fleet's size."""
    return schema.RouterConfig(hash_secret=hash_secret, pools=tuple(_pool(pool) for pool in _pools()))


def _pools() -> Iterable[Pool]:
    live = PolicyRevision.objects.filter(state=RevisionState.LIVE)
    policies = RoutingPolicy.objects.prefetch_related(Prefetch("revisions", live, to_attr="live_revisions"))
    groups = TaskGroup.objects.order_by("name").prefetch_related("replicas", Prefetch("policy", policies))
    own = policies.filter(group=None)
    return Pool.objects.order_by("name").prefetch_related(
        Prefetch("replicas", Replica.objects.order_by("name")),
        Prefetch("groups", groups),
        Prefetch("policies", own, to_attr="own_policies"),
    )


def _pool(pool: Pool) -> schema.PoolConfig:
    policy = _policy(pool.own_policies[0])  # type: ignore[attr-defined]  # prefetched above
    if policy is None:
        raise AssertionError(f"pool {pool.name} has no live policy: create_pool gives it one and nothing takes it away")
    return schema.PoolConfig(
        name=pool.name,
        policy=policy,
        replicas=tuple(_replica(replica) for replica in pool.replicas.all()),
        groups=tuple(_group(group) for group in pool.groups.all()),
        **revived(router_fields.POOL, pool),
    )


def _replica(replica: Replica) -> schema.ReplicaConfig:
    return schema.ReplicaConfig(
        name=replica.name,
        url=replica.url,
        state=schema.ReplicaState(replica.state),
        weight=replica.weight,
        block_tokens=replica.block_tokens,
        capacity_blocks=replica.capacity_blocks,
        api_key=None if replica.api_key_sealed is None else unseal(replica.api_key_sealed).decode(),
        **revived(router_fields.REPLICA, replica),
    )


def _group(group: TaskGroup) -> schema.TaskGroupConfig:
    policy = getattr(group, "policy", None)  # a reverse one-to-one that is missing raises AttributeError's kind
    names = tuple(sorted(replica.name for replica in group.replicas.all()))
    return schema.TaskGroupConfig(
        name=group.name,
        policy=_policy(policy) if policy else None,
        replicas=names or None,
        **revived(router_fields.GROUP, group),
    )


def _policy(policy: RoutingPolicy) -> schema.PolicyConfig | None:
    live: list[PolicyRevision] = policy.live_revisions  # type: ignore[attr-defined]  # prefetched above
    if not live:
        return None
    settings = msgspec.convert(live[0].settings, schema.Settings)
    return schema.PolicyConfig(name=policy.name, revision=live[0].number, settings=settings)
