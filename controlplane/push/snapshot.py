"""Rows to the configuration that routers run. Equal rows give equal bytes: everything is ordered by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from django.conf import settings
from django.db.models import Prefetch

from controlplane import router_fields
from controlplane.models import (
    OPEN_ROLLOUTS,
    ClientKey,
    FleetSettings,
    PolicyRevision,
    Pool,
    Replica,
    RevisionState,
    Rollout,
    RolloutState,
    RoutingPolicy,
    TaskGroup,
)
from controlplane.push.access import access_of, claiming
from controlplane.schema_fields import revived
from controlplane.sealing import unseal
from routing import schema


def build_config(hash_secret: str) -> schema.RouterConfig:
    """The configuration that the rows say, in ten queries whatever the fleet's size."""
    trials, rows, fleet = _trials(), list(_pools()), FleetSettings.objects.first()
    access = _access(rows) if fleet and fleet.needs_key else None
    keys = frozenset(key.name for key in access.keys) if access else frozenset()
    pools = tuple(_pool(pool, trials, keys) for pool in rows)
    said = revived(router_fields.FLEET, fleet) if fleet else {}
    networks = schema.ReplicaNetworks(allowed=tuple(map(str, settings.FLEET_NETWORKS)))
    return schema.RouterConfig(hash_secret=hash_secret, pools=pools, access=access, replica_networks=networks, **said)


def _access(pools: Sequence[Pool]) -> schema.Access:
    return access_of(ClientKey.objects.filter(revoked_at=None).select_related("project"), pools)


def _pools() -> Iterable[Pool]:
    live = PolicyRevision.objects.filter(state=RevisionState.LIVE)
    policies = RoutingPolicy.objects.prefetch_related(Prefetch("revisions", live, to_attr="live_revisions"))
    groups = TaskGroup.objects.order_by("name").prefetch_related("replicas", Prefetch("policy", policies))
    own = policies.filter(group=None)
    return (
        Pool.objects.order_by("name")
        .select_related("project")
        .prefetch_related(
            Prefetch("replicas", Replica.objects.order_by("name")),
            Prefetch("groups", groups),
            Prefetch("policies", own, to_attr="own_policies"),
        )
    )


def _trials() -> Mapping[int, Rollout]:
    """The rollout of each policy that tries a revision, by the policy's id; what awaits approval is tried by nobody."""
    open_ones = Rollout.objects.filter(revision__state=RevisionState.TRIAL, state__in=OPEN_ROLLOUTS)
    begun = open_ones.exclude(state=RolloutState.AWAITING_APPROVAL).select_related("revision")
    return {rollout.revision.policy_id: rollout for rollout in begun}


def _pool(pool: Pool, trials: Mapping[int, Rollout], keys: Collection[str]) -> schema.PoolConfig:
    groups = tuple(claiming(_group(group, trials), pool.project.name, keys) for group in pool.groups.all())
    placed = [group.name for group in groups if group.policy is None]
    policy = _policy(pool.own_policies[0], trials, placed)  # type: ignore[attr-defined]  # prefetched above
    if policy is None:
        raise AssertionError(f"pool {pool.name} has no live policy: create_pool gives it one and nothing takes it away")
    return schema.PoolConfig(
        name=pool.name,
        policy=policy,
        replicas=tuple(_replica(replica) for replica in pool.replicas.all()),
        groups=groups,
        **revived(router_fields.POOL, pool),
    )


def _replica(replica: Replica) -> schema.ReplicaConfig:
    return schema.ReplicaConfig(
        name=replica.name,
        url=replica.url,
        state=schema.ReplicaState(replica.state),
        weight=replica.weight,
        block_tokens=replica.block_tokens,
        capacity_blocks=(replica.capacity_blocks or 0) // replica.data_parallel_size or None,  # of each rank
        api_key=None if replica.api_key_sealed is None else unseal(replica.api_key_sealed).decode(),
        **revived(router_fields.REPLICA, replica),
    )


def _group(group: TaskGroup, trials: Mapping[int, Rollout]) -> schema.TaskGroupConfig:
    policy = getattr(group, "policy", None)  # a reverse one-to-one that is missing raises AttributeError's kind
    names = tuple(sorted(replica.name for replica in group.replicas.all()))
    return schema.TaskGroupConfig(
        name=group.name,
        policy=_policy(policy, trials) if policy else None,
        replicas=names or None,
        **revived(router_fields.GROUP, group),
    )


def _policy(
    policy: RoutingPolicy, trials: Mapping[int, Rollout], placed: Collection[str] = ()
) -> schema.PolicyConfig | None:
    """The revision in force with the one on trial; ``placed`` are the task groups that a pool's policy places."""
    live: list[PolicyRevision] = policy.live_revisions  # type: ignore[attr-defined]  # prefetched above
    if not live:
        return None
    return schema.PolicyConfig(
        name=policy.name,
        revision=live[0].number,
        settings=_settings(live[0]),
        trial=_trial(trials[policy.pk], placed) if policy.pk in trials else None,
    )


def _trial(rollout: Rollout, placed: Collection[str]) -> schema.Trial | None:
    """The requests of the rollout's present stage; None where its task groups are gone, or placed by others by now."""
    scope = rollout.stages[rollout.stage]
    groups = None if scope["groups"] is None else tuple(name for name in scope["groups"] if name in placed)
    if groups == ():
        return None
    return schema.Trial(
        revision=rollout.revision.number,
        settings=_settings(rollout.revision),
        share=scope["share"],
        routers=None if scope["routers"] is None else tuple(scope["routers"]),
        groups=groups,
    )


def _settings(revision: PolicyRevision) -> schema.Settings:
    settings: schema.Settings = msgspec.convert(revision.settings, schema.Settings)
    return settings
