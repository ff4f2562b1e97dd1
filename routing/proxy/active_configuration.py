"""One configuration at work, and what it says of its replicas."""

from __future__ import annotations

from dataclasses import dataclass

from routing.balancing.placement import Placement
from routing.balancing.replicas import targets_of
from routing.health.checks import Checked
from routing.http.auth import AccessControl
from routing.observability.metrics import ConfiguredSeries
from routing.proxy.admission import Admission
from routing.schema import Limits, PoolConfig, ReplicaConfig, ReplicaState, RouterConfig, StreamUsage
from routing.types import TargetId
from routing.upstream.pool import ConnectionPool


@dataclass(frozen=True, slots=True)
class ActiveConfiguration:
    """One configuration at work. A request keeps the one that it began with."""

    config: RouterConfig
    placement: Placement
    connection_pools: dict[str, ConnectionPool]  # by replica name
    access: AccessControl | None  # None: everybody is let in
    admission: Admission
    series: ConfiguredSeries
    limits: Limits  # what is accepted and how long anything may take
    targets: frozenset[TargetId]  # where its requests may go
    checked: list[Checked]  # whose health is asked for
    usage_pools: frozenset[str]  # where engines are asked for the usage of every stream


def target_ids(config: RouterConfig) -> list[TargetId]:
    """The targets of all pools: replicas, or their ranks."""
    return [target.id for pool in config.pools for replica in pool.replicas for target in targets_of(replica)]


def usage_pools(config: RouterConfig) -> frozenset[str]:
    """The pools whose engines are asked for the usage of every stream."""
    return frozenset(pool.name for pool in config.pools if pool.stream_usage is StreamUsage.REQUEST)


def checked_replicas(pool: PoolConfig, connection_pools: dict[str, ConnectionPool]) -> list[Checked]:
    """The replicas of a pool whose health is asked for."""
    return [
        Checked(replica.name, connection_pools[replica.name].address, pool.health, _asked_for(pool, replica))
        for replica in pool.replicas
        if replica.state is not ReplicaState.DISABLED
    ]


def _asked_for(pool: PoolConfig, replica: ReplicaConfig) -> frozenset[str]:
    """Adapters of which only the replica can tell whether it holds them."""
    return frozenset(adapter.name for adapter in pool.adapters) if replica.adapters is None else frozenset()
