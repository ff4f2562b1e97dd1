"""Targets of requests (replicas, or the data-parallel ranks of one), their health, and the eligible ones of a group.

A replica with several ranks has one address, and ``X-data-parallel-rank`` selects the rank. Each rank has its own KV
cache and queue, so each is a target with points on the ring, a load and estimated cached blocks. Health, circuit
breaker, connections and the name in metrics belong to the replica as a whole. Where this package speaks of a replica's
load, ring points or cached blocks, it means a target's.

Health: which replicas may get requests, which adapters they have, and how much of their weight they get. Health checks,
circuit breakers, slow start and warm-ups write this state; placement reads it.

Slow start. A replica that joins or returns has an empty cache, so its share of the traffic grows from a quarter to all
of it. It grows in ``STEPS`` equal steps, because each step is a new epoch for which every group computes its candidates
again. Ring orders do not change: only the load that the replica accepts grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from routing.balancing.candidates import Candidates
from routing.balancing.hash_ring import HashRing, shared_ring
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.residency import Residency
from routing.schema import ReplicaConfig, ReplicaState, RouterConfig
from routing.types import PrefixHash, ReplicaId, TargetId


class HealthRegistry:
    """The replicas that are down, ejected, warming up or limited, and shares below 1; all others are healthy."""

    def __init__(self) -> None:
        self._down: set[ReplicaId] = set()
        self._ejected: set[ReplicaId] = set()
        self._warming: set[ReplicaId] = set()
        self._limited: set[ReplicaId] = set()
        self._shares: dict[ReplicaId, float] = {}
        self._adapters: dict[ReplicaId, frozenset[str]] = {}  # adapters that each replica reports
        self.epoch = 0  # number of changes so far, so that results can be cached

    def is_up(self, replica: ReplicaId) -> bool:
        """Whether requests may be sent to a replica; True for an unknown one."""
        return not (replica in self._down or replica in self._ejected or replica in self._warming)

    def is_up_after_warm_up(self, replica: ReplicaId) -> bool:
        """Whether a replica is up, or would be if it were not warming up."""
        return replica not in self._down and replica not in self._ejected

    def share(self, replica: ReplicaId) -> float:
        """The share of its weight that a replica gets, above 0 and at most 1; less than 1 during slow start."""
        return self._shares.get(replica, 1.0)

    def has_adapter(self, replica: ReplicaId, adapter: str) -> bool:
        """Whether a replica has an adapter loaded, or has not reported its adapters."""
        adapters = self._adapters.get(replica)
        return adapters is None or adapter in adapters

    def set_adapters(self, replica: ReplicaId, adapters: frozenset[str] | None) -> None:
        """Record the adapters that a replica reported; None: unknown."""
        if adapters == self._adapters.get(replica):
            return
        if adapters is None:
            del self._adapters[replica]
        else:
            self._adapters[replica] = adapters
        self.epoch += 1

    def mark(self, replica: ReplicaId, *, up: bool) -> bool:
        """Record the result of health checks; True if it changed."""
        return self._set_member(self._down, replica, is_member=not up)

    def set_ejected(self, replica: ReplicaId, *, is_ejected: bool) -> bool:
        """Record the decision of a circuit breaker; True if it changed."""
        return self._set_member(self._ejected, replica, is_member=is_ejected)

    def set_warming(self, replica: ReplicaId, *, is_warming: bool) -> bool:
        """Keep requests from a replica until its warm-up is over; True if that changed."""
        return self._set_member(self._warming, replica, is_member=is_warming)

    def is_limited(self, replica: ReplicaId) -> bool:
        """Whether a replica asked for no requests for a while, and gets none while another one is eligible."""
        return replica in self._limited

    def set_limited(self, replica: ReplicaId, *, is_limited: bool) -> bool:
        """Record that a replica asked for no requests, or that this is over; True if that changed."""
        return self._set_member(self._limited, replica, is_member=is_limited)

    @property
    def has_limited(self) -> bool:
        """Whether any replica is limited."""
        return bool(self._limited)

    def set_share(self, replica: ReplicaId, share: float) -> None:
        """Give a replica this share of its weight."""
        if share == self.share(replica):
            return
        if share < 1.0:
            self._shares[replica] = share
        else:
            del self._shares[replica]
        self.epoch += 1

    def _set_member(self, replicas: set[ReplicaId], replica: ReplicaId, *, is_member: bool) -> bool:
        if is_member is (replica in replicas):
            return False
        (replicas.add if is_member else replicas.discard)(replica)
        self.epoch += 1
        return True


FIRST_SHARE: Final = 0.25  # of its weight
STEPS: Final = 12


class SlowStarts:
    """The replicas in slow start."""

    def __init__(self, health: HealthRegistry) -> None:
        self._health = health
        self._running: dict[ReplicaId, tuple[float, float]] = {}  # start time and duration of each

    def begin(self, replica: ReplicaId, duration_s: float, now_s: float) -> None:
        """Start or restart a replica's slow start; a ``duration_s`` of 0 gives it its whole share at once."""
        self._running.pop(replica, None)
        if duration_s > 0:
            self._running[replica] = (now_s, duration_s)
        self._health.set_share(replica, FIRST_SHARE if duration_s > 0 else 1.0)

    def advance(self, now_s: float) -> None:
        """Raise shares that are due."""
        for replica, (started_s, duration_s) in list(self._running.items()):
            done = min(1.0, (now_s - started_s) / duration_s)
            self._health.set_share(replica, FIRST_SHARE + (1.0 - FIRST_SHARE) * int(done * STEPS) / STEPS)
            if done >= 1.0:
                del self._running[replica]

    def forget_all_but(self, replicas: set[ReplicaId]) -> None:
        """Drop replicas that are no longer configured."""
        for replica in self._running.keys() - replicas:
            del self._running[replica]
            self._health.set_share(replica, 1.0)


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
        self,
        replicas: Iterable[ReplicaConfig],
        loads: LoadTracker,
        seed: int = 0,
        residency: Residency | None = None,
        adapter_replicas: int | None = None,
    ) -> None:
        self.targets = {target.id: target for replica in replicas for target in targets_of(replica)}
        self.residency = Residency() if residency is None else residency
        self.loads = loads
        self.seed = seed
        self._adapter_replicas = adapter_replicas  # number of replicas that serve each adapter; None: all that have it
        self._epoch: int | None = None
        self._candidates = Candidates({}, loads, seed)
        self._ring: HashRing[TargetId] | None = None  # from here on: computed on first use
        self._by_replica: dict[ReplicaId, list[TargetId]] | None = None
        self._bits: dict[TargetId, int] | None = None
        self._with_adapter: dict[str, Candidates] = {}

    @property
    def ring(self) -> HashRing[TargetId]:
        """Hash ring of all configured replicas."""
        if self._ring is None:
            weights = {name: target.replica.weight for name, target in self.targets.items()}
            self._ring = shared_ring(tuple(sorted(weights.items())))
        return self._ring

    def candidates(self, health: HealthRegistry, adapter: str = "") -> Candidates:
        """Targets that are active and up, with their current weights. O(replicas) after a change of health.

        With ``adapter``, only those that have this adapter of the pool and are among the replicas that serve it.
        """
        if health.epoch != self._epoch:
            self._epoch = health.epoch
            self._candidates = self._eligible(health)
            self._with_adapter = {}
        if not adapter:
            return self._candidates
        candidates = self._with_adapter.get(adapter)
        if candidates is None:
            names = self._serving(adapter, self.with_adapter(health, adapter))
            candidates = self._with_adapter[adapter] = self._candidates.subset(names)
        return candidates

    def with_adapter(self, health: HealthRegistry, adapter: str) -> Candidates:
        """All targets that are active, up, and have an adapter, for retries: not only those that serve it."""
        return self._having(adapter, self.candidates(health), health)

    def with_limited(self, health: HealthRegistry, adapter: str) -> Candidates:
        """The same, if all others have failed: with the limited ones."""
        return self._having(adapter, self._eligible(health, with_limited=True), health)

    def _having(self, adapter: str, candidates: Candidates, health: HealthRegistry) -> Candidates:
        if not adapter:
            return candidates
        return candidates.subset([name for name in candidates if self.has_adapter(name, adapter, health)])

    def _serving(self, adapter: str, candidates: Candidates) -> list[TargetId]:
        """The targets of the first replicas on the ring from an adapter's position: the same for every router."""
        if self._adapter_replicas is None:
            return list(candidates)
        key = PrefixHash(xxh3_64_intdigest(adapter.encode()))
        replicas = dict.fromkeys(
            [self.targets[name].replica.name for name in self.ring.walk(key) if name in candidates]
        )
        serving = list(replicas)[: self._adapter_replicas]
        return [name for name in candidates if self.targets[name].replica.name in serving]

    def prepare(self, health: HealthRegistry) -> Iterator[None]:
        """Compute what the next request would otherwise wait for; yields between the steps."""
        self._residency_bits()
        yield
        candidates = self.candidates(health)
        yield
        if candidates.loads:
            candidates.order.least_loaded()

    def targets_of_replica(self, replica: ReplicaId) -> list[TargetId]:
        """The targets of a replica; empty if the group does not have the replica."""
        targets = self._by_replica
        if targets is None:
            targets = self._by_replica = {}
            for name, target in self.targets.items():
                targets.setdefault(ReplicaId(target.replica.name), []).append(name)
        return targets.get(replica, [])

    def has_adapter(self, name: TargetId, adapter: str, health: HealthRegistry) -> bool:
        """Whether a target has an adapter: by its replica's configuration, else by what the replica reported."""
        replica = self.targets[name].replica
        adapters = replica.adapters
        return health.has_adapter(ReplicaId(replica.name), adapter) if adapters is None else adapter in adapters

    def _eligible(self, health: HealthRegistry, *, with_limited: bool = False) -> Candidates:
        shares, weights = {}, {}
        for name, replica, _rank in self.targets.values():
            id_ = ReplicaId(replica.name)
            if replica.state is ReplicaState.ACTIVE and health.is_up(id_):
                if health.is_limited(id_) and not with_limited:
                    continue
                share = health.share(id_)
                weights[name] = replica.weight * share
                if share < 1.0:
                    shares[name] = share
        if not (weights or with_limited) and health.has_limited:
            return self._eligible(health, with_limited=True)
        return Candidates(weights, self.loads, self.seed, self._residency_bits(), shares)

    def _residency_bits(self) -> dict[TargetId, int]:
        """Each target's bit in the residency, to which the targets are added with their reported capacities."""
        if self._bits is None:
            self._bits = {}
            for name, replica, _rank in self.targets.values():
                is_reported = replica.capacity_blocks is not None and replica.block_tokens is not None
                tokens = (replica.capacity_blocks or 0) * (replica.block_tokens or 0) if is_reported else None
                self._bits[name] = self.residency.add_replica(name, tokens, replica.block_tokens).bit
        return self._bits


def target_ids(config: RouterConfig) -> list[TargetId]:
    """The targets of all pools: replicas, or their data-parallel ranks."""
    return [target.id for pool in config.pools for replica in pool.replicas for target in targets_of(replica)]
