"""How fast each replica prefills, learnt from its own answers.

Theory of operation. A request that found ``ahead`` tokens waiting and brought ``uncached`` of its own had its first
token after ``ttft_s``, so the replica got through ``ahead + uncached`` tokens in that time. Samples are averaged in
logarithms, each with a weight that falls to ``WEIGHT`` as they become many, and one that lies more than ``CLIP`` times
off counts as if it lay there: one stall or one lucky hit moves little, a change of hardware is followed within some
dozens of answers. Short work says more about fixed costs than about the rate, and is passed over.
"""

from __future__ import annotations

import math

DEFAULT_RATE = 8000.0  # tokens/s until a replica was measured: an 8B model on one A10 or a 70B model on four A100
MIN_TOKENS = 512  # of a sample's work
WEIGHT = 1 / 32  # of a sample once there are many
CLIP = math.log(2.0)
SLOWEST, FASTEST = 50.0, 5_000_000.0  # tokens/s; what lies outside is a fault of some clock


class PrefillRate:
    """What one replica prefills in a second."""

    __slots__ = ("_logarithm", "samples", "tokens_per_s")

    def __init__(self) -> None:
        self.tokens_per_s = DEFAULT_RATE
        self.samples = 0  # 0: the rate is the default
        self._logarithm = 0.0

    def learn(self, tokens: float, ttft_s: float) -> None:
        """Take a sample in: so many tokens were prefilled in this time."""
        if tokens < MIN_TOKENS or ttft_s <= 0:
            return
        found = math.log(min(max(tokens / ttft_s, SLOWEST), FASTEST))
        self.samples += 1
        if self.samples == 1:
            self._logarithm = found
        else:
            step = max(1 / self.samples, WEIGHT)
            self._logarithm += step * max(-CLIP, min(CLIP, found - self._logarithm))
        self.tokens_per_s = math.exp(self._logarithm)
