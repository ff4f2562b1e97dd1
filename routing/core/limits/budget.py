"""A budget that refills at a steady rate, for requests or for tokens.

Theory of operation. A token bucket: it holds at most ``capacity`` and gains ``per_s`` a second. What is spent may
exceed what is there, so that a cost known only afterwards, such as the tokens of an answer, still counts: the budget
is then overdrawn, and nothing more may begin until it has refilled. Over time no more than the rate gets through.
"""

from __future__ import annotations


class Budget:
    """One client's budget. ``now`` is any clock's seconds that never go back."""

    __slots__ = ("_at", "_level", "capacity", "per_s")

    def __init__(self, per_s: float, capacity: float, now: float) -> None:
        self.per_s = per_s
        self.capacity = capacity
        self._level = capacity
        self._at = now

    def wait_s(self, now: float) -> float:
        """Seconds until one unit is there; 0.0 if it is."""
        return max(0.0, (1.0 - self._refilled(now)) / self.per_s)

    def full_in_s(self, now: float) -> float:
        """Seconds until it is as full as it gets."""
        return (self.capacity - self._refilled(now)) / self.per_s

    def left(self, now: float) -> int:
        """Whole units that are there; 0 where it is overdrawn."""
        return max(0, int(self._refilled(now)))

    def spend(self, amount: float) -> None:
        """Take ``amount`` out, whether it is there or not; a negative one gives back what was taken too much."""
        self._level = min(self.capacity, self._level - amount)

    def change(self, per_s: float, capacity: float, now: float) -> None:
        """Go on at another rate, from the present level as far as it fits: a new rate is no new allowance."""
        self._level = min(capacity, self._refilled(now))
        self.per_s = per_s
        self.capacity = capacity

    def _refilled(self, now: float) -> float:
        self._level = min(self.capacity, self._level + (now - self._at) * self.per_s)
        self._at = now
        return self._level
