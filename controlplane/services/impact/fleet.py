"""Change impact of the fleet: pools, the ring shares of replicas, and the subsets of task groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from controlplane.services.impact.effect import (
    Differences,
    Effect,
    Impact,
    Path,
    Route,
    enumerate_names,
    format_count,
    percent,
    routes_of,
)
from controlplane.services.impact.placement import AFFINITY
from routing import schema
from routing.schema import moved_ratio

ACTIVE = schema.ReplicaState.ACTIVE


def fleet_effects(
    before: schema.RouterConfig | None, after: schema.RouterConfig, differences: Differences
) -> Iterator[Effect]:
    old = {pool.name: pool for pool in before.pools} if before else {}
    for pool in after.pools:
        if pool.name in old:
            change = _PoolChange(pool.name, _routes_in(before, pool.name), _routes_in(after, pool.name), differences)
            yield from _replica_effects(old[pool.name], pool, change)
            yield from _group_effects(old[pool.name], pool, change)
            continue
        models, replicas = enumerate_names(pool.models) or "any model", format_count(len(pool.replicas), "replica")
        text = f"Pool {pool.name} is new: {pool.policy.settings.name} places requests for {models} on {replicas}."
        paths: tuple[Path, ...] = (("pools", pool.name),)
        yield Effect("pool_added", Impact.PLACEMENT, (f"pool {pool.name}",), text, None, pool.name, None, paths)
    for name in old.keys() - {pool.name for pool in after.pools}:
        replicas = format_count(len(old[name].replicas), "replica")
        text = f"Pool {name} is removed with {replicas}: requests for its models are rejected."
        yield Effect("pool_removed", Impact.ACCESS, (f"pool {name}",), text, name, None, None, (("pools", name),))


def _routes_in(config: schema.RouterConfig | None, pool: str) -> dict[str, Route]:
    return {group: route for (name, group), route in routes_of(config).items() if name == pool}


@dataclass(frozen=True)
class _PoolChange:
    """The routes of one pool before and after a change, by task group; "" for the pool's own."""

    pool: str
    before: Mapping[str, Route]
    after: Mapping[str, Route]
    differences: Differences

    def share(self, replica: str, *, afterwards: bool) -> float:
        """The replica's share of the pool's ring."""
        return (self.after if afterwards else self.before)[""].shares.get(replica, 0.0)

    def routes_to(self, replica: str, *, afterwards: bool) -> tuple[str, ...]:
        """The routes that may send requests to the replica."""
        routes = (self.after if afterwards else self.before).values()
        return tuple(route.label for route in routes if replica in route.shares) or (f"pool {self.pool}",)

    @property
    def compares_prefixes(self) -> bool:
        """Whether a policy of the pool compares what replicas have cached."""
        policies = [route.policy for route in self.after.values()]
        settings = [policy.settings for policy in policies]
        settings += [policy.canary.settings for policy in policies if policy.canary]
        return any(isinstance(item, schema.ResidencySettings) for item in settings)

    def describe_share(self, share: float) -> str:
        """``25 % of prefixes``: a share of what the pool's strategy keeps on one replica."""
        settings = self.after[""].settings
        default = "prefixes" if isinstance(settings, schema.ResidencySettings) else "requests"
        return f"{percent(share)} of {AFFINITY.get(settings.name, default)}"


# --- replicas -------------------------------------------------------------------------------------------


def _replica_effects(before: schema.PoolConfig, after: schema.PoolConfig, change: _PoolChange) -> Iterator[Effect]:
    old = {replica.name: replica for replica in before.replicas}
    new = {replica.name: replica for replica in after.replicas}
    for name in dict.fromkeys((*new, *old)):
        path = ("pools", after.name, "replicas", name)
        if name in old and name in new:
            yield from _change_effects(old[name], new[name], change, path)
        else:
            yield _membership_effect(new.get(name), old.get(name), change, path)


