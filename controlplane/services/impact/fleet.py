"""Pools, replicas and task groups: who is there, which homes move, and whose requests are whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.services.impact.effect import Differences, Effect, Impact, Path, Route, part, routes_of, several, some
from controlplane.services.impact.placement import whom
from controlplane.services.impact.strategies import KEPT
from routing import schema

TAKES = schema.ReplicaState.ACTIVE  # the one state in which a replica gets new requests
MATCHES = {
    "api_keys": "API key",
    "api_key_prefixes": "API keys that begin with",
    "session_prefixes": "sessions that begin with",
    "tier1_hashes": "tier-1 hash",
    "models": "model",
}


def fleet_effects(
    before: schema.RouterConfig | None, after: schema.RouterConfig, left: Differences
) -> Iterator[Effect]:
    """What happens to pools, replicas and task groups."""
    old = {pool.name: pool for pool in before.pools} if before else {}
    new = {pool.name: pool for pool in after.pools}
    for name, pool in new.items():
        if name not in old:
            yield _pool_added(pool)
            continue
        sides = _Sides(name, _of_pool(before, name), _of_pool(after, name), left)
        yield from _replicas(old[name], pool, sides)
        yield from _groups(old[name], pool, sides)
    for name, pool in old.items():
        if name not in new:
            text = f"Pool {name} is gone with {several(len(pool.replicas), 'replica')}: nobody serves its models."
            yield Effect("pool_removed", Impact.REFUSE, (f"pool {name}",), text, name, None, None, (("pools", name),))


def _pool_added(pool: schema.PoolConfig) -> Effect:
    models, replicas = some(pool.models) or "any model", several(len(pool.replicas), "replica")
    text = f"Pool {pool.name} is new: it takes {models}, placed by {pool.policy.settings.name} among {replicas}."
    place: Path = ("pools", pool.name)
    return Effect("pool_added", Impact.STEER, (f"pool {pool.name}",), text, None, pool.name, None, (place,))


# --- replicas ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sides:
    """One pool before and after, as its requests are placed."""

    pool: str
    before: Mapping[str, Route]  # by task group, "" for the pool's own
    after: Mapping[str, Route]
    left: Differences

    def share(self, replica: str, *, afterwards: bool) -> float:
        """A replica's part of the pool's homes while it is there."""
        return (self.after if afterwards else self.before)[""].share(replica)

    def who(self, replica: str, *, afterwards: bool) -> tuple[str, ...]:
        """Whose requests it may get."""
        routes = (self.after if afterwards else self.before).values()
        return tuple(route.who for route in routes if route.share(replica)) or (f"pool {self.pool}",)

    def of(self, share: float) -> str:
        """A part of what the pool's strategy keeps together."""
        settings = self.after[""].settings
        asks = isinstance(settings, schema.ResidencySettings)
        return f"{part(share)} of the {KEPT.get(settings.name, 'prefixes' if asks else 'requests')}"


def _replicas(before: schema.PoolConfig, after: schema.PoolConfig, sides: _Sides) -> Iterator[Effect]:
    old = {replica.name: replica for replica in before.replicas}
    new = {replica.name: replica for replica in after.replicas}
    for name in dict.fromkeys((*new, *old)):
        place = ("pools", after.name, "replicas", name)
        was, now = old.get(name), new.get(name)
        if was is not None and now is not None:
            yield from _replica(was, now, sides, place)
        elif now is not None:
            yield _joined(now, sides, place)
        elif was is not None:
            yield _gone(was, sides, place)


def _joined(replica: schema.ReplicaConfig, sides: _Sides, place: Path) -> Effect:
    name, who = replica.name, sides.who(replica.name, afterwards=True)
    if replica.state is not TAKES:
        text = f"Replica {name} is added and takes no requests yet: nothing moves."
        return Effect("replica_joined", Impact.QUIET, who, text, None, str(replica.state), 0.0, (place,))
    share = sides.share(name, afterwards=True)
    text = (
        f"Replica {name} joins the ring: {sides.of(share)} move to it and are cold there at first; nothing else moves."
    )
    return Effect("replica_joined", Impact.MOVE, who, text, None, str(replica.state), share, (place,))


