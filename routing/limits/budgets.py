"""A budget that refills at a steady rate, for requests or for tokens.

Theory of operation. A token bucket: it holds at most ``capacity`` and gains ``per_s`` a second. What is spent may
exceed what is there, so that a cost known only afterwards, such as the tokens of an answer, still counts: the budget
is then overdrawn, and nothing more may begin until it has refilled. Over time no more than the rate gets through.

All that is kept is when the budget will be full again (the generic cell rate algorithm, ITU-T I.371). That is one
number, so processes may share it in memory without a lock. If two of them spend within the same microsecond, one of the
two amounts may be lost; it is never counted twice.

Further tries of one request are a part of the traffic, so that a sick pool is not beaten to death.

Theory of operation. Over the last ``WINDOW_S`` seconds there may be ``ratio`` tries for each request that came, plus a
floor for each second, so that a router with little traffic can still move what a dead replica held. Counting is by
whole seconds: somebody tells the running number of requests now and then, and nothing is done per request.
Source of the rule: Finagle's retry budgets.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_ROUNDING: Final = 1e-6  # of seconds and units: a clock's seconds are no whole numbers


class Budget:
    """One client's budget. ``now`` is any clock's seconds that never go back."""

    __slots__ = ("_cell", "capacity", "is_shared", "per_s")

    def __init__(self, per_s: float, capacity: float, now: float, cell: memoryview[float] | None = None) -> None:
        """``cell``: one number that other processes may have too, 0 in the beginning; None: it is this one's alone."""
        self.per_s = per_s
        self.capacity = capacity
        self.is_shared = cell is not None
        self._cell = private_cell(now) if cell is None else cell

    def wait_s(self, now: float) -> float:
        """Seconds until one unit is there; 0.0 if it is."""
        wait_s = self.full_in_s(now) - (self.capacity - 1.0) / self.per_s
        return wait_s if wait_s > _ROUNDING else 0.0

    def full_in_s(self, now: float) -> float:
        """Seconds until it is as full as it gets."""
        return max(0.0, self._cell[0] - now)

    def left(self, now: float) -> int:
        """Whole units that are there; 0 where it is overdrawn."""
        return max(0, int(self._level(now) + _ROUNDING))

    def spend(self, amount: float, now: float) -> None:
        """Take ``amount`` out, whether it is there or not; a negative one gives back what was taken too much."""
        self._cell[0] = max(self._cell[0], now) + amount / self.per_s

    def change(self, per_s: float, capacity: float, now: float) -> None:
        """Go on at another rate, from the present level as far as it fits: a new rate is no new allowance."""
        self._cell[0] = full_at(self._level(now), per_s, capacity, now)
        self.per_s = per_s
        self.capacity = capacity

    def move(self, to: Budget) -> None:
        """Go on at the rate and with the cell of another, where somebody has put the present level already."""
        self.per_s, self.capacity = to.per_s, to.capacity
        self._cell, self.is_shared = to._cell, to.is_shared

    def _level(self, now: float) -> float:
        return self.capacity - self.full_in_s(now) * self.per_s


def full_at(level: float, per_s: float, capacity: float, now: float) -> float:
    """When a budget that has so many units will be full."""
    return now + max(0.0, capacity - level) / per_s


def private_cell(value: float) -> memoryview[float]:
    """One number that no other process has."""
    cell = memoryview(bytearray(8)).cast("d")
    cell[0] = value
    return cell


WINDOW_S: Final = 10


class RetryBudget:
    """What may be tried again. ``ratio`` and ``floor_per_s`` may change at any time."""

    def __init__(self, ratio: float, floor_per_s: float) -> None:
        self.ratio = ratio  # tries for each request, 0 to 1
        self.floor_per_s = floor_per_s
        self.refused = 0  # tries, ever
        self._requests = 0  # ever
        self._tries = 0  # ever
        self._before: deque[tuple[int, int, int]] = deque()  # (second, requests, tries) when each second began

    def tick(self, now_s: float, requests: int) -> None:
        """Take note of the number of requests that ever came."""
        self._requests = requests
        second = int(now_s)
        if not self._before or self._before[-1][0] < second:
            self._before.append((second, requests, self._tries))
        while self._before[0][0] < second - WINDOW_S:
            self._before.popleft()

    @property
    def left(self) -> float:
        """Tries that are allowed now."""
        _, requests, tries = self._before[0] if self._before else (0, 0, 0)
        allowed = self.ratio * (self._requests - requests) + self.floor_per_s * WINDOW_S
        return allowed - (self._tries - tries)

    def spend(self) -> bool:
        """Take one; False, and counted, if none is left."""
        if self.left < 1.0:
            self.refused += 1
            return False
        self._tries += 1
        return True
