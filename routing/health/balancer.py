"""Replica state that all parts of a router share: loads, residency, health, circuit breakers, retry budget."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from routing.balancing.health import HealthRegistry, SlowStarts
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Placement
from routing.balancing.rates import TokenRatios
from routing.balancing.residency import Residency
from routing.health.circuit_breaker import CircuitBreakers
from routing.limits.budgets import RetryBudget
from routing.log import event
from routing.schema import Limits, ReplicaState, RouterConfig
from routing.types import ReplicaId
from routing.upstream.pool import ConnectionPool

logger: Final = logging.getLogger(__name__)


class ActiveFleet:
    """The replicas of the active configuration: where requests are placed, and the connections to each replica."""

    def __init__(self, config: RouterConfig, placement: Placement, connection_pools: dict[str, ConnectionPool]) -> None:
        self.config = config
        self.placement = placement
        self.connection_pools = connection_pools  # by replica name


class Balancer:
    """The shared state. ``fleet`` is replaced as a whole with each configuration; None before the first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        limits = Limits()
        self.loop = loop
        self.fleet: ActiveFleet | None = None
        self.loads = LoadTracker()
        self.residency = Residency()
        self.token_ratios = TokenRatios()
        self.health = HealthRegistry()
        self.slow_starts = SlowStarts(self.health)
        self.breakers = CircuitBreakers(self.health, loop.time, self._on_readmitted)
        self.retry_budget = RetryBudget(limits.retry_ratio, limits.retry_floor_per_s)

    def record_failure(self, replica: str, reason: str, *, was_probe: bool) -> None:
        """Count a failed request against a replica's circuit breaker. Health checks do not see such failures."""
        if self.breakers.record_failure(ReplicaId(replica), reason, was_probe=was_probe):
            event(logger, "replica_ejected", level=logging.WARNING, replica=replica, reason=reason)

    def begin_slow_start(self, replica: ReplicaId) -> None:
        """Let a replica take traffic, at first only a part of its share."""
        self.slow_starts.begin(replica, self.breakers.settings(replica).slow_start_s, self.loop.time())

    def progress_at(self, replica: str) -> float:
        """Loop time of the latest body byte from a replica; 0 if there was none."""
        connections = self.fleet.connection_pools.get(replica) if self.fleet is not None else None
        return connections.progress_at if connections is not None else 0.0

    def _on_readmitted(self, replica: ReplicaId) -> None:
        event(logger, "replica_readmitted", replica=replica)
        self.begin_slow_start(replica)


def active_replicas(config: RouterConfig) -> dict[ReplicaId, str]:
    """The URLs of the replicas that may get requests, by name."""
    replicas = (replica for pool in config.pools for replica in pool.replicas)
    return {ReplicaId(it.name): it.url for it in replicas if it.state is ReplicaState.ACTIVE}


def joined_replicas(config: RouterConfig, before: RouterConfig) -> list[ReplicaId]:
    """Replicas that could get no requests before, or that have another URL now and thus another cache."""
    previous = active_replicas(before)
    return [name for name, url in active_replicas(config).items() if previous.get(name) != url]