def _gone(replica: schema.ReplicaConfig, sides: _Sides, place: Path) -> Effect:
    name, who = replica.name, sides.who(replica.name, afterwards=False)
    if replica.state is not TAKES:
        text = f"Replica {name} is removed; it took no requests any more, so nothing moves."
        return Effect("replica_left", Impact.QUIET, who, text, str(replica.state), None, 0.0, (place,))
    share = sides.share(name, afterwards=False)
    text = (
        f"Replica {name} leaves the ring: {sides.of(share)} that were its own move, each to its next home; "
        "nothing else moves."
    )
    return Effect("replica_left", Impact.MOVE, who, text, str(replica.state), None, share, (place,))


def _replica(was: schema.ReplicaConfig, now: schema.ReplicaConfig, sides: _Sides, place: Path) -> Iterator[Effect]:
    """What differs about a replica that stays."""
    name, left = now.name, sides.left
    who: tuple[str, ...] = (f"pool {sides.pool}",)
    if (*place, "state") in left:
        yield _restated(was, now, sides, ((*place, "state"),))
    for field, words in (("weight", "weighs"), ("data_parallel_size", "has data-parallel ranks:")):
        if (*place, field) in left:
            yield _reweighed(field, words, (was, now), sides, ((*place, field),))
    if (*place, "url") in left:
        text = (
            f"Replica {name} is reached at another address. It keeps its name, and so every home; what answers there "
            "may be cold."
        )
        yield Effect("replica_url", Impact.STEER, who, text, was.url, now.url, 0.0, ((*place, "url"),))
    learnt = tuple((*place, field) for field in ("block_tokens", "capacity_blocks") if (*place, field) in left)
    if learnt:
        text = f"Replica {name} has room for {_room(now)}, until now {_room(was)}: what it is thought to hold follows."
        yield Effect("replica_capacity", Impact.STEER, who, text, _sizes(was), _sizes(now), 0.0, learnt)
    if (*place, "api_key") in left:
        sent = "no key" if not now.api_key else "another key" if was.api_key else "a key"
        text = f"Routers send {sent} to replica {name}."
        yield Effect("replica_key", Impact.REFUSE, who, text, None, None, 0.0, ((*place, "api_key"),))


def _restated(was: schema.ReplicaConfig, now: schema.ReplicaConfig, sides: _Sides, paths: tuple[Path, ...]) -> Effect:
    """Into service, out of it, or from one way of being out to the other."""
    if TAKES not in {was.state, now.state}:
        text = f"Replica {now.name} is {now.state}, until now {was.state}: it takes no new requests either way."
        everybody = (f"pool {sides.pool}",)
        return Effect("replica_state", Impact.QUIET, everybody, text, str(was.state), str(now.state), 0.0, paths)
    back = now.state is TAKES
    share = sides.share(now.name, afterwards=back)
    if back:
        text = f"Replica {now.name} takes requests again: {sides.of(share)} come back to it."
    else:
        rest = "what runs there finishes" if now.state is schema.ReplicaState.DRAINING else "its health is not asked"
        text = (
            f"Replica {now.name} is {now.state}: {rest}, and {sides.of(share)} go to their next homes until it is back."
        )
    who = sides.who(now.name, afterwards=back)
    return Effect("replica_state", Impact.MOVE, who, text, str(was.state), str(now.state), share, paths)


def _reweighed(
    field: str,
    words: str,
    replica: tuple[schema.ReplicaConfig, schema.ReplicaConfig],
    sides: _Sides,
    paths: tuple[Path, ...],
) -> Effect:
    """Another weight, or another number of ranks: its part of the homes grows or shrinks."""
    name = replica[1].name
    old, new = (getattr(one, field) for one in replica)
    was, now = sides.share(name, afterwards=False), sides.share(name, afterwards=True)
    moved = abs(now - was) if field == "weight" else max(was, now)  # each rank has homes of its own
    text = (
        f"Replica {name} {words} {new:g} instead of {old:g}: {sides.of(now)} have their home there, "
        f"until now {part(was)}."
    )
    impact = Impact.MOVE if moved else Impact.STEER
    return Effect(f"replica_{field}", impact, sides.who(name, afterwards=True), text, old, new, moved, paths)


def _room(replica: schema.ReplicaConfig) -> str:
    if replica.capacity_blocks is None or replica.block_tokens is None:
        return "an unknown number of tokens"
    return f"{replica.capacity_blocks * replica.block_tokens:,} tokens"


