"""A configuration as routers place by it: for each pool's own requests and each task group, what decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from routing import schema
from routing.schema import moved_by_chance, moved_ratio, points_of

from .effect import Path


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
