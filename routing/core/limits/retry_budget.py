"""Further tries of one request are a part of the traffic, so that a sick pool is not beaten to death.

Theory of operation. Over the last ``WINDOW_S`` seconds there may be ``ratio`` tries for each request that came, plus a
floor for each second, so that a router with little traffic can still move what a dead replica held. Counting is by
whole seconds: somebody tells the running number of requests now and then, and nothing is done per request.
Source of the rule: Finagle's retry budgets.
"""

from __future__ import annotations

from collections import deque
from typing import Final

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
