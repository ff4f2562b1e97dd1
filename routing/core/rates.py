"""How fast a replica prefills, learnt from its own answers.

Theory of operation. A request that found ``ahead`` tokens waiting and brought ``uncached`` of its own had its first
token after ``ttft_s``, so the replica got through ``ahead + uncached`` tokens in that time. The rate is the tokens of
the latest answers over their seconds, so that long work counts more than short work, which says more about fixed costs.
Older answers fade: one counts half after ``HALF_LIFE`` more. A time more than ``CLIP`` times off what the rate says
counts as if it were ``CLIP`` times off: one stall or one lucky hit moves little, and a change of hardware is followed.
"""

from __future__ import annotations

DEFAULT_RATE = 8000.0  # tokens/s until a replica was measured: an 8B model on one A10 or a 70B model on four A100
MIN_TOKENS = 512  # of a sample's work
HALF_LIFE = 64  # samples
CLIP = 2.0
SLOWEST, FASTEST = 50.0, 5_000_000.0  # tokens/s; what lies outside is a fault of some clock

_FADE = 0.5 ** (1 / HALF_LIFE)


class PrefillRate:
    """What one replica prefills in a second."""

    __slots__ = ("_seconds", "_tokens", "samples", "tokens_per_s")

    def __init__(self) -> None:
        self.tokens_per_s = DEFAULT_RATE
        self.samples = 0  # 0: the rate is the default
        self._tokens = 0.0
        self._seconds = 0.0

    def learn(self, tokens: float, ttft_s: float) -> None:
        """Take a sample in: so many tokens were prefilled in this time."""
        if tokens < MIN_TOKENS or ttft_s <= 0:
            return
        ttft_s = min(max(ttft_s, tokens / FASTEST), tokens / SLOWEST)
        if self.samples:
            expected_s = tokens / self.tokens_per_s
            ttft_s = min(max(ttft_s, expected_s / CLIP), expected_s * CLIP)
        self.samples += 1
        self._tokens = _FADE * self._tokens + tokens
        self._seconds = _FADE * self._seconds + ttft_s
        self.tokens_per_s = self._tokens / self._seconds
