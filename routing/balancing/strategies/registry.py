"""Every strategy, by the settings that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from routing import schema
from routing.balancing.replicas import GroupReplicas
from routing.balancing.strategies.affinity_groups import AffinityGroups
from routing.balancing.strategies.baselines import LeastLoad, PowerOfTwo, Random, RoundRobin
from routing.balancing.strategies.cache_aware import CacheAware
from routing.balancing.strategies.hashing import PrefixHashStrategy, SessionAffinity, Tiered
from routing.balancing.strategies.lowest_cost import LeastTtft, LowestCost
from routing.balancing.strategies.strategy import Strategy

STRATEGIES: dict[type[schema.PolicySettings], Callable[[Any, GroupReplicas, int], Strategy]] = {
    schema.AffinityGroupsSettings: AffinityGroups.build,
    schema.CacheAwareSettings: CacheAware.build,
    schema.LeastLoadSettings: LeastLoad.build,
    schema.LeastTtftSettings: LeastTtft.build,
    schema.LowestCostSettings: LowestCost.build,
    schema.PowerOfTwoSettings: PowerOfTwo.build,
    schema.PrefixHashSettings: PrefixHashStrategy.build,
    schema.RandomSettings: Random.build,
    schema.RoundRobinSettings: RoundRobin.build,
    schema.SessionAffinitySettings: SessionAffinity.build,
    schema.TieredSettings: Tiered.build,
}


def build_strategy(settings: schema.Settings, replicas: GroupReplicas, seed: int = 0) -> Strategy:
    """The strategy that the settings ask for, ready to place requests; what it draws follows the seed."""
    return STRATEGIES[type(settings)](settings, replicas, seed)
