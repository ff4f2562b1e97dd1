"""Which replicas may get requests, which adapters they have, and how much of their weight they get.

Health checks, circuit breakers, slow start and warm-ups write this state; placement reads it.

Slow start. A replica that joins or returns has an empty cache, so its share of the traffic grows from a quarter to all
of it, in ``STEPS`` equal steps, because each step is a new epoch for which every group computes its candidates anew.
Ring orders do not change: only the load that the replica accepts grows.
"""

from __future__ import annotations

from typing import Final

from routing.types import ReplicaId


class HealthRegistry:
    """The replicas that are down, ejected or warming up, and shares below 1; all others are healthy."""

    def __init__(self) -> None:
        self._down: set[ReplicaId] = set()
        self._ejected: set[ReplicaId] = set()
        self._warming: set[ReplicaId] = set()
        self._shares: dict[ReplicaId, float] = {}
        self._adapters: dict[ReplicaId, frozenset[str]] = {}  # as reported
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
