"""Each key's share of the traffic, with old traffic counting less and less.

Theory of operation. Instead of shrinking every count with every request, the weight of a request grows: after
``half_life`` requests it is twice what it was, and a share is a key's weight over that of all. When weights become
large all are scaled down together. At most ``2 * KEPT`` keys are counted; then only the ``KEPT`` heaviest stay. A key
with a share above 1 / ``KEPT`` is never among those dropped, and one that was counts anew.
"""

from __future__ import annotations

from heapq import nlargest
from typing import Final

KEPT: Final = 256
_LARGE: Final = 1e100


class Shares:
    """Shares of keys among the latest requests."""

    __slots__ = ("_growth", "_of_key", "_total", "_weight")

    def __init__(self, half_life: float) -> None:
        self._growth = 2.0 ** (1.0 / half_life)  # half_life in requests, > 0
        self._weight = 1.0  # of the next request
        self._total = 0.0
        self._of_key: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._of_key)

    def count(self, key: int) -> None:
        """Count one request."""
        counts = self._of_key
        counts[key] = counts.get(key, 0.0) + self._weight
        self._total += self._weight
        self._weight *= self._growth
        if len(counts) > 2 * KEPT:
            self._of_key = dict(nlargest(KEPT, counts.items(), key=lambda item: item[1]))
        if self._weight > _LARGE:
            self._scale_down()

    def carry_over(self, before: Shares) -> None:
        """Go on from what another counted, whatever its half-life."""
        self._of_key, self._total, self._weight = dict(before._of_key), before._total, before._weight

    def share(self, key: int) -> float:
        """A key's share, 0 to 1; 0 for one that is not counted, which may have come, but rarely."""
        return self._of_key.get(key, 0.0) / self._total if self._total else 0.0

    def above(self, ratio: float) -> list[tuple[int, float]]:
        """Keys with at least this share (0 to 1), and their shares, the largest first."""
        least = max(ratio * self._total, self._total / KEPT)
        heavy = [(key, weight / self._total) for key, weight in self._of_key.items() if weight >= least]
        return sorted(heavy, key=lambda item: (-item[1], item[0]))

    def _scale_down(self) -> None:
        unit, self._weight = self._weight, 1.0
        self._total /= unit
        self._of_key = {key: weight / unit for key, weight in self._of_key.items()}
