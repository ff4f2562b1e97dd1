"""Every strategy, by the settings that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from routing import schema
from routing.core.group_replicas import GroupReplicas
from routing.strategies.affinity_groups import AffinityGroups
from routing.strategies.cache_aware import CacheAware
from routing.strategies.least_load import LeastLoad
from routing.strategies.least_ttft import LeastTtft
from routing.strategies.lowest_cost import LowestCost
from routing.strategies.power_of_two import PowerOfTwo
from routing.strategies.prefix_hash import PrefixHashStrategy
from routing.strategies.random import Random
from routing.strategies.round_robin import RoundRobin
from routing.strategies.session_affinity import SessionAffinity
from routing.strategies.strategy import Strategy
from routing.strategies.tiered import Tiered

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
