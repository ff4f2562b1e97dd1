"""Building blocks of change impact: effects, flattened configurations, routes, and text helpers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

from routing import schema
from routing.schema import HIDDEN, SECRET_FIELDS, points_of

Path = tuple[str, ...]  # from the configuration's root; members of a list of named objects by their names


class Impact(StrEnum):
    """What an effect means for requests, most severe first."""

    COLD_CACHES = "cold_caches"  # prefixes get new preferred replicas: caches are cold at first
    MOVE = "move"  # some prefixes move to another replica and are cold there at first
    ACCESS = "access"  # requests that were accepted are rejected, or the reverse
    PLACEMENT = "placement"  # requests are placed differently, but prefixes keep their preferred replicas
    NONE = "none"  # requests are treated as before


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect of a change. ``text`` is a complete description; the other fields are for scripts."""

    kind: str  # what changed, such as "strategy", "replica_left" or "setting"
    impact: Impact
    affected: tuple[str, ...]  # whose requests, such as "pool chat" or "task group chat.agents"
    text: str
    before: Any = None  # JSON without secrets; None where it does not exist
    after: Any = None
    moved_ratio: float | None = None  # share of prefixes or conversations that move to another replica; None: unknown
    paths: tuple[Path, ...] = ()  # the leaves, or branches, that this effect explains


def sort_by_severity(effects: Iterable[Effect]) -> list[Effect]:
    severity = list(Impact)
    return sorted(effects, key=lambda effect: severity.index(effect.impact))


# --- text -----------------------------------------------------------------------------------------------


def percent(ratio: float) -> str:
    """Format a ratio: ``87.5 %``, ``5 %``, ``less than 1 %``."""
    return "less than 1 %" if 0 < ratio < 0.01 else f"{ratio * 100:.3g} %"