def _membership_effect(
    added: schema.ReplicaConfig | None, removed: schema.ReplicaConfig | None, change: _PoolChange, path: Path
) -> Effect:
    name, is_added = path[-1], added is not None
    old, new = (str(side.state) if side else None for side in (removed, added))
    share, impact = change.share(name, afterwards=is_added), Impact.MOVE
    if str(ACTIVE) not in {old, new}:
        verb = "added" if is_added else "removed"
        share, impact, text = 0.0, Impact.NONE, f"Inactive replica {name} is {verb}: no prefix moves."
    elif not all(side.can_decode for side in (added, removed) if side):
        verb = "joins: it prefills" if is_added else "leaves: it no longer prefills"
        share, impact, text = 0.0, Impact.PLACEMENT, f"Prefill replica {name} {verb} long prompts of the pool."
    elif is_added:
        text = f"Replica {name} joins the ring: {change.describe_share(share)} move to it and are cold there at first."
    else:
        text = f"Replica {name} leaves the ring: {change.describe_share(share)} move to the next replica in ring order."
    kind, affected = "replica_joined" if is_added else "replica_left", change.routes_to(name, afterwards=is_added)
    return Effect(kind, impact, affected, text, old, new, share, (path,))


def _change_effects(
    before: schema.ReplicaConfig, after: schema.ReplicaConfig, change: _PoolChange, path: Path
) -> Iterator[Effect]:
    if (*path, "role") in change.differences:
        yield _role_effect(before, after, change, (*path, "role"))
    if (*path, "state") in change.differences:
        yield _state_effect(before, after, change, (*path, "state"))
    for field, label in (("weight", "weight"), ("data_parallel_size", "number of data-parallel ranks")):
        if (*path, field) in change.differences:
            yield _capacity_effect(field, label, (before, after), change, (*path, field))
    if change.differences.under((*path, "kv_events")):
        yield _events_effect(before, after, change, (*path, "kv_events"))


def _events_effect(
    before: schema.ReplicaConfig, after: schema.ReplicaConfig, change: _PoolChange, path: Path
) -> Effect:
    """The effect of switching KV events on or off, or of another endpoint."""
    name, old, new = after.name, before.kv_events, after.kv_events
    impact = Impact.PLACEMENT if change.compares_prefixes else Impact.NONE
    if not change.compares_prefixes:
        text = (
            f"No policy of pool {change.pool} compares cached prefixes: the KV events of replica {name} are not used."
        )
    elif new is None:
        text = f"Routers no longer follow the KV events of replica {name}: its cached blocks are estimated."
    else:
        text = (
            f"Routers follow the KV events of replica {name} at {new.endpoint}: its cached blocks are known as soon as "
            "routers are connected, and estimated until then."
        )
    affected = change.routes_to(name, afterwards=True)
    before_json, after_json = (msgspec.to_builtins(side) for side in (old, new))
    return Effect("replica_kv_events", impact, affected, text, before_json, after_json, 0.0, (path,))


def _role_effect(before: schema.ReplicaConfig, after: schema.ReplicaConfig, change: _PoolChange, path: Path) -> Effect:
    name, old, new = after.name, str(before.role), str(after.role)
    share = abs(change.share(name, afterwards=True) - change.share(name, afterwards=False))
    if before.can_decode and not after.can_decode:
        outcome = f"it only prefills long prompts, and {change.describe_share(share)} move to other replicas"
    elif not before.can_decode and after.can_decode:
        outcome = f"it no longer prefills prompts for other replicas, and {change.describe_share(share)} move to it"
    else:
        outcome = "it gets the same requests as before"
    text = f"Replica {name} has the role {new} instead of {old}: {outcome}."
    affected = change.routes_to(name, afterwards=after.can_decode)
    impact = Impact.MOVE if share else Impact.PLACEMENT
    return Effect("replica_role", impact, affected, text, old, new, share, (path,))


def _state_effect(before: schema.ReplicaConfig, after: schema.ReplicaConfig, change: _PoolChange, path: Path) -> Effect:
    name, active = after.name, after.state is ACTIVE
    effect = partial(Effect, "replica_state", before=str(before.state), after=str(after.state), paths=(path,))
    if not active and before.state is not ACTIVE:
        text = f"Replica {name} is {after.state}, previously {before.state}: it gets no new requests in either state."
        return effect(Impact.NONE, (f"pool {change.pool}",), text, moved_ratio=0.0)
    share = change.share(name, afterwards=active)
    if not after.can_decode:
        outcome = "prefills" if active else "no longer prefills"
        text = f"Prefill replica {name} is {after.state}: it {outcome} long prompts of the pool."
        return effect(Impact.PLACEMENT, (f"pool {change.pool}",), text, moved_ratio=0.0)
    if active:
        text = f"Replica {name} is active again: {change.describe_share(share)} return to it."
    else:
        draining = after.state is schema.ReplicaState.DRAINING
        outcome = "running requests finish" if draining else "health checks stop"
        amount = f"{change.describe_share(share)} move to the next replica in ring order until it is active again"
        text = f"Replica {name} is {after.state}: {outcome}, and {amount}."
    return effect(Impact.MOVE, change.routes_to(name, afterwards=active), text, moved_ratio=share)


