"""One consequence of a change, and the words that consequences share.

A configuration as leaves: path -> value, so that whatever differs can be counted.

A configuration as routers place by it: for each pool's own requests and each task group, what decides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import Any

import msgspec

from routing import schema
from routing.schema import HIDDEN, SECRET_FIELDS, moved_by_chance, moved_ratio, points_of

Path = tuple[str, ...]  # from the configuration's root; lists of named things by their names


class Impact(StrEnum):
    """What a consequence does to requests, the gravest first."""

    RESET = "reset"  # homes are found anew: expect cold caches
    MOVE = "move"  # a part of the prefixes gets another home, and is cold there at first
    REFUSE = "refuse"  # who is let in, or what is taken, changes
    STEER = "steer"  # homes stay; what happens around them changes
    QUIET = "quiet"  # no request is treated differently


GRAVITY = {impact: place for place, impact in enumerate(Impact)}


@dataclass(frozen=True, slots=True)
class Effect:
    """One consequence. ``text`` stands on its own; the other fields are for scripts."""

    kind: str  # what changed, such as "strategy", "replica_left" or "setting"
    impact: Impact
    who: tuple[str, ...]  # whose requests, such as "pool chat" or "task group chat.agents"
    text: str
    before: Any = None  # JSON, secrets hidden; None where it does not exist there
    after: Any = None
    moved_ratio: float | None = None  # the part of their prefixes or sessions that gets another home; None: not known
    paths: tuple[Path, ...] = ()  # the leaves, or whole branches, that it explains

    @property
    def resets(self) -> bool:
        """Whether affinity starts anew."""
        return self.impact is Impact.RESET


def in_order(effects: Sequence[Effect]) -> list[Effect]:
    """The gravest first, otherwise as they were found."""
    return sorted(effects, key=lambda effect: GRAVITY[effect.impact])


def part(ratio: float) -> str:
    """A part of a whole as people say it: 1/8, about 3/4, less than 1 %."""
    if ratio <= 0:
        return "none"
    if ratio >= 0.995:
        return "all"
    near = Fraction(ratio).limit_denominator(16)
    if abs(near - ratio) < 1e-6:
        return str(near)
    if near and abs(float(near) - ratio) < 0.01 * ratio and near.denominator <= 8:
        return f"about {near}"
    return f"about {ratio * 100:.0f} %" if ratio >= 0.01 else "less than 1 %"


def joined(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def some(words: Sequence[str], most: int = 6) -> str:
    """The same, of many only the first ones and how many more."""
    if len(words) <= most:
        return joined(words)
    return f"{', '.join(words[: most - 1])} and {len(words) - most + 1} more"


def several(number: int, noun: str) -> str:
    """1 replica, 2 replicas."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shown(value: Any, field: str = "") -> str:
    """A value as an operator writes it; never a secret's."""
    if field in SECRET_FIELDS and value:
        return HIDDEN
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value or "nothing"
    if isinstance(value, list | tuple):
        return some([shown(one) for one in value]) or "none"
    return msgspec.json.encode(value).decode()


def leaves_of(config: schema.Frozen | None) -> dict[Path, Any]:
    """Every value of a configuration, secrets included: for comparing, never for showing.

    Lists of things with names are laid out by name, so that their order and their neighbours do not matter; any other
    list is one value.
    """
    found: dict[Path, Any] = {}
    if config is not None:
        _lay_out(msgspec.to_builtins(config), (), found)
    return found


class Differences(dict[Path, tuple[Any, Any]]):
    """Leaves that are not the same, each with its value before and after."""

    def under(self, *places: Path) -> tuple[Path, ...]:
        """Those that are one of these places, or hang on one."""
        return tuple(dict.fromkeys(path for place in places for path in self._by_branch.get(place, ())))

    @cached_property
    def _by_branch(self) -> dict[Path, list[Path]]:
        found: dict[Path, list[Path]] = defaultdict(list)
        for path in self:
            for place in (*_above(path), path):
                found[place].append(path)
        return found


def differing(before: dict[Path, Any], after: dict[Path, Any]) -> Differences:
    """The leaves that are not the same, in the order of ``after``, then of ``before``; None where there is none.

    Where nothing (None) became a whole branch, or the other way round, that is one difference, at the branch.
    """
    branches = _branches(before) | _branches(after)
    found = Differences()
    for path in dict.fromkeys((*after, *before)):
        old, new = before.get(path, _MISSING), after.get(path, _MISSING)
        if old == new or (path in branches and (_is_empty(old) or _is_empty(new))):
            continue  # the same, or an empty list that got members: those differ by themselves
        place = next(
            (up for up in _above(path) if before.get(up, _MISSING) is None or after.get(up, _MISSING) is None), path
        )
        if place in branches:
            found[place] = (_below(before, place), _below(after, place))
        else:
            found[place] = (before.get(path), after.get(path))
    return found