def _sizes(replica: schema.ReplicaConfig) -> dict[str, Any]:
    return {"block_tokens": replica.block_tokens, "capacity_blocks": replica.capacity_blocks}


# --- task groups ---------------------------------------------------------------------------------------


def _groups(before: schema.PoolConfig, after: schema.PoolConfig, sides: _Sides) -> Iterator[Effect]:
    old = {group.name: group for group in before.groups}
    new = {group.name: group for group in after.groups}
    for name in dict.fromkeys((*new, *old)):
        place = ("pools", after.name, "groups", name)
        who = (f"task group {after.name}.{name}",)
        if name not in old:
            text = _new_group(sides.after[name])
            yield Effect("group_added", Impact.STEER, who, text, None, name, None, (place,))
        elif name not in new:
            text = f"Task group {name} of pool {after.name} is gone: its requests count as the pool's own."
            yield Effect("group_removed", Impact.STEER, who, text, name, None, None, (place,))
        else:
            yield from _subset(sides.before[name], sides.after[name], sides.left, place)
            yield from _matches(old[name], new[name], sides, place)


def _new_group(route: Route) -> str:
    group = route.group
    named = group.name if group else ""
    return (
        f"Task group {named} of pool {route.pool.name} is new: requests that name it, or that its rules find, are "
        f"placed by {route.settings.name} among {several(len(route.replicas), 'replica')}."
    )


def _subset(before: Route, after: Route, left: Differences, place: Path) -> Iterator[Effect]:
    """Which replicas a group may use."""
    paths = tuple((*place, field) for field in ("replicas", "auto_replicas") if left.under((*place, field)))
    if not paths:
        return
    moved = before.moved_to(after)
    follows = after.group is not None and after.group.auto_replicas is not None
    if follows:
        text = (
            f"{_title(after)} has as many replicas as its traffic asks for{_bounds(after)}; those that become its own "
            "are cold for it at first."
        )
        moved = None
    else:
        former, present = _whose(before), _whose(after)
        text = f"{_title(after)} may use {present} instead of {former}: {_moves(moved)}."
    quiet = moved == 0.0
    was, now = (_plain(route.group.replicas if route.group else None) for route in (before, after))
    yield Effect("group_replicas", Impact.QUIET if quiet else Impact.MOVE, (after.who,), text, was, now, moved, paths)


def _title(route: Route) -> str:
    return whom([route])[0].upper() + whom([route])[1:]


def _moves(moved: float | None) -> str:
    if moved is None:
        return "how many of its warm prefixes move is not known, for one side has no active replica"
    return "nothing moves" if not moved else f"{part(moved)} of its warm prefixes move"


def _whose(route: Route) -> str:
    group = route.group
    if group is not None and group.auto_replicas is not None:
        return "replicas by its traffic"
    names = group.replicas if group else None
    if names is None:
        return f"all {several(len(route.pool.replicas), 'replica')}"
    return f"{several(len(names), 'replica')} ({some(names, 4)})"


def _bounds(route: Route) -> str:
    auto = route.group.auto_replicas if route.group else None
    if auto is None:
        return ""
    most = "" if auto.max is None else f" and at most {auto.max:,}"
    return f", at least {auto.reserved:,}{most}"


def _matches(
    before: schema.TaskGroupConfig, after: schema.TaskGroupConfig, sides: _Sides, place: Path
) -> Iterator[Effect]:
    """Which requests are the group's, beside those that name it."""
    who = (f"task group {sides.pool}.{after.name}",)
    for field in after.match.__struct_fields__:
        path = (*place, "match", field)
        if path not in sides.left:
            continue
        old, new = set(getattr(before.match, field)), set(getattr(after.match, field))
        sets = (("also", new - old), ("no longer", old - new))
        said = ", ".join(f"{verb} {some(sorted(names))}" for verb, names in sets if names)
        by = MATCHES.get(field, field.replace("_", " "))
        text = f"Task group {after.name} of pool {sides.pool} takes requests by {by}: {said or 'in another order'}."
        impact = Impact.MOVE if said else Impact.QUIET
        yield Effect("group_match", impact, who, text, sorted(old), sorted(new), None, (path,))


def _of_pool(config: schema.RouterConfig | None, pool: str) -> dict[str, Route]:
    return {group: route for (name, group), route in routes_of(config).items() if name == pool}


def _plain(value: Any) -> Any:
    return None if value is None else msgspec.to_builtins(value)
