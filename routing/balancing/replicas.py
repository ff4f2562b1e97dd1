"""Targets of requests (replicas, or the data-parallel ranks of one), and the eligible targets of a task group.

A replica with several ranks has one address, and ``X-data-parallel-rank`` selects the rank. Each rank has its own KV
cache and queue, so each is a target with points on the ring, a load and estimated cached blocks. Health, circuit
breaker, connections and the name in metrics belong to the replica as a whole. Where this package speaks of a replica's
load, ring points or cached blocks, it means a target's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from routing.balancing.candidates import Candidates
from routing.balancing.hash_ring import HashRing
from routing.balancing.health import HealthRegistry
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.residency import Residency
from routing.balancing.shared_rings import SharedRing, shared_ring
from routing.schema import ReplicaConfig, ReplicaState
from routing.types import ReplicaId, TargetId

RANK_SEPARATOR: Final = "#"  # not allowed in a replica's name


class Target(NamedTuple):
    """A replica, or one of its ranks."""

    id: TargetId
    replica: ReplicaConfig
    rank: int | None  # None: the replica has only one


def rank_of(target: TargetId) -> int | None:
    """The data-parallel rank of a target; None if its replica has only one."""
    _, separator, rank = target.partition(RANK_SEPARATOR)
    return int(rank) if separator else None


def targets_of(replica: ReplicaConfig) -> Iterator[Target]:
    """A replica's ranks, or the replica itself if it has only one."""
    if replica.data_parallel_size == 1:
        yield Target(TargetId(replica.name), replica, None)
        return
    for rank in range(replica.data_parallel_size):
        yield Target(TargetId(f"{replica.name}{RANK_SEPARATOR}{rank}"), replica, rank)


class GroupReplicas:
    """The configured replicas of one task group, or of a whole pool.

    All of them are on the ring, whatever their state, so that the keys of a draining or unhealthy replica return to it,
    and no other key moves.
    """

    def __init__(
        self, replicas: Iterable[ReplicaConfig], loads: LoadTracker, seed: int = 0, residency: Residency | None = None
    ) -> None:
        self.targets = {target.id: target for replica in replicas for target in targets_of(replica)}
        self.residency = Residency() if residency is None else residency
        self.loads = loads
        self.seed = seed
        self._epoch: int | None = None
        self._candidates = Candidates({}, loads, seed)
        self._ring: SharedRing[TargetId] | None = None  # from here on: computed on first use
        self._by_replica: dict[ReplicaId, list[TargetId]] | None = None
        self._bits: dict[TargetId, int] | None = None
        self._with_adapter: dict[str, Candidates] = {}

    @property
    def ring(self) -> HashRing[TargetId]:
        """Hash ring of all configured replicas."""
        if self._ring is None:
            self._ring = shared_ring({name: target.replica.weight for name, target in self.targets.items()})
        return self._ring.ring

    def candidates(self, health: HealthRegistry, adapter: str = "") -> Candidates:
        """Targets that are active and up, with their current weights. O(replicas) after a change of health.

        With ``adapter``, only those that have this adapter of the pool.
        """
        if health.epoch != self._epoch:
            self._epoch = health.epoch
            self._candidates = self._eligible(health)
            self._with_adapter = {}
        if not adapter:
            return self._candidates
        candidates = self._with_adapter.get(adapter)
        if candidates is None:
            names = [name for name in self._candidates if self.has_adapter(name, adapter, health)]
            candidates = self._with_adapter[adapter] = self._candidates.subset(names)
        return candidates

    def prepare(self, health: HealthRegistry) -> Iterator[None]:
        """Compute what the next request would otherwise wait for; yields between the steps."""
        self._residency_bits()
        yield
        yield from self.candidates(health).prepare()

    def targets_of_replica(self, replica: ReplicaId) -> list[TargetId]:
        """The targets of one of its replicas; empty for any other."""
        targets = self._by_replica
        if targets is None:
            targets = self._by_replica = {}
            for name, target in self.targets.items():
                targets.setdefault(ReplicaId(target.replica.name), []).append(name)
        return targets.get(replica, [])

    def eligible_targets(
        self, replicas: Iterable[ReplicaId], candidates: Candidates, limit: int | None = None
    ) -> list[list[TargetId]]:
        """The targets among candidates, for each of the first ``limit`` replicas that have any."""
        by_replica = ([name for name in self.targets_of_replica(replica) if name in candidates] for replica in replicas)
        return list(islice((targets for targets in by_replica if targets), limit))

    def has_adapter(self, name: TargetId, adapter: str, health: HealthRegistry) -> bool:
        """Whether a target has an adapter: by its replica's configuration, else by what the replica reported."""
        replica = self.targets[name].replica
        adapters = replica.adapters
        return health.has_adapter(ReplicaId(replica.name), adapter) if adapters is None else adapter in adapters

    def _eligible(self, health: HealthRegistry) -> Candidates:
        shares, weights = {}, {}
        for name, replica, _rank in self.targets.values():
            id_ = ReplicaId(replica.name)
            if replica.state is ReplicaState.ACTIVE and health.is_up(id_):
                share = health.share(id_)
                weights[name] = replica.weight * share
                if share < 1.0:
                    shares[name] = share
        return Candidates(weights, self.loads, self.seed, self._residency_bits(), shares)

    def _residency_bits(self) -> dict[TargetId, int]:
        """Each target's bit in the residency, to which the targets are added with their reported capacities."""
        if self._bits is None:
            self._bits = {}
            for name, replica, _rank in self.targets.values():
                is_reported = replica.capacity_blocks is not None and replica.block_tokens is not None
                tokens = (replica.capacity_blocks or 0) * (replica.block_tokens or 0) if is_reported else None
                self._bits[name] = self.residency.add_replica(name, tokens).bit
        return self._bits
