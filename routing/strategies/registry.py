"""Every strategy, by the settings that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from routing.core.fleet import Fleet
from routing.schema import (
    LeastLoadSettings,
    LowestCostSettings,
    PolicySettings,
    PrefixHashSettings,
    RoundRobinSettings,
    SessionAffinitySettings,
    Settings,
)
from routing.strategies.least_load import LeastLoad
from routing.strategies.lowest_cost import LowestCost
from routing.strategies.prefix_hash import PrefixHash
from routing.strategies.round_robin import RoundRobin
from routing.strategies.session_affinity import SessionAffinity
from routing.strategies.strategy import Strategy

STRATEGIES: dict[type[PolicySettings], Callable[[Any, Fleet], Strategy]] = {
    LeastLoadSettings: LeastLoad.build,
    LowestCostSettings: LowestCost.build,
    PrefixHashSettings: PrefixHash.build,
    RoundRobinSettings: RoundRobin.build,
    SessionAffinitySettings: SessionAffinity.build,
}


def build_strategy(settings: Settings, fleet: Fleet) -> Strategy:
    """The strategy that the settings ask for, ready to place requests among a fleet."""
    return STRATEGIES[type(settings)](settings, fleet)
