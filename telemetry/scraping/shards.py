"""Which part of the fleet is scraped together, and when. Pure.

Theory of operation. A fleet is cut into as many shards as it needs for each to hold about ``SHARD_TARGETS`` targets; a
target belongs to the shard that a hash of its name gives, so nobody has to be told. Each shard has a grid of its own:
the intervals since the epoch, moved by the shard's part of an interval, so that the shards' work is spread evenly over
time and one shard's late targets keep nobody else waiting. When a fleet grows into more shards, its targets move to
other grids: that costs one reading of an unusual length, and no total.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

SHARD_TARGETS = 128  # a third of a second's work for one core
MOST_SHARDS = 64  # above 8,192 targets shards grow instead
EARLY_SHARE = 0.2  # of the interval: a tick this close to the next place on the grid may take it
AHEAD_SHARE = 1.5  # of the interval: how far ahead shards are told, so that a tick of beat may be late or lost by half


@dataclass(frozen=True, slots=True)
class Shard:
    """Number ``number`` (from 0) of ``of`` shards."""

    number: int
    of: int

    def holds(self, target: str) -> bool:
        """Whether a target, by a name that never changes, is one of this shard's."""
        return zlib.crc32(target.encode()) % self.of == self.number

    def phase_s(self, interval_s: float) -> float:
        """How far its grid lies behind the intervals since the epoch."""
        return interval_s * self.number / self.of

    def place(self, now_s: float, interval_s: float, taken_s: float | None) -> float | None:
        """When this tick's readings are due: its place on the grid, or the next one when that is near, or None.

        ``taken_s`` is the newest place that was taken; one that lies far ahead means that the clock was set back.
        """
        place_s = self._at_or_before(now_s, interval_s)
        if taken_s is None or taken_s < place_s - EPSILON_S or taken_s > place_s + interval_s + EPSILON_S:
            return place_s
        next_s = place_s + interval_s
        return next_s if taken_s <= place_s + EPSILON_S and next_s - now_s <= EARLY_SHARE * interval_s else None

    def dues_s(self, now_s: float, interval_s: float) -> list[float]:
        """The places on the grid from now on that a tick of beat tells the workers of, ascending."""
        first_s = self._at_or_before(now_s, interval_s) + interval_s
        ahead_s = now_s + AHEAD_SHARE * interval_s - first_s
        return [first_s + interval_s * number for number in range(math.floor(ahead_s / interval_s) + 1)]

    def _at_or_before(self, now_s: float, interval_s: float) -> float:
        phase_s = self.phase_s(interval_s)
        return math.floor((now_s - phase_s) / interval_s + EPSILON_S) * interval_s + phase_s


EPSILON_S = 1e-6  # times of day as floats, of which PostgreSQL keeps microseconds


def shards_for(targets: int) -> list[Shard]:
    """The shards of a fleet of so many replicas and routers; one at least."""
    of = min(max(1, math.ceil(targets / SHARD_TARGETS)), MOST_SHARDS)
    return [Shard(number, of) for number in range(of)]


def missed_ticks(last_s: float | None, due_s: float, interval_s: float) -> int:
    """How many places on the grid were left out between two ticks of a shard; 0 after the clock was set back."""
    return 0 if last_s is None else max(0, round((due_s - last_s) / interval_s) - 1)
