"""Client keys as routers are told of them.

A key is of one project: it is good for that project's models alone, its tenant is none of another project's, and
routers know it as ``project.name``. What a key names and is there no longer is left out, and a key for nothing is not
let in: nobody's change can be refused for what a key names.

Rows to the configuration that routers run. Equal rows give equal bytes: everything is ordered by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

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
from controlplane.schema_fields import revived
from routing import schema


def access_of(keys: Iterable[ClientKey], pools: Sequence[Pool]) -> schema.Access:
    """Those that are let in, by name; ``pools`` with their groups at hand."""
    told = (_told(key, pools) for key in keys)
    return schema.Access(tuple(sorted((key for key in told if key), key=lambda key: key.name)))


def api_key(key: ClientKey) -> schema.ApiKey:
    """A key as its row says it."""
    return schema.ApiKey(
        name=key.full_name,
        digest=key.digest,
        models=_tuple(key.models),
        groups=_tuple(key.groups),
        tenant=f"{key.project.name}.{key.tenant}" if key.tenant else None,
        requests_per_s=key.requests_per_s,
        burst=key.burst,
        tokens_per_min=key.tokens_per_min,
        expires_at=None if key.expires_at is None else int(key.expires_at.timestamp()),
    )


def names_of(pools: Iterable[Pool]) -> set[str] | None:
    """Every name of a model, alias or adapter of some pools; None where one of them takes any model."""
    names: set[str] = set()
    for pool in pools:
        if not pool.models:
            return None
        named: list[dict[str, Any]] = [*pool.aliases, *pool.adapters]
        names |= {*pool.models, *(one["name"] for one in named)}
    return names


def claiming(group: schema.TaskGroupConfig, project: str, keys: Collection[str]) -> schema.TaskGroupConfig:
    """The group with the keys that it claims by their full names, those that are let in alone."""
    match = group.match
    if not match.api_keys and not match.api_key_prefixes:
        return group
    names = tuple(name for name in (f"{project}.{short}" for short in match.api_keys) if name in keys)
    prefixes = tuple(f"{project}.{prefix}" for prefix in match.api_key_prefixes)
    told = msgspec.structs.replace(match, api_keys=names, api_key_prefixes=prefixes)
    return msgspec.structs.replace(group, match=told)


def _told(key: ClientKey, pools: Sequence[Pool]) -> schema.ApiKey | None:
    """The key within what its project has; None where that is nothing."""
    own = [pool for pool in pools if pool.project_id == key.project_id]
    said = api_key(key)
    models = _models(said.models, names_of(own), is_alone=len(own) == len(pools))
    groups = _those(said.groups, {group.name for pool in own for group in pool.groups.all()})
    if not own or models == () or groups == ():
        return None
    return msgspec.structs.replace(said, models=models, groups=groups)


def _models(said: tuple[str, ...] | None, known: Collection[str] | None, *, is_alone: bool) -> tuple[str, ...] | None:
    """Its project's alone, unless there is no other project's; a project that takes any model cannot be told apart."""
    if known is None:
        return said
    if said is None:
        return None if is_alone else tuple(sorted(known))
    return _those(said, known)


def _those(said: tuple[str, ...] | None, known: Collection[str]) -> tuple[str, ...] | None:
    return None if said is None else tuple(name for name in said if name in known)


def _tuple(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def build_config(hash_secret: str) -> schema.RouterConfig:
    """The configuration that the rows say, in ten queries whatever the fleet's size."""
    trials, rows, fleet = _trials(), list(_pools()), FleetSettings.objects.first()
    access = _access(rows) if fleet and fleet.needs_key else None
    keys = frozenset(key.name for key in access.keys) if access else frozenset()
    pools = tuple(_pool(pool, trials, keys) for pool in rows)
    said = revived(schema_fields.FLEET, fleet) if fleet else {}
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
        **revived(schema_fields.POOL, pool),
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
        **revived(schema_fields.REPLICA, replica),
    )


def _group(group: TaskGroup, trials: Mapping[int, Rollout]) -> schema.TaskGroupConfig:
    policy = getattr(group, "policy", None)  # a reverse one-to-one that is missing raises AttributeError's kind
    names = tuple(sorted(replica.name for replica in group.replicas.all()))
    return schema.TaskGroupConfig(
        name=group.name,
        policy=_policy(policy, trials) if policy else None,
        replicas=names or None,
        **revived(schema_fields.GROUP, group),
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
