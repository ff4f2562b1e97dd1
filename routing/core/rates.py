"""How fast each replica prefills, learnt from its own answers.

Theory of operation. A request that found ``ahead`` tokens waiting and brought ``uncached`` of its own had its first
token after ``ttft_s``, so the replica got through ``ahead + uncached`` tokens in that time. Samples are averaged in
logarithms, each with a weight that falls to ``WEIGHT`` as they become many, and one that lies more than ``CLIP`` times
off counts as if it lay there: one stall or one lucky hit moves little, a change of hardware is followed within some
dozens of answers. Short work says more about fixed costs than about the rate, and is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from routing.core.types import ReplicaId

DEFAULT_RATE = 8000.0  # tokens/s until a replica was measured: an 8B model on one A10 or a 70B model on four A100
MIN_TOKENS = 512  # of a sample's work
WEIGHT = 1 / 32  # of a sample once there are many
CLIP = math.log(2.0)
SLOWEST, FASTEST = 50.0, 5_000_000.0  # tokens/s; what lies outside is a fault of some clock


class PrefillRates:
    """Tokens a second of each replica."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: dict[ReplicaId, tuple[float, int]] = {}  # (mean of the logarithms, how many)

    def __len__(self) -> int:
        return len(self._samples)

    def rate(self, replica: ReplicaId) -> float:
        """Tokens/s; of a replica that was not measured yet ``DEFAULT_RATE``."""
        sample = self._samples.get(replica)
        return math.exp(sample[0]) if sample else DEFAULT_RATE

    def learn(self, replica: ReplicaId, tokens: int, ttft_s: float) -> None:
        """Take a sample in: so many tokens were prefilled in this time."""
        if tokens < MIN_TOKENS or ttft_s <= 0:
            return
        found = math.log(min(max(tokens / ttft_s, SLOWEST), FASTEST))
        known, count = self._samples.get(replica, (found, 0))
        step = max(1 / (count + 1), WEIGHT)
        self._samples[replica] = (known + step * max(-CLIP, min(CLIP, found - known)), count + 1)

    def forget_all_but(self, replicas: Iterable[ReplicaId]) -> None:
        """Drop what was learnt of others."""
        kept = set(replicas)
        self._samples = {name: sample for name, sample in self._samples.items() if name in kept}
