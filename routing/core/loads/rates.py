"""How fast a replica prefills, learnt from its own answers.

Theory of operation. A request that found ``ahead`` tokens waiting and brought ``uncached`` of its own had its first
token after ``ttft_s``, so the replica got through ``ahead + uncached`` tokens in that time. The rate is the tokens of
the latest answers over their seconds, so that long work counts more than short work, which says more about fixed costs.
Older answers fade: one counts half after ``HALF_LIFE`` more. A time more than ``CLIP`` times off what the rate says
counts as if it were ``CLIP`` times off: one stall or one lucky hit moves little, and a change of hardware is followed.
Where a replica has answered little, it is taken to be as fast as all are: a guess for one that is measured against
others would starve it or flood it.
"""

from __future__ import annotations

from typing import Final

DEFAULT_RATE: Final = 8000.0  # tokens/s until any replica was measured: that of the simulation's engines
LENT: Final = 24.0  # samples that every replica is taken to have shown at the rate of all
MIN_TOKENS: Final = 512  # of a sample's work
HALF_LIFE: Final = 128  # samples
CLIP: Final = 2.0
SLOWEST, FASTEST = 50.0, 5_000_000.0  # tokens/s; what lies outside is a fault of some clock

_FADE: Final = 0.5 ** (1 / HALF_LIFE)


class PrefillRate:
    """What one replica prefills in a second; ``fleet`` is that of all, for which nothing else is known."""

    __slots__ = ("_fleet", "_mass", "_seconds", "_tokens", "samples", "shown")

    def __init__(self, fleet: PrefillRate | None = None) -> None:
        self._fleet = fleet
        self.shown: float | None = None  # tokens/s, by answers of its own; for those to whom a property takes too long
        self.samples = 0
        self._mass = 0.0  # samples, as far as they have not faded
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s; without an answer of its own, what others showed."""
        return self.shown or (DEFAULT_RATE if self._fleet is None else self._fleet.tokens_per_s)

    @property
    def is_measured(self) -> bool:
        """Whether this replica, or any other, has shown how fast it is."""
        return bool(self.samples) or (self._fleet is not None and self._fleet.is_measured)

    def learn(self, tokens: float, ttft_s: float) -> None:
        """Take a sample in: so many tokens were prefilled in this time."""
        if tokens < MIN_TOKENS or ttft_s <= 0:
            return
        fleet = self._fleet
        if fleet is not None:
            fleet.learn(tokens, ttft_s)
        if self.shown is not None:
            expected_s = tokens / self.shown
            if not expected_s / CLIP <= ttft_s <= expected_s * CLIP:
                ttft_s = min(max(ttft_s, expected_s / CLIP), expected_s * CLIP)
        if not SLOWEST * ttft_s <= tokens <= FASTEST * ttft_s:
            ttft_s = min(max(ttft_s, tokens / FASTEST), tokens / SLOWEST)
        self.samples += 1
        self._mass = mass = _FADE * self._mass + 1.0
        self._tokens = known = _FADE * self._tokens + tokens
        self._seconds = known_s = _FADE * self._seconds + ttft_s
        if fleet is None:
            self.shown = known / known_s
        else:
            lent = LENT * known / mass
            self.shown = (known + lent) / (known_s + lent / (fleet.shown or fleet.tokens_per_s))
