"""Change impact: what differs between two configurations, whom it affects, and what share of prefixes moves.

Both configurations are compared as trees, so every difference is reported, also of fields that are added later; a field
is described with the schema's own text. Texts never contain secrets. ``warnings_of`` finds likely mistakes in a draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.structs import replace

from controlplane.errors import ConflictError, DecryptionError
from controlplane.models import ConfigSnapshot, PolicyRevision, RoutingPolicy
from controlplane.push.snapshot import build_config
from controlplane.services.policies.rollout_plans import describe_stage
from controlplane.services.snapshots import snapshot_document
from routing import schema
from routing.schema import HIDDEN, SECRET_FIELDS, moved_by_chance, moved_ratio, points_of

Path = tuple[str, ...]  # from the configuration's root; members of a list of named objects by their names
BYTES_PER_TOKEN = 4  # of English text, roughly; routers assume the same: 256 bytes are about 64 tokens
_NO_SECRET = "0" * 32  # comparisons of policies do not depend on the hash secret
_PLACEHOLDERS = {"hash_secret": _NO_SECRET, "digest": "0" * 64, "api_key": "hidden"}


class Impact(StrEnum):
    """What an effect means for requests, most severe first."""

    COLD_CACHES = "cold_caches"  # prefixes get new preferred replicas: caches are cold at first
    MOVE = "move"  # some prefixes move to another replica and are cold there at first
    ACCESS = "access"  # requests that were accepted are rejected, or the reverse
    PLACEMENT = "placement"  # requests are placed differently, but prefixes keep their preferred replicas
    NONE = "none"  # requests are treated as before


@dataclass(frozen=True, slots=True)
class Effect:
    """One difference. ``text`` is a complete description; the other fields are for scripts."""

    kind: str  # what changed, such as "strategy", "replica_left" or "field"
    impact: Impact
    affected: tuple[str, ...]  # whose requests, such as "pool chat" or "task group chat.agents"
    text: str
    before: Any = None  # JSON without secrets; None where it does not exist
    after: Any = None
    moved_ratio: float | None = None  # share of prefixes or conversations that move to another replica; None: unknown
    path: Path = ()  # where both configurations differ


@dataclass(frozen=True, slots=True)
class DraftWarning:
    """A likely mistake, shown before publishing; it prevents nothing."""

    id: str
    field: str  # the setting concerned; "" for the fleet
    text: str
    unaffected: str
    to_do: str


# --- rows -----------------------------------------------------------------------------------------------


def effects_of_settings(
    policy: RoutingPolicy,
    before: dict[str, Any] | None,
    after: dict[str, Any],
    *,
    fleet: schema.RouterConfig | None = None,
) -> list[Effect]:
    """Effects of replacing a policy's settings in the current fleet; ``before`` None: the active configuration.

    A fixed number of queries, none with a ``fleet``.
    """
    fleet = current_fleet() if fleet is None else fleet
    old_config = fleet if before is None else _with_settings(fleet, policy, before)
    return compare_configs(old_config, _with_settings(fleet, policy, after))


def warnings_of_settings(
    policy: RoutingPolicy, settings: dict[str, Any], *, fleet: schema.RouterConfig
) -> list[DraftWarning]:
    """Likely mistakes in these settings in the fleet."""
    group = policy.group.name if policy.group else None
    return warnings_of(_with_settings(fleet, policy, settings), policy.pool.name, group)


def effects_of_revisions(before: PolicyRevision, after: PolicyRevision) -> list[Effect]:
    """Effects of one revision compared with another of the same policy, in the current fleet."""
    return effects_of_settings(after.policy, before.settings, after.settings)


def effects_of_configurations(before: ConfigSnapshot, after: ConfigSnapshot) -> list[Effect]:
    """Effects of one snapshot compared with an earlier one; ConflictError if a snapshot can no longer be read."""
    return compare_configs(_config_of(before), _config_of(after))


def current_fleet() -> schema.RouterConfig:
    """The configuration of the current rows, without the hash secret. A fixed number of queries."""
    return build_config(_NO_SECRET)


def _config_of(snapshot: ConfigSnapshot) -> schema.RouterConfig:
    """The snapshot's configuration; without its secrets if the key that encrypted it is no longer configured."""
    try:
        return schema.load_snapshot(snapshot_document(snapshot)).config
    except (DecryptionError, schema.ConfigError):
        pass
    try:
        return msgspec.convert(schema.without_removed(_fill_hidden(snapshot.document)), schema.RouterConfig)
    except msgspec.ValidationError as error:
        raise ConflictError(
            f"Configuration {snapshot.number} was written by a release whose format this release cannot read: {error}."
        ) from None


