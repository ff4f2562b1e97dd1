"""Which replicas may be asked, and for how much: written by health checks and breakers, read by placement."""

from __future__ import annotations

from typing import Protocol

from routing.core.types import ReplicaId


class Health(Protocol):
    """Whether a replica answers. ``epoch`` grows with every change of any answer, so that answers can be kept."""

    @property
    def epoch(self) -> int:
        """Number of the current set of answers."""
        ...

    def is_up(self, replica: ReplicaId) -> bool:
        """Whether requests may be sent to a replica; one that nobody knows yet may be tried."""
        ...

    def share(self, replica: ReplicaId) -> float:
        """What part of its weight a replica gets, above 0 and at most 1; less than 1 while it starts slowly."""
        ...


class HealthBook:
    """Replicas known to be down, replicas taken out by their breakers, and shares below 1; all others are well."""

    __slots__ = ("_down", "_out", "_shares", "epoch")

    def __init__(self) -> None:
        self._down: set[ReplicaId] = set()
        self._out: set[ReplicaId] = set()
        self._shares: dict[ReplicaId, float] = {}
        self.epoch = 0

    def is_up(self, replica: ReplicaId) -> bool:
        """Whether requests may be sent to a replica."""
        return replica not in self._down and replica not in self._out

    def share(self, replica: ReplicaId) -> float:
        """What part of its weight a replica gets."""
        return self._shares.get(replica, 1.0)

    def mark(self, replica: ReplicaId, *, up: bool) -> bool:
        """Record what a health check found; True if that is news."""
        return self._move(self._down, replica, into=not up)

    def take_out(self, replica: ReplicaId, *, out: bool) -> bool:
        """Record what a breaker decided; True if that is news."""
        return self._move(self._out, replica, into=out)

    def give_share(self, replica: ReplicaId, share: float) -> None:
        """Let a replica have this part of its weight from now on."""
        if share == self.share(replica):
            return
        if share < 1.0:
            self._shares[replica] = share
        else:
            del self._shares[replica]
        self.epoch += 1

    def _move(self, chosen: set[ReplicaId], replica: ReplicaId, *, into: bool) -> bool:
        if into is (replica in chosen):
            return False
        (chosen.add if into else chosen.discard)(replica)
        self.epoch += 1
        return True
