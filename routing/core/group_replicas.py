"""The configured replicas that one group may use, and which of them are eligible now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from routing.core.health.book import Health
from routing.core.homes.ring import HashRing
from routing.core.homes.shared_rings import SharedRing, shared_ring
from routing.core.loads.book import LoadBook
from routing.core.loads.candidates import Candidates
from routing.core.residency.holdings import Holding
from routing.core.residency.residency import Residency
from routing.core.targets import targets_of
from routing.core.types import ReplicaId, TargetId
from routing.schema import ReplicaConfig, ReplicaState


class GroupReplicas:
    """One group's, or a whole pool's.

    All of them are on the ring, whatever their state: one that drains or is down keeps its place, so that its keys
    come back to it and no other key moves.
    """

    def __init__(
        self, replicas: Iterable[ReplicaConfig], loads: LoadBook, seed: int = 0, residency: Residency | None = None
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

    def _settled(self, name: TargetId, replica: ReplicaConfig) -> Holding:
        """A target's holding, with the room that its engine told of."""
        told = replica.capacity_blocks is not None and replica.block_tokens is not None
        tokens = (replica.capacity_blocks or 0) * (replica.block_tokens or 0) if told else None
        return self.residency.settle(name, tokens)
