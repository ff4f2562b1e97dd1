"""The configured replicas that one group may use, and which of them are eligible now."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from routing.core.candidates import Candidates
from routing.core.health import Health
from routing.core.load import LoadBook
from routing.core.residency import Holding, Residency
from routing.core.ring import HashRing, shared_ring
from routing.core.types import ReplicaId
from routing.schema import ReplicaConfig, ReplicaState


class Fleet:
    """The replicas of one group.

    All of them are on the ring, whatever their state: one that drains or is down keeps its place, so that its keys
    come back to it and no other key moves.
    """

    def __init__(
        self, replicas: Iterable[ReplicaConfig], loads: LoadBook, seed: int = 0, residency: Residency | None = None
    ) -> None:
        self.replicas = {ReplicaId(replica.name): replica for replica in replicas}
        self.residency = Residency() if residency is None else residency
        self.loads = loads
        self.seed = seed
        self._epoch: int | None = None
        self._candidates = Candidates({}, loads, seed)
        self._holders: dict[str, Candidates] = {}  # of them, those that hold an adapter, by its name

    @cached_property
    def ring(self) -> HashRing:
        """Home order of all configured replicas."""
        return shared_ring({name: replica.weight for name, replica in self.replicas.items()})

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
            names = [name for name in self._candidates if self._holds(name, adapter, health)]
            holders = self._holders[adapter] = self._candidates.only(names)
        return holders

    def _eligible(self, health: Health) -> Candidates:
        eligible = {
            name: replica.weight * health.share(name)
            for name, replica in self.replicas.items()
            if replica.state is ReplicaState.ACTIVE and health.is_up(name)
        }
        bits = {name: self._settled(replica).bit for name, replica in self.replicas.items()}
        shares = {name: share for name in eligible if (share := health.share(name)) < 1.0}
        return Candidates(eligible, self.loads, self.seed, bits, shares)

    def _holds(self, name: ReplicaId, adapter: str, health: Health) -> bool:
        """By what the configuration says of the replica, else by what the replica told."""
        held = self.replicas[name].adapters
        return health.holds(name, adapter) if held is None else adapter in held

    def _settled(self, replica: ReplicaConfig) -> Holding:
        """The replica's holding, with the room that its engine told of."""
        told = replica.capacity_blocks is not None and replica.block_tokens is not None
        tokens = (replica.capacity_blocks or 0) * (replica.block_tokens or 0) if told else None
        return self.residency.settle(ReplicaId(replica.name), tokens)