def _fill_hidden(value: Any, name: str = "") -> Any:
    """The document with valid placeholders for hidden secrets."""
    if isinstance(value, dict):
        return {key: _fill_hidden(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill_hidden(inner, name) for inner in value]
    return _PLACEHOLDERS.get(name, value) if value == HIDDEN else value


def _with_settings(fleet: schema.RouterConfig, policy: RoutingPolicy, settings: dict[str, Any]) -> schema.RouterConfig:
    config = schema.PolicyConfig(policy.name, 1, msgspec.convert(settings, schema.Settings))
    return with_policy(fleet, config, pool=policy.pool.name, group=policy.group.name if policy.group else None)


def with_policy(
    config: schema.RouterConfig, policy: schema.PolicyConfig, *, pool: str, group: str | None
) -> schema.RouterConfig:
    """The configuration with another policy for a pool, or for one of its task groups."""

    def replace_policy(candidate: schema.PoolConfig) -> schema.PoolConfig:
        if candidate.name != pool:
            return candidate
        if group is None:
            return replace(candidate, policy=policy)
        groups = (replace(entry, policy=policy) if entry.name == group else entry for entry in candidate.groups)
        return replace(candidate, groups=tuple(groups))

    return replace(config, pools=tuple(replace_policy(candidate) for candidate in config.pools))


# --- routes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """The requests of one task group, or those of a pool outside its task groups (``group`` is None)."""

    pool: schema.PoolConfig
    group: schema.TaskGroupConfig | None

    @property
    def label(self) -> str:
        return f"task group {self.pool.name}.{self.group.name}" if self.group else f"pool {self.pool.name}"

    @property
    def has_own_policy(self) -> bool:
        return self.group is None or self.group.policy is not None

    @property
    def settings(self) -> schema.Settings:
        """Those of the group's own policy, otherwise of the pool's."""
        return ((self.group.policy if self.group else None) or self.pool.policy).settings

    @property
    def tier1(self) -> schema.Tier1 | None:
        """The boundary in use: the group's, the pool's, or the policy's; None if the strategy has none."""
        override = (self.group.tier1 if self.group else None) or self.pool.tier1
        return override or (self.settings.tier1 if isinstance(self.settings, schema.Tier1Settings) else None)

    @cached_property
    def replicas(self) -> tuple[schema.ReplicaConfig, ...]:
        """The active replicas that may get requests of the route; not those with the role prefill."""
        names = self.group.replicas if self.group else None
        active = (replica for replica in self.pool.replicas if replica.state is schema.ReplicaState.ACTIVE)
        return tuple(replica for replica in active if replica.can_decode and (names is None or replica.name in names))

    @cached_property
    def points(self) -> dict[str, int]:
        """Ring points of each data-parallel rank of each replica."""
        return points_of(
            {f"{row.name}#{rank}": row.weight for row in self.replicas for rank in range(row.data_parallel_size)}
        )

    @cached_property
    def shares(self) -> dict[str, float]:
        """Each replica's share of the ring, 0 to 1, all ranks together."""
        total, by_replica = sum(self.points.values()), Counter[str]()
        for name, points in self.points.items():
            by_replica[name.partition("#")[0]] += points
        return {name: points / total for name, points in by_replica.items()}


Routes = Mapping[tuple[str, str], Route]  # by pool and task group; "" for the pool's own


def routes_of(config: schema.RouterConfig) -> Routes:
    return {
        (pool.name, group.name if group else ""): Route(pool, group)
        for pool in config.pools
        for group in (None, *pool.groups)
    }


# --- differences ----------------------------------------------------------------------------------------

# Lists of named objects: a word for one, and how an effect is called if one appears or disappears.
_OBJECTS = {
    "pools": ("pool", "pool_added", "pool_removed"),
    "groups": ("task group", "group_added", "group_removed"),
    "replicas": ("replica", "replica_joined", "replica_left"),
    "keys": ("API key", "key_added", "key_removed"),
}
_ON_RING = frozenset({"state", "weight", "role", "data_parallel_size"})  # fields of a replica
# Fields and branches that decide which requests are accepted, and those that decide the session or group of a request.
_ACCEPTANCE = frozenset({"adapters", "aliases", "allowed_origins", "api_key", "caps", "concurrency", "models", "paths"})
_SESSIONS = frozenset({"match", "session_keys", "hot_ratio"})
_UNSET = {"paths": "all", "session_keys": "the default", "replicas": "all replicas"}  # null, where it is not "none"
_BOUNDARY_FIELDS = {  # used with each boundary
    schema.Boundary.AUTO: ("boundary_bytes",),
    schema.Boundary.SYSTEM: (),
    schema.Boundary.BYTES: ("boundary_bytes",),
    schema.Boundary.MESSAGES: ("boundary_messages",),
    schema.Boundary.MARKER: ("boundary_marker", "boundary_bytes"),
}


def compare_configs(before: schema.RouterConfig, after: schema.RouterConfig) -> list[Effect]:
    """All effects of a change, most severe first; [] if nothing differs. Pure."""
    old, new, severity = routes_of(before), routes_of(after), list(Impact)
    found = find_differences(msgspec.to_builtins(before), msgspec.to_builtins(after))
    differences = [
        part for path, sides in found for part in _with_settings_of_group(_Difference(path, *sides, old, new))
    ]
    effects = [difference.effect() for difference in differences]
    # The number of a revision says nothing beside what the revision changes.
    changed = {effect.path[:length] for effect in effects if effect.kind != "revision" for length in range(7)}
    kept = [effect for effect in effects if not (effect.kind == "revision" and effect.path[:-1] in changed)]
    return sorted(kept, key=lambda effect: severity.index(effect.impact))


def find_differences(before: Any, after: Any, path: Path = ()) -> Iterator[tuple[Path, tuple[Any, Any]]]:
    """Where two JSON documents differ, with both values; None for what one side lacks.

    Canaries, and settings of two strategies, are one difference.
    """
    if before == after:
        return
    old, new = _members(before), _members(after)
    is_whole = path[-2:] == ("policy", "canary") or (
        path[-2:] == ("policy", "settings") and before["strategy"] != after["strategy"]
    )
    if is_whole or old is None or new is None:
        yield path, (before, after)
        return
    for name in dict.fromkeys((*new, *old)):
        yield from find_differences(old.get(name), new.get(name), (*path, name))


def _members(value: Any) -> dict[str, Any] | None:
    """The fields of an object, or the members of a list of named objects by name; None for any other value."""
    if isinstance(value, list | tuple) and all(isinstance(item, dict) and "name" in item for item in value):
        return {str(item["name"]): item for item in value}
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class _Difference:
    """One difference between two configurations, and the routes of both."""

    path: Path
    before: Any
    after: Any
    old: Routes
    new: Routes

    def effect(self) -> Effect:
        match self.field:
            case ():
                return self._membership()
            case ("access",):
                verb = "are rejected with 401" if self.after else "are accepted"
                return self._effect("access", Impact.ACCESS, f"Requests without an API key {verb}.", moved=0.0)
            case ("hash_secret",):
                text = (
                    "The fleet's hash secret changes: every cache starts cold, and hashes in records no longer match."
                )
                return self._effect("hash_secret", Impact.COLD_CACHES, text)
            case ("policy",) | ("policy", "settings"):
                return self._strategy()
            case ("policy", "canary"):
                return self._canary()
            case ("policy", "revision" | "name"):
                return self._effect("revision", Impact.NONE, self._sentence(), moved=0.0)
        return self._effect("field", *self._consequence())

    def _effect(self, kind: str, impact: Impact, text: str, moved: float | None = None) -> Effect:
        """Whole objects are shown by their names."""
        before, after = (
            self.path[-1] if not self.field and side is not None else _hide(side, self.path[-1])
            for side in (self.before, self.after)
        )
        return Effect(kind, impact, self.affected, text, before, after, moved, self.path)

    @cached_property
    def objects(self) -> list[tuple[str, str]]:
        """The named objects that contain the difference, outermost first: (list, name)."""
        steps = self.path[1:] if self.path[:2] == ("access", "keys") else self.path
        pairs = list(zip(steps[::2], steps[1::2], strict=False))
        depth = next((index for index, (step, _) in enumerate(pairs) if step not in _OBJECTS), len(pairs))
        return pairs[:depth]

    @property
    def field(self) -> Path:
        """The path within the innermost object; () for the object itself."""
        skipped = 2 * len(self.objects) + (self.path[:2] == ("access", "keys"))
        return self.path[skipped:]

    @property
    def subject(self) -> str:
        return " of ".join(f"{_OBJECTS[step][0]} {name}" for step, name in reversed(self.objects)) or "every router"

    @property
    def key(self) -> tuple[str, str]:
        """The route of the difference: its task group, otherwise its pool."""
        names = dict(self.objects)
        return names.get("pools", ""), names.get("groups", "")

    @property
    def affected(self) -> tuple[str, ...]:
        names = dict(self.objects)
        if "keys" in names:
            return (f"API key {names['keys']}",)
        if "pools" not in names:
            return ("every request",)
        pool, group = self.key
        routes = [route for side in (self.new, self.old) for (name, _), route in side.items() if name == pool]
        if group:
            routes = [route for route in routes if route.group and route.group.name == group]
        elif "replicas" in names:
            routes = [route for route in routes if names["replicas"] in route.shares] or routes[:1]
        elif self.field[:1] == ("policy",):
            routes = [route for route in routes if route.group is None or not route.has_own_policy]
        else:
            routes = routes[:1]
        return tuple(dict.fromkeys(route.label for route in routes))

    def _membership(self) -> Effect:
        step, _ = self.objects[-1]
        _, added, removed = _OBJECTS[step]
        kind, verb = (added, "added") if self.before is None else (removed, "removed")
        impact, moved = Impact.PLACEMENT, None
        if step == "replicas":
            impact, moved = self._moved_with_replica()
        elif step == "keys" or kind == "pool_removed":
            impact = Impact.ACCESS
        return self._effect(kind, impact, f"{_capital(self.subject)} is {verb}.", moved)

    def _moved_with_replica(self) -> tuple[Impact, float]:
        """The share of the pool's ring that moves to a replica or away from it."""
        (_, pool), (_, replica) = self.objects[:2]
        old, new = (side[pool, ""].shares.get(replica, 0.0) for side in (self.old, self.new))
        if self.field[-1:] == ("data_parallel_size",):  # each rank has its own ring positions
            return Impact.MOVE, max(old, new)
        if old != new:
            return Impact.MOVE, abs(new - old)
        states = [replica_.state for side in (self.old, self.new) for replica_ in side[pool, ""].pool.replicas]
        return Impact.PLACEMENT if schema.ReplicaState.ACTIVE in states else Impact.NONE, 0.0

    def _strategy(self) -> Effect:
        """Another strategy, or a task group's own policy that appears or ends."""
        old, new = self.old[self.key], self.new[self.key]
        before, after = old.settings, new.settings
        if self.field == ("policy",) and before.name == after.name:
            verb, same = "gets" if self.after else "loses", " with the same settings" if before == after else ""
            text = f"{_capital(self.subject)} {verb} a policy of its own{same}."
            return self._effect("policy", Impact.NONE, text, moved=0.0)
        impact, moved = Impact.PLACEMENT, None
        if after.uses_residency:
            if not old.pool.uses_residency:
                impact = Impact.COLD_CACHES  # routers begin to learn what replicas have cached
        elif before.uses_residency:
            impact, moved = Impact.COLD_CACHES, moved_by_chance(new.points)
        text = f"Requests of {self.subject} are placed by {after.name} instead of {before.name}."
        return self._effect("strategy", impact, text, moved)

    def _canary(self) -> Effect:
        old, new = ((side[self.key].group or side[self.key].pool).policy for side in (self.old, self.new))
        if new is not None and new.canary is not None:
            text = f"Revision {new.canary.revision} ({new.canary.settings.name}) of policy {new.name} is a canary for "
            return self._effect("canary", Impact.MOVE, f"{text}{describe_stage(new.canary)}.")
        active = "" if new is None else f"; revision {new.revision} of policy {new.name} places all requests"
        promoted = (
            old is not None and new is not None and old.canary is not None and old.canary.revision == new.revision
        )
        return self._effect("canary", Impact.MOVE if promoted else Impact.NONE, f"The canary ends{active}.")

    def _consequence(self) -> tuple[Impact, str, float | None]:
        """What another value of a field means."""
        text, steps, name = self._sentence(), set(self.field), self.field[-1]
        kind = self.objects[-1][0] if self.objects else ""
        if kind == "replicas" and name in _ON_RING:
            impact, moved = self._moved_with_replica()
            return impact, text, moved
        if "tier1" in steps or steps & set(schema.Tier1.__struct_fields__):
            return self._moved_by_boundary(text)
        if name == "replicas":
            moved_to = self._moved_by_count()
            return (Impact.NONE if moved_to == 0.0 else Impact.MOVE), text, moved_to
        if kind == "keys" or steps & _ACCEPTANCE or (self.field[0] == "limits" and name.startswith("max_")):
            return Impact.ACCESS, text, None
        return (Impact.MOVE if steps & _SESSIONS else Impact.PLACEMENT), text, None

    def _moved_by_count(self) -> float | None:
        """Share that moves if a task group may use other replicas, or a prefix is shared by another number of them."""
        old, new = self.old[self.key], self.new[self.key]
        if self.field == ("replicas",):
            return moved_ratio(old.points, new.points)
        active = max(1, len(new.replicas))
        before, after = min(active, self.before), min(active, self.after)
        return 1.0 - float(min(before, after) / max(before, after))

    def _moved_by_boundary(self, text: str) -> tuple[Impact, str, float | None]:
        """Every prefix gets a new hash if the boundary in use differs and a strategy uses it."""
        old, new = self.old[self.key].tier1, self.new[self.key].tier1
        if old is None or new is None or _in_use(old) == _in_use(new):
            return Impact.NONE, f"{text} It is not used.", 0.0
        if not isinstance(self.new[self.key].settings, schema.Tier1Settings):
            return Impact.NONE, text, 0.0
        if old.boundary is new.boundary and old.boundary in {schema.Boundary.AUTO, schema.Boundary.MARKER}:
            return Impact.MOVE, text, None  # only prompts that are shorter, or lack the marker
        return Impact.MOVE, text, moved_by_chance(self.new[self.key].points)

    def _sentence(self) -> str:
        """The field and both values, with the schema's text."""
        unit, description = _schema_text(self.path)
        old, new = (
            _UNSET.get(self.path[-1], "none") if side is None else format_value(_hide(side, self.path[-1]))
            for side in (self.before, self.after)
        )
        field = ".".join(self.field[2:] if self.field[:2] == ("policy", "settings") else self.field)
        text = f"{_capital(self.subject)}: {field} is {new} instead of {old}{' ' if unit else ''}{unit}."
        if self.path[-1] == "url":
            description = "The replica keeps its ring position; its cache may be cold."
        return f"{text} {description}".strip()


def _with_settings_of_group(difference: _Difference) -> Iterator[_Difference]:
    """The difference; for a policy that a task group gets or loses, also the settings in which it is not the pool's."""
    yield difference
    if difference.field != ("policy",):
        return
    before, after = (side[difference.key].settings for side in (difference.old, difference.new))
    if before.name == after.name:
        path = (*difference.path, "settings")
        for inner, sides in find_differences(msgspec.to_builtins(before), msgspec.to_builtins(after), path):
            yield _Difference(inner, *sides, difference.old, difference.new)


def _in_use(tier1: schema.Tier1) -> tuple[Any, ...]:
    return (tier1.boundary, *(getattr(tier1, field) for field in _BOUNDARY_FIELDS[tier1.boundary]))


# --- text -----------------------------------------------------------------------------------------------


def format_value(value: Any) -> str:
    """A value in operators' notation."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case str():
            return value or "empty"
        case list() | tuple():
            return enumerate_names([format_value(item) for item in value]) or "none"
    return msgspec.json.encode(value).decode()


def enumerate_names(names: Sequence[str], max_names: int = 6) -> str:
    """``a, b and c``; of more than ``max_names`` names the first ones and how many follow."""
    if len(names) > max_names:
        names = [*names[: max_names - 1], f"{len(names) - max_names + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _hide(value: Any, field: str) -> Any:
    """The value without secrets."""
    if field in SECRET_FIELDS and value:
        return HIDDEN
    if isinstance(value, dict):
        return {name: _hide(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(inner, field) for inner in value]
    return value


_Typed = tuple[Any, str, str]  # a type, and the unit and description of its annotation


@cache
def _root_types() -> list[_Typed]:
    return list(_flatten(inspect.type_info(schema.RouterConfig)))


def _schema_text(path: Path) -> tuple[str, str]:
    """Unit and description of a field; "" where the schema has none."""
    types = _root_types()
    for step in path:
        types = [inner for kind, _, _ in types for inner in _member_types(kind, step)]
    return next(((unit, text) for _, unit, text in types if unit or text), ("", ""))


def _member_types(kind: Any, step: str) -> Iterator[_Typed]:
    """The types of a field, or of a member of a list of named objects."""
    if isinstance(kind, inspect.VarTupleType):
        yield from _flatten(kind.item_type)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            if field.encode_name == step:
                yield from _flatten(field.type)


def _flatten(kind: Any, unit: str = "", text: str = "") -> Iterator[_Typed]:
    """The members of a union, without annotations."""
    if isinstance(kind, inspect.Metadata):
        unit = unit or (kind.extra or {}).get("unit", "")
        yield from _flatten(kind.type, unit, text or (kind.extra_json_schema or {}).get("description", ""))
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _flatten(member, unit, text)
    else:
        yield kind, unit, text


# --- warnings -------------------------------------------------------------------------------------------


def warnings_of(config: schema.RouterConfig, pool: str, group: str | None = None) -> list[DraftWarning]:
    """Warnings for the policy of a pool, or of one of its task groups; one of each kind.

    A pool's policy is checked for the task groups that it places too.
    """
    found: dict[str, DraftWarning] = {}
    for (route_pool, route_group), route in routes_of(config).items():
        placed = (not route_group or not route.has_own_policy) if group is None else route_group == group
        if route_pool == pool and placed:
            for warning in _warnings_of_route(route):
                found.setdefault(warning.id, warning)
    return list(found.values())


def _warnings_of_route(route: Route) -> Iterator[DraftWarning]:
    settings, tier1, active = route.settings, route.tier1, len(route.replicas)
    if not active:
        yield DraftWarning(
            "no-active-replica",
            "",
            f"{_capital(route.label)} has no active replica.",
            "Publishing makes nothing worse: its requests get 503 with any policy.",
            "Add or activate a replica on the fleet page.",
        )
    if 2 <= active <= getattr(settings, "replicas", 0):
        yield DraftWarning(
            "prefixes-on-all-replicas",
            "replicas",
            f"Each of the {active} active replicas of {route.label} caches every prefix.",
            "Each conversation still stays on one replica.",
            "Choose fewer replicas per prefix, or session_affinity, which has the same effect.",
        )
    if tier1 is None or not isinstance(settings, schema.Tier1Settings):
        return
    block_tokens = max((replica.block_tokens or 0 for replica in route.replicas), default=0)
    counts_bytes = tier1.boundary in {schema.Boundary.BYTES, schema.Boundary.AUTO}
    if counts_bytes and tier1.boundary_bytes < block_tokens * BYTES_PER_TOKEN:
        yield DraftWarning(
            "prefix-shorter-than-block",
            "boundary_bytes",
            f"A prefix of {tier1.boundary_bytes:,} bytes is about {tier1.boundary_bytes // BYTES_PER_TOKEN:,} tokens, "
            f"less than one KV block of {block_tokens:,}: engines cache whole blocks.",
            "Placement works, but it groups requests that have nothing cacheable in common.",
            "Make the prefix at least one block long.",
        )
    if tier1 != settings.tier1 and settings.tier1 != schema.Tier1():
        yield DraftWarning(
            "boundary-overridden",
            "boundary",
            f"The tier1 setting of the fleet overrides the policy's boundary for requests of {route.label}.",
            "Prefixes end where they ended before.",
            "Change tier1 there, or leave the policy's boundary at its default.",
        )
