"""The endpoints of a configuration: ``ip:port`` of each replica, as Envoy and the picker name it."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from routing.log import event
from routing.types import ReplicaId

if TYPE_CHECKING:
    from routing.balancing.placement import Decision
    from routing.proxy.services import ActiveConfiguration
    from routing.schema import ReplicaConfig
    from routing.types import TargetId
    from routing.upstream.pool import Address

MAX_COMPARED = 64  # candidates among which a fallback is chosen

logger = logging.getLogger(__name__)


def endpoint_of(address: Address) -> str | None:
    """``ip:port`` of a replica, IPv6 in brackets; None if its URL has a host name, a path, or https.

    Envoy connects to an IP address, and sends the client's path. Whether it uses TLS is set in its cluster.
    """
    try:
        ip = ipaddress.ip_address(address.host)
    except ValueError:
        return None
    if address.base or address.ssl_context is not None:
        return None
    return f"[{ip}]:{address.port}" if ip.version == 6 else f"{ip}:{address.port}"


def normalized(endpoint: str) -> str:
    """An endpoint as ``endpoint_of`` writes it; unchanged if it is none."""
    host, _, port = endpoint.strip().rpartition(":")
    if not host.startswith("["):
        return f"{host}:{port}"
    try:
        return f"[{ipaddress.IPv6Address(host[1:-1])}]:{port}"
    except ValueError:
        return endpoint


class Endpoints:
    """The endpoints of one configuration."""

    def __init__(self, active: ActiveConfiguration) -> None:
        self.active = active
        self._replicas = {ReplicaId(replica.name): replica for pool in active.config.pools for replica in pool.replicas}
        by_replica = {name: endpoint_of(active.connection_pools[name].address) for name in self._replicas}
        self._by_replica = {name: endpoint for name, endpoint in by_replica.items() if endpoint is not None}
        self._by_endpoint = {endpoint: name for name, endpoint in self._by_replica.items()}
        self._without_endpoint = frozenset(self._replicas.keys() - self._by_replica.keys())
        for name in sorted(self._without_endpoint):
            reason = "its URL is not http://IP:PORT"
            event(logger, "replica_not_pickable", level=logging.WARNING, replica=name, reason=reason)

    def excluded(self, subset: Collection[str] | None) -> frozenset[ReplicaId]:
        """The replicas that must not be chosen. ``subset``: the only permitted endpoints; None: all."""
        if subset is None:
            return self._without_endpoint
        permitted = {self._by_endpoint.get(normalized(endpoint)) for endpoint in subset}
        return frozenset(self._replicas.keys() - permitted)

    def of(self, decision: Decision) -> str:
        """The endpoint of the chosen replica, which is not among the excluded ones."""
        return self._by_replica[ReplicaId(decision.replica.name)]

    def fallbacks(self, decision: Decision, count: int) -> list[Decision]:
        """Up to ``count`` decisions for other endpoints, in the order in which Envoy should try them.

        Envoy sends the same headers to all of them. So they have the API key of the first, and the same rank.
        """
        fallbacks: list[Decision] = []
        placement, targets = self.active.placement, decision.route.replicas.targets
        others = [name for name in decision.other_candidates(MAX_COMPARED) if _gets_same_headers(decision, name)]
        while others and len(fallbacks) < count:
            fallback = placement.decide_fallback(decision, others)
            fallbacks.append(fallback)
            others = [name for name in others if targets[name].replica is not fallback.replica]
        return fallbacks

    def replica_at(self, endpoint: str) -> ReplicaConfig | None:
        """The replica at an endpoint; None if it is in no pool."""
        name = self._by_endpoint.get(normalized(endpoint))
        return None if name is None else self._replicas[name]


def _gets_same_headers(decision: Decision, name: TargetId) -> bool:
    """Whether another candidate is another replica, and needs the same headers as the chosen one."""
    chosen, other = decision.target, decision.route.replicas.targets[name]
    return (
        other.replica is not chosen.replica
        and other.rank == chosen.rank
        and other.replica.api_key == chosen.replica.api_key
    )


def joined(endpoints: Iterable[str]) -> str:
    """Endpoints as the header and the metadata name them, in order."""
    return ",".join(endpoints)
