"""Builds the strategy that a policy's settings name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from routing.balancing.replicas import GroupReplicas
from routing.balancing.strategies.affinity_groups import AffinityGroups
from routing.balancing.strategies.baselines import LeastLoad, PowerOfTwo, Random, RoundRobin
from routing.balancing.strategies.cached_prefix import LowestCost
from routing.balancing.strategies.homes import CacheAware, PrefixHashStrategy, SessionAffinity, Tiered
from routing.balancing.strategies.strategy import Strategy
from routing.schema import strategies as schema

STRATEGIES: dict[type[schema.PolicySettings], Callable[[Any, GroupReplicas, int], Strategy]] = {
    schema.AffinityGroupsSettings: lambda settings, replicas, _: AffinityGroups(replicas, settings),
    schema.CacheAwareSettings: lambda settings, replicas, _: CacheAware(replicas, settings),
    schema.LeastLoadSettings: lambda _settings, _replicas, _seed: LeastLoad(),
    schema.LeastTtftSettings: lambda settings, replicas, _: LowestCost(replicas, settings, by_rate=True),
    schema.LowestCostSettings: lambda settings, replicas, _: LowestCost(replicas, settings, by_rate=False),
    schema.PowerOfTwoSettings: lambda _settings, _replicas, seed: PowerOfTwo(random.Random(seed)),  # noqa: S311
    schema.PrefixHashSettings: lambda settings, replicas, _: PrefixHashStrategy(replicas, settings),
    schema.RandomSettings: lambda _settings, _replicas, seed: Random(random.Random(seed)),  # noqa: S311
    schema.RoundRobinSettings: lambda _settings, replicas, seed: RoundRobin(seed, replicas.targets.keys()),
    schema.SessionAffinitySettings: lambda settings, replicas, _: SessionAffinity(replicas, settings),
    schema.TieredSettings: lambda settings, replicas, _: Tiered(replicas, settings),
}


def build_strategy(settings: schema.Settings, replicas: GroupReplicas, seed: int = 0) -> Strategy:
    """The strategy that the settings name; its random choices depend on ``seed``."""
    return STRATEGIES[type(settings)](settings, replicas, seed)
