"""One configuration at work, and what it says of its replicas."""

from __future__ import annotations

from dataclasses import dataclass

from routing.core.targets import targets_of
from routing.core.types import ReplicaId, TargetId
from routing.placement.placement import Placement
from routing.proxy.clients.access import AccessControl
from routing.proxy.clients.admission import Admission
from routing.proxy.metrics.configured import ConfiguredSeries
from routing.proxy.replicas.health import Checked
from routing.proxy.replicas.link import ReplicaLink
from routing.schema import Limits, PoolConfig, ReplicaConfig, ReplicaState, RouterConfig, StreamUsage


@dataclass(frozen=True, slots=True)
class Serving:
    """One configuration at work. A request keeps the one that it began with."""

    config: RouterConfig
    placement: Placement
    links: dict[str, ReplicaLink]  # by replica name
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


def active_names(config: RouterConfig) -> set[ReplicaId]:
    """The replicas that may get requests."""
    return set(_active(config))


def joined_names(config: RouterConfig, before: RouterConfig) -> list[ReplicaId]:
    """Those that might get none before, or are elsewhere now: a replica that moved is a new one."""
    known = _active(before)
    return [name for name, url in _active(config).items() if known.get(name) != url]


def _active(config: RouterConfig) -> dict[ReplicaId, str]:
    """With their URLs."""
    replicas = (replica for pool in config.pools for replica in pool.replicas)
    return {ReplicaId(it.name): it.url for it in replicas if it.state is ReplicaState.ACTIVE}


def checked_replicas(pool: PoolConfig, links: dict[str, ReplicaLink]) -> list[Checked]:
    """The replicas of a pool whose health is asked for."""
    return [
        Checked(replica.name, links[replica.name].address, pool.health, _asked_for(pool, replica))
        for replica in pool.replicas
        if replica.state is not ReplicaState.DISABLED
    ]


def _asked_for(pool: PoolConfig, replica: ReplicaConfig) -> frozenset[str]:
    """Adapters of which only the replica can tell whether it holds them."""
    return frozenset(adapter.name for adapter in pool.adapters) if replica.adapters is None else frozenset()
