"""A replica that joins or comes back is cold: its share of the traffic grows from a quarter to all of it.

Theory of operation. The share goes up in ``STEPS`` equal steps, because each step is a new epoch of health, for which
every group makes its candidates anew. Homes stay where they are: what grows is how much a replica may hold.
"""

from __future__ import annotations

from typing import Final

from routing.core.health.book import HealthBook
from routing.core.types import ReplicaId

FIRST_SHARE: Final = 0.25  # of its weight
STEPS: Final = 12


class SlowStarts:
    """The replicas whose share is growing."""

    def __init__(self, health: HealthBook) -> None:
        self._health = health
        self._running: dict[ReplicaId, tuple[float, float]] = {}  # when each began, and how long it takes

    def begin(self, replica: ReplicaId, duration_s: float, now_s: float) -> None:
        """Let a replica start now, anew if it was at it already; ``duration_s`` of 0 gives it its share at once."""
        self._running.pop(replica, None)
        if duration_s > 0:
            self._running[replica] = (now_s, duration_s)
        self._health.give_share(replica, FIRST_SHARE if duration_s > 0 else 1.0)

    def advance(self, now_s: float) -> None:
        """Give everybody the share that is due."""
        for replica, (began_s, duration_s) in list(self._running.items()):
            done = min(1.0, (now_s - began_s) / duration_s)
            self._health.give_share(replica, FIRST_SHARE + (1.0 - FIRST_SHARE) * int(done * STEPS) / STEPS)
            if done >= 1.0:
                del self._running[replica]

    def forget_all_but(self, replicas: set[ReplicaId]) -> None:
        """Drop replicas that are no longer configured."""
        for replica in self._running.keys() - replicas:
            del self._running[replica]
            self._health.give_share(replica, 1.0)
