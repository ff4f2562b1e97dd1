"""Which replicas may be asked, for which adapters and for how much of their weight.

Written by health checks, breakers, slow starts and warm-ups; read by placement.

A replica that joins or comes back is cold: its share of the traffic grows from a quarter to all of it.

Theory of operation. The share goes up in ``STEPS`` equal steps, because each step is a new epoch of health, for which
every group makes its candidates anew. Homes stay where they are: what grows is how much a replica may hold.
"""

from __future__ import annotations

from typing import Final, Protocol

from routing.types import ReplicaId


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

    def holds(self, replica: ReplicaId, adapter: str) -> bool:
        """Whether a replica has a LoRA adapter loaded; one that has not told may be tried."""
        ...


class HealthRegistry:
    """Replicas known to be down, taken out by their breakers or kept back, and shares below 1; all others are well."""

    __slots__ = ("_adapters", "_down", "_kept_back", "_out", "_shares", "epoch")

    def __init__(self) -> None:
        self._down: set[ReplicaId] = set()
        self._out: set[ReplicaId] = set()
        self._kept_back: set[ReplicaId] = set()
        self._shares: dict[ReplicaId, float] = {}
        self._adapters: dict[ReplicaId, frozenset[str]] = {}  # of those that told
        self.epoch = 0

    def is_up(self, replica: ReplicaId) -> bool:
        """Whether requests may be sent to a replica."""
        return not (replica in self._down or replica in self._out or replica in self._kept_back)

    def will_be_up(self, replica: ReplicaId) -> bool:
        """The same, of one that is kept back as well."""
        return replica not in self._down and replica not in self._out

    def share(self, replica: ReplicaId) -> float:
        """What part of its weight a replica gets."""
        return self._shares.get(replica, 1.0)

    def holds(self, replica: ReplicaId, adapter: str) -> bool:
        """Whether a replica has an adapter loaded."""
        told = self._adapters.get(replica)
        return told is None or adapter in told

    def set_adapters(self, replica: ReplicaId, adapters: frozenset[str] | None) -> None:
        """Record which adapters a replica has loaded; None: nobody knows."""
        if adapters == self._adapters.get(replica):
            return
        if adapters is None:
            del self._adapters[replica]
        else:
            self._adapters[replica] = adapters
        self.epoch += 1

    def mark(self, replica: ReplicaId, *, up: bool) -> bool:
        """Record what a health check found; True if that is news."""
        return self._move(self._down, replica, into=not up)

    def eject(self, replica: ReplicaId, *, out: bool) -> bool:
        """Record what a breaker decided; True if that is news."""
        return self._move(self._out, replica, into=out)

    def hold_back(self, replica: ReplicaId, *, back: bool) -> bool:
        """Let a replica get no requests yet, or get them from now on; True if that is news."""
        return self._move(self._kept_back, replica, into=back)

    def set_share(self, replica: ReplicaId, share: float) -> None:
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


FIRST_SHARE: Final = 0.25  # of its weight
STEPS: Final = 12


class SlowStarts:
    """The replicas whose share is growing."""

    def __init__(self, health: HealthRegistry) -> None:
        self._health = health
        self._running: dict[ReplicaId, tuple[float, float]] = {}  # when each began, and how long it takes

    def begin(self, replica: ReplicaId, duration_s: float, now_s: float) -> None:
        """Let a replica start now, anew if it was at it already; ``duration_s`` of 0 gives it its share at once."""
        self._running.pop(replica, None)
        if duration_s > 0:
            self._running[replica] = (now_s, duration_s)
        self._health.set_share(replica, FIRST_SHARE if duration_s > 0 else 1.0)

    def advance(self, now_s: float) -> None:
        """Give everybody the share that is due."""
        for replica, (began_s, duration_s) in list(self._running.items()):
            done = min(1.0, (now_s - began_s) / duration_s)
            self._health.set_share(replica, FIRST_SHARE + (1.0 - FIRST_SHARE) * int(done * STEPS) / STEPS)
            if done >= 1.0:
                del self._running[replica]

    def forget_all_but(self, replicas: set[ReplicaId]) -> None:
        """Drop replicas that are no longer configured."""
        for replica in self._running.keys() - replicas:
            del self._running[replica]
            self._health.set_share(replica, 1.0)