def explained(path: Path, by: Container[Path]) -> bool:
    """Whether one of the paths is this leaf, or a branch that it hangs on; ``by`` had better be a set."""
    return path in by or any(branch in by for branch in _above(path))


_MISSING = object()


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def _above(path: Path) -> Iterable[Path]:
    """The branches that a leaf hangs on, from the root."""
    return (path[:length] for length in range(1, len(path)))


def _branches(leaves: dict[Path, Any]) -> set[Path]:
    return {up for path in leaves for up in _above(path)}


def _below(leaves: dict[Path, Any], place: Path) -> Any:
    """The value at a place: a leaf's own, or a branch as leaves by the rest of their paths; None where it is not."""
    if place in leaves:
        return leaves[place]
    depth = len(place)
    return {".".join(path[depth:]): value for path, value in leaves.items() if path[:depth] == place} or None


def _lay_out(value: Any, path: Path, found: dict[Path, Any]) -> None:
    named = _by_name(value)
    if named is None:
        found[path] = value
        return
    if not named:
        found[path] = type(value)()  # something that is there and empty is not the same as nothing
    for name, inner in named.items():
        _lay_out(inner, (*path, name), found)


def _by_name(value: Any) -> dict[str, Any] | None:
    """The inner values of a branch by name; None for a leaf."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(one, dict) and "name" in one for one in value):
        return {str(one["name"]): one for one in value}
    return None


@dataclass(frozen=True)
class Route:
    """One pool's own requests (``group`` is None), or those of one task group."""

    pool: schema.PoolConfig
    group: schema.TaskGroupConfig | None

    @property
    def who(self) -> str:
        """Its name in a sentence."""
        return f"task group {self.pool.name}.{self.group.name}" if self.group else f"pool {self.pool.name}"

    @property
    def policy(self) -> schema.PolicyConfig:
        """The policy in force: the group's own, else its pool's."""
        return (self.group.policy if self.group else None) or self.pool.policy

    @property
    def policy_path(self) -> Path:
        """Where that policy stands."""
        own = self.group is not None and self.group.policy is not None
        return (*self.path, "policy") if own else ("pools", self.pool.name, "policy")

    @property
    def path(self) -> Path:
        """Where it stands itself."""
        base = ("pools", self.pool.name)
        return (*base, "groups", self.group.name) if self.group else base

    @property
    def settings(self) -> schema.Settings:
        """The settings that place its requests."""
        return self.policy.settings

    @property
    def tier1(self) -> schema.Tier1 | None:
        """Where its openings end; None where the strategy and everybody else leave that open."""
        said = (self.group.tier1 if self.group else None) or self.pool.tier1
        if said is not None:
            return said
        return self.settings.tier1 if isinstance(self.settings, schema.Tier1Settings) else None

    @cached_property
    def replicas(self) -> tuple[schema.ReplicaConfig, ...]:
        """Those that it may use and that take new requests."""
        names = self.group.replicas if self.group else None
        allowed = (one for one in self.pool.replicas if names is None or one.name in names)
        return tuple(one for one in allowed if one.state is schema.ReplicaState.ACTIVE)

    @cached_property
    def points(self) -> dict[str, int]:
        """What each of them, or each rank of it, owns on the ring."""
        return points_of({name: one.weight for one in self.replicas for name in _targets(one)})

    @cached_property
    def shares(self) -> dict[str, float]:
        """Each replica's part of the homes, 0 to 1, of all its ranks together."""
        total, mine = sum(self.points.values()), Counter[str]()
        for name, points in self.points.items():
            mine[name.partition("#")[0]] += points
        return {name: points / total for name, points in mine.items()}

    def share(self, replica: str) -> float:
        """A replica's part of the homes; 0 where it takes none."""
        return self.shares.get(replica, 0.0)

    def moved_to(self, after: Route) -> float | None:
        """The part of the homes that is another replica's there."""
        return moved_ratio(self.points, after.points)

    @property
    def by_chance(self) -> float:
        """The part of the homes that moves when all keys are hashed anew."""
        return moved_by_chance(self.points)


def routes_of(config: schema.RouterConfig | None) -> dict[tuple[str, str], Route]:
    """Every route by pool and group; "" for the pool's own."""
    return {(one.pool.name, one.group.name if one.group else ""): one for one in _routes(config)}


def _routes(config: schema.RouterConfig | None) -> Iterable[Route]:
    for pool in config.pools if config else ():
        yield Route(pool, None)
        for group in pool.groups:
            yield Route(pool, group)


def _targets(replica: schema.ReplicaConfig) -> Iterable[str]:
    """What has points on the ring: the replica, or each of its data-parallel ranks."""
    if replica.data_parallel_size == 1:
        return (replica.name,)
    return (f"{replica.name}#{rank}" for rank in range(replica.data_parallel_size))
