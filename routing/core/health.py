"""Which replicas answer: written by health checks and breakers, read by placement."""

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


class HealthBook:
    """The replicas that are known to be down; all others may be tried."""

    __slots__ = ("_down", "epoch")

    def __init__(self) -> None:
        self._down: set[ReplicaId] = set()
        self.epoch = 0

    def is_up(self, replica: ReplicaId) -> bool:
        """Whether requests may be sent to a replica."""
        return replica not in self._down

    def mark(self, replica: ReplicaId, *, up: bool) -> bool:
        """Record what was found out; True if that is news."""
        if up is self.is_up(replica):
            return False
        (self._down.discard if up else self._down.add)(replica)
        self.epoch += 1
        return True