def _capacity_effect(
    field: str,
    label: str,
    replica: tuple[schema.ReplicaConfig, schema.ReplicaConfig],
    change: _PoolChange,
    path: Path,
) -> Effect:
    """Another weight or number of ranks, and so another share of the ring."""
    name = replica[1].name
    old, new = (getattr(side, field) for side in replica)
    old_share, new_share = change.share(name, afterwards=False), change.share(name, afterwards=True)
    # Each rank has its own ring positions.
    moved = abs(new_share - old_share) if field == "weight" else max(old_share, new_share)
    text = (
        f"The {label} of replica {name} is {new:g} instead of {old:g}: it gets {change.describe_share(new_share)}, "
        f"previously {percent(old_share)}."
    )
    impact = Impact.MOVE if moved else Impact.PLACEMENT
    return Effect(f"replica_{field}", impact, change.routes_to(name, afterwards=True), text, old, new, moved, (path,))


# --- task groups ----------------------------------------------------------------------------------------


def _group_effects(before: schema.PoolConfig, after: schema.PoolConfig, change: _PoolChange) -> Iterator[Effect]:
    old = {group.name: group for group in before.groups}
    new = {group.name: group for group in after.groups}
    for name in dict.fromkeys((*new, *old)):
        path, affected = ("pools", after.name, "groups", name), (f"task group {after.name}.{name}",)
        if name not in old:
            route = change.after[name]
            placed = f"{route.settings.name} places its requests on {format_count(len(route.replicas), 'replica')}"
            text = f"Task group {name} of pool {after.name} is new: {placed}."
            yield Effect("group_added", Impact.PLACEMENT, affected, text, None, name, None, (path,))
        elif name not in new:
            text = f"Task group {name} of pool {after.name} is removed: the pool's policy places its requests."
            yield Effect("group_removed", Impact.PLACEMENT, affected, text, name, None, None, (path,))
        else:
            yield from _subset_effects(change.before[name], change.after[name], change.differences, path)


def _subset_effects(before: Route, after: Route, differences: Differences, path: Path) -> Iterator[Effect]:
    """Which replicas a group may use."""
    fields = ("replicas", "auto_replicas")
    paths = tuple((*path, field) for field in fields if differences.under((*path, field)))
    if not paths or after.group is None or before.group is None:
        return
    auto, moved = after.group.auto_replicas, moved_ratio(before.points, after.points)
    title = f"Task group {after.group.name} of pool {after.pool.name}"
    if auto is not None:
        maximum = "" if auto.max is None else f" and at most {auto.max:,}"
        moved = None
        text = (
            f"{title} gets replicas by its share of traffic, at least {auto.reserved:,}{maximum}; its prefixes are "
            "cold on each new one at first."
        )
    else:
        if moved is None:
            outcome = "the share of its prefixes that moves is unknown, because it had or has no active replica"
        else:
            outcome = f"{percent(moved)} of its prefixes move" if moved else "no prefix moves"
        text = f"{title} may use {_subset_text(after)} instead of {_subset_text(before)}: {outcome}."
    impact = Impact.NONE if moved == 0.0 else Impact.MOVE
    old, new = (msgspec.to_builtins(group.replicas) for group in (before.group, after.group))
    yield Effect("group_replicas", impact, (after.label,), text, old, new, moved, paths)


def _subset_text(route: Route) -> str:
    group = route.group
    if group is not None and group.auto_replicas is not None:
        return "replicas by its share of traffic"
    if group is None or group.replicas is None:
        return f"all {format_count(len(route.pool.replicas), 'replica')}"
    return f"{format_count(len(group.replicas), 'replica')} ({enumerate_names(group.replicas, 4)})"
