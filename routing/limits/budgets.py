"""Token buckets of API keys, and the retry budget.

Token bucket. A budget holds at most ``capacity`` units and gains ``per_s`` units a second. A request may spend more
than is available, so that a cost that is only known afterwards, such as generated tokens, still counts: the budget is
then overdrawn, and no request is admitted until it has refilled. The only state is the time when the budget will be
full (the generic cell rate algorithm, ITU-T I.371). That is one number, so processes can share it in memory without a
lock. If two of them spend within the same microsecond, one of the two amounts may be lost; it is never counted twice.

Retry budget. In the last ``WINDOW_S`` seconds there may be ``ratio`` retries for each request, so that retries do not
overload a pool that already fails. A minimum for each second lets a router with little traffic retry at all.
Counts are kept by whole seconds: the router reports its number of requests periodically, and a request costs nothing.
The rule is that of Finagle's retry budgets.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_ROUNDING: Final = 1e-6  # of seconds and units: times are floats


class Budget:
    """Token bucket of one API key. ``now`` is in seconds of any clock that never goes back."""

    def __init__(self, per_s: float, capacity: float, now: float, cell: memoryview[float] | None = None) -> None:
        """``cell``: when the budget will be full, initially 0. Other processes may share it; None: a private one."""
        self.per_s = per_s
        self.capacity = capacity
        self.is_shared = cell is not None
        if cell is None:
            cell = memoryview(bytearray(8)).cast("d")
            cell[0] = now
        self._cell = cell

    def wait_s(self, now: float) -> float:
        """Seconds until one unit is available; 0.0 if it is."""
        wait_s = self.full_in_s(now) - (self.capacity - 1.0) / self.per_s
        return wait_s if wait_s > _ROUNDING else 0.0

    def full_in_s(self, now: float) -> float:
        """Seconds until the budget is full."""
        return max(0.0, self._cell[0] - now)

    def available(self, now: float) -> int:
        """Whole units that may be spent; 0 if the budget is overdrawn."""
        return max(0, int(self._level(now) + _ROUNDING))

    def spend(self, amount: float, now: float) -> None:
        """Spend ``amount``, even if it is not available; a negative amount gives units back."""
        self._cell[0] = max(self._cell[0], now) + amount / self.per_s

    def configure(self, per_s: float, capacity: float, now: float) -> None:
        """Use another rate and capacity. The level stays as far as it fits, so that no units are gained."""
        self._cell[0] = full_at(self._level(now), per_s, capacity, now)
        self.per_s = per_s
        self.capacity = capacity

    def share_cell(self, other: Budget) -> None:
        """Use the rate and the cell of another budget, into which the current level was copied before."""
        self.per_s, self.capacity = other.per_s, other.capacity
        self._cell, self.is_shared = other._cell, other.is_shared

    def _level(self, now: float) -> float:
        return self.capacity - self.full_in_s(now) * self.per_s


def full_at(level: float, per_s: float, capacity: float, now: float) -> float:
    """When a budget with ``level`` units will be full."""
    return now + max(0.0, capacity - level) / per_s


WINDOW_S: Final = 10


class RetryBudget:
    """Limit on retries. ``ratio`` and ``floor_per_s`` may change at any time."""

    def __init__(self, ratio: float, floor_per_s: float) -> None:
        self.ratio = ratio  # retries for each request, 0 to 1
        self.floor_per_s = floor_per_s
        self.rejected = 0  # retries since the start for which there was no budget
        self._requests = 0  # since the start
        self._retries = 0  # since the start
        self._history: deque[tuple[int, int, int]] = deque()  # (second, requests, retries) when each second began

    def tick(self, now_s: float, requests: int) -> None:
        """Record the number of requests since the start."""
        self._requests = requests
        second = int(now_s)
        if not self._history or self._history[-1][0] < second:
            self._history.append((second, requests, self._retries))
        while self._history[0][0] < second - WINDOW_S:
            self._history.popleft()

    def spend(self) -> bool:
        """Whether one more retry is allowed; if so, it is counted."""
        _, requests, retries = self._history[0] if self._history else (0, 0, 0)
        allowed = self.ratio * (self._requests - requests) + self.floor_per_s * WINDOW_S
        if allowed - (self._retries - retries) < 1.0:
            self.rejected += 1
            return False
        self._retries += 1
        return True

    def give_back(self) -> None:
        """Undo the latest ``spend``: no replica was left for the retry."""
        self._retries -= 1
