"""Builds the configuration of routers from database rows. Equal rows give equal bytes: everything is sorted by name.

A client key belongs to one project. It permits only that project's models, its tenant is prefixed with the project, and
routers know the key as ``project.name``. A key's models and task groups that no longer exist are left out, and so is a
key that would permit nothing. So a key can never make the configuration invalid.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from django.conf import settings
from django.db.models import Prefetch

from controlplane import schema_fields
from controlplane.encryption import decrypt
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
from controlplane.schema_fields import schema_values
from routing import schema


def build_access(keys: Iterable[ClientKey], pools: Sequence[Pool]) -> schema.Access:
    """The permitted keys, sorted by name; ``pools`` have their groups prefetched."""
    restricted_keys = (_restrict_key(key, pools) for key in keys)
    return schema.Access(tuple(sorted((key for key in restricted_keys if key), key=lambda key: key.name)))


def api_key(key: ClientKey) -> schema.ApiKey:
    """A key exactly as its row defines it."""
    return schema.ApiKey(
        name=key.full_name,
        digest=key.digest,
        models=_optional_tuple(key.models),
        groups=_optional_tuple(key.groups),
        tenant=f"{key.project.name}.{key.tenant}" if key.tenant else None,
        requests_per_s=key.requests_per_s,
        burst=key.burst,
        tokens_per_min=key.tokens_per_min,
        queue_weight=key.queue_weight,
        expires_at=None if key.expires_at is None else int(key.expires_at.timestamp()),
    )


def model_names(pools: Iterable[Pool]) -> set[str] | None:
    """Names of all models, aliases and adapters of some pools; None if a pool accepts any model."""
    names: set[str] = set()
    for pool in pools:
        if not pool.models:
            return None
        names |= {*pool.models, *(named["name"] for named in (*pool.aliases, *pool.adapters))}
    return names


def _with_full_key_names(
    group: schema.TaskGroupConfig, project: str, permitted: Collection[str]
) -> schema.TaskGroupConfig:
    """The group, matching by the full names of those of its keys that are permitted."""
    match = group.match
    names = tuple(name for name in (f"{project}.{short}" for short in match.api_keys) if name in permitted)
    prefixes = tuple(f"{project}.{prefix}" for prefix in match.api_key_prefixes)
    match = msgspec.structs.replace(match, api_keys=names, api_key_prefixes=prefixes)
    return msgspec.structs.replace(group, match=match)


def _restrict_key(key: ClientKey, pools: Sequence[Pool]) -> schema.ApiKey | None:
    """The key restricted to what exists in its project; None if that is nothing."""
    own_pools = [pool for pool in pools if pool.project_id == key.project_id]
    config = api_key(key)
    models = _permitted_models(config.models, model_names(own_pools), is_only_project=len(own_pools) == len(pools))
    groups = _keep_existing(config.groups, {group.name for pool in own_pools for group in pool.groups.all()})
    if not own_pools or models == () or groups == ():
        return None
    return msgspec.structs.replace(config, models=models, groups=groups)


def _permitted_models(
    named: tuple[str, ...] | None, existing: Collection[str] | None, *, is_only_project: bool
) -> tuple[str, ...] | None:
    """None (any model) only if no other project has models, or the project itself accepts any model."""
    if existing is None:
        return named
    if named is None:
        return None if is_only_project else tuple(sorted(existing))
    return _keep_existing(named, existing)


def _keep_existing(named: tuple[str, ...] | None, existing: Collection[str]) -> tuple[str, ...] | None:
    return None if named is None else tuple(name for name in named if name in existing)


def _optional_tuple(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def build_config(hash_secret: str) -> schema.RouterConfig:
    """The configuration of the whole fleet; ten queries, however large the fleet is."""
    canaries, pools, fleet = _canary_rollouts(), list(_pools()), FleetSettings.objects.first()
    active_keys = ClientKey.objects.filter(revoked_at=None).select_related("project")
    access = build_access(active_keys, pools) if fleet and fleet.needs_key else None
    permitted = frozenset(key.name for key in access.keys) if access else frozenset()
    pool_configs = tuple(_pool(pool, canaries, permitted) for pool in pools)
    fleet_wide = schema_values(schema_fields.FLEET, fleet) if fleet else {}
    networks = schema.ReplicaNetworks(allowed=tuple(map(str, settings.FLEET_NETWORKS)))
    return schema.RouterConfig(
        hash_secret=hash_secret, pools=pool_configs, access=access, replica_networks=networks, **fleet_wide
    )


def _pools() -> Iterable[Pool]:
    live = PolicyRevision.objects.filter(state=RevisionState.LIVE)
    policies = RoutingPolicy.objects.prefetch_related(Prefetch("revisions", live, to_attr="live_revisions"))
    groups = TaskGroup.objects.order_by("name").prefetch_related("replicas", Prefetch("policy", policies))
    pool_policies = policies.filter(group=None)
    return (
        Pool.objects.order_by("name")
        .select_related("project")
        .prefetch_related(
            Prefetch("replicas", Replica.objects.order_by("name")),
            Prefetch("groups", groups),
            Prefetch("policies", pool_policies, to_attr="own_policies"),
        )
    )


def _canary_rollouts() -> Mapping[int, Rollout]:
    """The rollout of each policy that runs a canary, by the policy's id; not those that await approval."""
    rollouts = Rollout.objects.filter(revision__state=RevisionState.CANARY, state__in=OPEN_ROLLOUTS)
    started = rollouts.exclude(state=RolloutState.AWAITING_APPROVAL).select_related("revision")
    return {rollout.revision.policy_id: rollout for rollout in started}