def enumerate_names(names: Sequence[str], max_names: int = 6) -> str:
    """``a, b and c``; of more than ``max_names`` names the first ones and how many follow."""
    if len(names) > max_names:
        names = [*names[: max_names - 1], f"{len(names) - max_names + 1} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def format_count(number: int, singular: str) -> str:
    """``1 replica``, ``2 replicas``."""
    return f"{number:,} {singular}{'' if number == 1 else 's'}"


def format_value(value: Any, field: str = "") -> str:
    """A value in operators' notation; secrets are hidden."""
    if field in SECRET_FIELDS and value:
        return HIDDEN
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


# --- flattened configurations ------------------------------------------------------------------------------


class Differences(dict[Path, tuple[Any, Any]]):
    """Differing leaves, each with its value before and after."""

    def under(self, *branches: Path) -> tuple[Path, ...]:
        """The differing leaves at or below the branches."""
        return tuple(dict.fromkeys(path for branch in branches for path in self._by_branch.get(branch, ())))

    @cached_property
    def _by_branch(self) -> dict[Path, list[Path]]:
        paths: dict[Path, list[Path]] = defaultdict(list)
        for path in self:
            for branch in (*_branches_of(path), path):
                paths[branch].append(path)
        return paths


def leaves_of(config: schema.Frozen | None) -> dict[Path, Any]:
    """A configuration as path -> value; an empty list is a leaf too."""
    leaves: dict[Path, Any] = {}
    if config is not None:
        _flatten(msgspec.to_builtins(config), (), leaves)
    return leaves


def find_differences(before: dict[Path, Any], after: dict[Path, Any]) -> Differences:
    """The leaves that differ, in the order of ``after``, then of ``before``; None stands for a missing leaf.

    A branch that replaces None, or is replaced by it, is one difference, at the branch.
    """
    branches = {branch for path in (*before, *after) for branch in _branches_of(path)}
    differences = Differences()
    for path in dict.fromkeys((*after, *before)):
        old, new = before.get(path, _MISSING), after.get(path, _MISSING)
        if old == new or (path in branches and (_is_empty(old) or _is_empty(new))):
            continue  # a list that got its first members, or lost its last: the members differ themselves
        null_branches = (
            branch
            for branch in _branches_of(path)
            if None in (before.get(branch, _MISSING), after.get(branch, _MISSING))
        )
        topmost = next(null_branches, path)
        differences[topmost] = (_value_at(before, topmost, branches), _value_at(after, topmost, branches))
    return differences


def is_explained(path: Path, described: Container[Path]) -> bool:
    """Whether ``described`` contains the leaf or a branch above it."""
    return path in described or any(branch in described for branch in _branches_of(path))


_MISSING = object()


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def _branches_of(path: Path) -> Iterable[Path]:
    """The branches above a leaf, from the root."""
    return (path[:length] for length in range(1, len(path)))


def _value_at(leaves: dict[Path, Any], path: Path, branches: set[Path]) -> Any:
    """A leaf's value, or a branch as leaves by their remaining paths; None if missing."""
    if path in leaves or path not in branches:
        return leaves.get(path)
    depth = len(path)
    return {".".join(leaf[depth:]): value for leaf, value in leaves.items() if leaf[:depth] == path} or None


def _flatten(value: Any, path: Path, leaves: dict[Path, Any]) -> None:
    is_list = isinstance(value, list | tuple)
    if is_list and value and all(isinstance(item, dict) and "name" in item for item in value):
        value = {str(item["name"]): item for item in value}
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(inner, (*path, name), leaves)
    else:
        leaves[path] = value


# --- routes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """The requests of one task group, or those of a pool outside its task groups (``group`` is None)."""

    pool: schema.PoolConfig
    group: schema.TaskGroupConfig | None

    @property
    def label(self) -> str:
        return f"task group {self.pool.name}.{self.group.name}" if self.group else f"pool {self.pool.name}"

    @property
    def path(self) -> Path:
        base = ("pools", self.pool.name)
        return (*base, "groups", self.group.name) if self.group else base

    @property
    def policy(self) -> schema.PolicyConfig:
        """The group's own policy, otherwise the pool's."""
        return (self.group.policy if self.group else None) or self.pool.policy

    @property
    def policy_path(self) -> Path:
        has_own_policy = self.group is not None and self.group.policy is not None
        return (*self.path, "policy") if has_own_policy else ("pools", self.pool.name, "policy")

    @property
    def settings(self) -> schema.Settings:
        return self.policy.settings

    @property
    def tier1(self) -> schema.Tier1 | None:
        """The boundary in use: the group's, the pool's, or the policy's; None if the strategy has none."""
        override = (self.group.tier1 if self.group else None) or self.pool.tier1
        if override is not None:
            return override
        return self.settings.tier1 if isinstance(self.settings, schema.Tier1Settings) else None

    @cached_property
    def replicas(self) -> tuple[schema.ReplicaConfig, ...]:
        """The active replicas that may get requests of the route; not those with the role prefill."""
        names = self.group.replicas if self.group else None
        active = (replica for replica in self.pool.replicas if replica.state is schema.ReplicaState.ACTIVE)
        return tuple(replica for replica in active if replica.can_decode and (names is None or replica.name in names))

    @cached_property
    def points(self) -> dict[str, int]:
        """Ring points of each replica, or of each of its data-parallel ranks."""
        return points_of({name: replica.weight for replica in self.replicas for name in _ring_names(replica)})

    @cached_property
    def shares(self) -> dict[str, float]:
        """Each replica's share of the ring, 0 to 1, all ranks together."""
        total, by_replica = sum(self.points.values()), Counter[str]()
        for name, points in self.points.items():
            by_replica[name.partition("#")[0]] += points
        return {name: points / total for name, points in by_replica.items()}


def routes_of(config: schema.RouterConfig | None) -> dict[tuple[str, str], Route]:
    """Every route by pool and task group; "" for the pool's own."""
    return {
        (pool.name, group.name if group else ""): Route(pool, group)
        for pool in (config.pools if config else ())
        for group in (None, *pool.groups)
    }


def _ring_names(replica: schema.ReplicaConfig) -> Iterator[str]:
    if replica.data_parallel_size == 1:
        yield replica.name
    else:
        yield from (f"{replica.name}#{rank}" for rank in range(replica.data_parallel_size))
