"""What requests are placed at: replicas, or the data-parallel ranks of one.

A replica with several ranks answers at one address, and ``X-data-parallel-rank`` says which rank computes. Each rank
has a KV cache and a queue of its own, so each is a target: with points on the ring, a load and a residency. What is of
the server as a whole stays the replica's: its health, its breaker, its connections, its name in figures. Where texts
speak of a replica's load, home or holding, a target's is meant.

The configured replicas that one group may use, and which of them are eligible now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from routing.balancing.candidates import Candidates
from routing.balancing.hash_ring import HashRing
from routing.balancing.health import Health
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.replica_blocks import ReplicaBlocks
from routing.balancing.residency import Residency
from routing.balancing.shared_rings import SharedRing, shared_ring
from routing.schema import ReplicaConfig, ReplicaState
from routing.types import ReplicaId, TargetId

MARK: Final = "#"  # between a replica's name, in which it cannot stand, and a rank


class Target(NamedTuple):
    """Where a request can go."""

    id: TargetId
    replica: ReplicaConfig
    rank: int | None  # None: the replica has only one


def rank_of(target: TargetId) -> int | None:
    """The data-parallel rank that a target is; None where its replica has only one."""
    _, mark, rank = target.partition(MARK)
    return int(rank) if mark else None


def targets_of(replica: ReplicaConfig) -> Iterator[Target]:
    """A replica's ranks, or itself."""
    if replica.data_parallel_size == 1:
        yield Target(TargetId(replica.name), replica, None)
        return
    for rank in range(replica.data_parallel_size):
        yield Target(TargetId(f"{replica.name}{MARK}{rank}"), replica, rank)


class GroupReplicas:
    """One group's, or a whole pool's.

    All of them are on the ring, whatever their state: one that drains or is down keeps its place, so that its keys
    come back to it and no other key moves.
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
        self._ring: SharedRing[TargetId] | None = None  # from here on: made when they are first asked for
        self._by_replica: dict[ReplicaId, list[TargetId]] | None = None
        self._bits: dict[TargetId, int] | None = None
        self._holders: dict[str, Candidates] = {}  # of them, those that hold an adapter, by its name

    @property
    def ring(self) -> HashRing[TargetId]:
        """Home order of all configured replicas."""
        if self._ring is None:
            self._ring = shared_ring({name: target.replica.weight for name, target in self.targets.items()})
        return self._ring.ring

    def candidates(self, health: Health, adapter: str = "") -> Candidates:
        """Replicas that are active and up, by what weight each has now. O(replicas) after a change of health.

        With ``adapter`` only those that hold it; one of the pool's, so that no more are remembered than there are.
        """
        if health.epoch != self._epoch:
            self._epoch = health.epoch
            self._candidates = self._eligible(health)
            self._holders = {}
        if not adapter:
            return self._candidates
        holders = self._holders.get(adapter)
        if holders is None:
            names = [name for name in self._candidates if self.holds(name, adapter, health)]
            holders = self._holders[adapter] = self._candidates.only(names)
        return holders

    def prepare(self, health: Health) -> Iterator[None]:
        """Make what the next request would otherwise wait for; stops where others may have their turn."""
        self._settle()
        yield
        yield from self.candidates(health).prepare()

    def targets_of_replica(self, replica: ReplicaId) -> list[TargetId]:
        """The targets of one of its replicas; none of any other."""
        targets = self._by_replica
        if targets is None:
            targets = self._by_replica = {}
            for name, target in self.targets.items():
                targets.setdefault(ReplicaId(target.replica.name), []).append(name)
        return targets.get(replica, [])

    def present(
        self, replicas: Iterable[ReplicaId], candidates: Candidates, limit: int | None = None
    ) -> list[list[TargetId]]:
        """The targets, replica by replica, of the first ``limit`` replicas that have any among candidates."""
        there = ([name for name in self.targets_of_replica(replica) if name in candidates] for replica in replicas)
        return list(islice((found for found in there if found), limit))

    def holds(self, name: TargetId, adapter: str, health: Health) -> bool:
        """Whether a target holds an adapter: as the configuration says of its replica, else as the replica told."""
        replica = self.targets[name].replica
        held = replica.adapters
        return health.holds(ReplicaId(replica.name), adapter) if held is None else adapter in held

    def _eligible(self, health: Health) -> Candidates:
        shares, weights = {}, {}
        for name, replica, _rank in self.targets.values():
            if replica.state is not ReplicaState.ACTIVE:
                continue
            of = ReplicaId(replica.name)
            if health.is_up(of):
                share = health.share(of)
                weights[name] = replica.weight * share
                if share < 1.0:
                    shares[name] = share
        return Candidates(weights, self.loads, self.seed, self._settle(), shares)

    def _settle(self) -> dict[TargetId, int]:
        """Each target's bit in the residency, in which it has its holding from now on."""
        if self._bits is None:
            self._bits = {name: self._settled(name, target.replica).bit for name, target in self.targets.items()}
        return self._bits

    def _settled(self, name: TargetId, replica: ReplicaConfig) -> ReplicaBlocks:
        """A target's holding, with the room that its engine told of."""
        told = replica.capacity_blocks is not None and replica.block_tokens is not None
        tokens = (replica.capacity_blocks or 0) * (replica.block_tokens or 0) if told else None
        return self.residency.settle(name, tokens)