def _pool(pool: Pool, canaries: Mapping[int, Rollout], permitted: Collection[str]) -> schema.PoolConfig:
    configs = (_group(group, canaries) for group in pool.groups.all())
    groups = tuple(_with_full_key_names(config, pool.project.name, permitted) for config in configs)
    without_policy = [group.name for group in groups if group.policy is None]
    policy = _policy(pool.own_policies[0], canaries, without_policy)  # type: ignore[attr-defined]  # prefetched above
    if policy is None:
        raise AssertionError(f"pool {pool.name} has no live policy, though create_pool adds one and nothing removes it")
    return schema.PoolConfig(
        name=pool.name,
        policy=policy,
        replicas=tuple(_replica(replica) for replica in pool.replicas.all()),
        groups=groups,
        **schema_values(schema_fields.POOL, pool),
    )


def _replica(replica: Replica) -> schema.ReplicaConfig:
    return schema.ReplicaConfig(
        name=replica.name,
        url=replica.url,
        state=schema.ReplicaState(replica.state),
        weight=replica.weight,
        block_tokens=replica.block_tokens,
        capacity_blocks=(replica.capacity_blocks or 0) // replica.data_parallel_size or None,  # of each rank
        api_key=None if replica.api_key_encrypted is None else decrypt(replica.api_key_encrypted).decode(),
        **schema_values(schema_fields.REPLICA, replica),
    )


def _group(group: TaskGroup, canaries: Mapping[int, Rollout]) -> schema.TaskGroupConfig:
    policy = getattr(group, "policy", None)  # a missing reverse one-to-one raises a subclass of AttributeError
    names = tuple(sorted(replica.name for replica in group.replicas.all()))
    return schema.TaskGroupConfig(
        name=group.name,
        policy=_policy(policy, canaries) if policy else None,
        replicas=names or None,
        **schema_values(schema_fields.GROUP, group),
    )


def _policy(
    policy: RoutingPolicy, canaries: Mapping[int, Rollout], without_policy: Collection[str] = ()
) -> schema.PolicyConfig | None:
    """The active revision and its canary; ``without_policy`` are the task groups that a pool's policy places."""
    live: list[PolicyRevision] = policy.live_revisions  # type: ignore[attr-defined]  # prefetched above
    if not live:
        return None
    return schema.PolicyConfig(
        name=policy.name,
        revision=live[0].number,
        settings=_settings(live[0]),
        canary=_canary(canaries[policy.pk], without_policy) if policy.pk in canaries else None,
    )


def _canary(rollout: Rollout, without_policy: Collection[str]) -> schema.Canary | None:
    """The canary of the rollout's current stage; None if its task groups were removed or have their own policies."""
    scope = rollout.stages[rollout.stage]
    groups = None if scope["groups"] is None else tuple(name for name in scope["groups"] if name in without_policy)
    if groups == ():
        return None
    return schema.Canary(
        revision=rollout.revision.number,
        settings=_settings(rollout.revision),
        share=scope["share"],
        routers=None if scope["routers"] is None else tuple(scope["routers"]),
        groups=groups,
    )


def _settings(revision: PolicyRevision) -> schema.Settings:
    settings: schema.Settings = msgspec.convert(revision.settings, schema.Settings)
    return settings
