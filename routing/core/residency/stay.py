"""One prompt at a replica, from its dispatch on: what it was believed to find there is checked against the answer.

Theory of operation. A replica reports cached tokens. Of an LRU cache that has lost a prefix everything used longer ago
is gone as well, so after ``MISSES`` answers in a row that had much less than was expected, all that the replica last
used up to then is forgotten. Predictions that lean on something dispatched in the last ``SETTLED_S`` do not count: it
may be on its way.
"""

from __future__ import annotations

from typing import Final

from routing.core.residency.holdings import Holding
from routing.core.residency.runs import Chain

SETTLED_S: Final = 5.0  # after which a dispatched prompt has been prefilled, or never will be
MISSES: Final = 3  # in a row, until a replica's old entries are forgotten
MISS_RATIO: Final = 0.5  # delivered / predicted tokens below which a prediction was wrong
MIN_CHECKED_TOKENS: Final = 256  # predictions of fewer say nothing


class Stay:
    """One dispatched prompt's place in the residency: confirmed by the answer, or taken back."""

    __slots__ = ("_chain", "_holding", "_known", "_leans_on_s", "_now_s", "_predicted_ratio")

    def __init__(
        self, holding: Holding, chain: Chain, known: int, now_s: float, leans_on_s: float, predicted_ratio: float
    ) -> None:
        self._holding = holding
        self._chain = chain
        self._known = known  # blocks that it found; this prompt brought the others
        self._now_s = now_s
        self._leans_on_s = leans_on_s  # when the replica last used what it already had of the prompt
        self._predicted_ratio = predicted_ratio  # cached tokens / prompt tokens

    def confirm(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The answer says how much was cached; both in the engine's tokens."""
        predicted = self._predicted_ratio * prompt_tokens
        if predicted < MIN_CHECKED_TOKENS or self._now_s - self._leans_on_s < SETTLED_S:
            return
        holding = self._holding
        if cached_tokens >= MISS_RATIO * predicted:
            holding.misses = 0
            return
        holding.suspect_s = max(holding.suspect_s, self._leans_on_s) if holding.misses else self._leans_on_s
        holding.misses += 1
        if holding.misses >= MISSES:
            holding.misses = 0
            holding.evict_until(holding.suspect_s)

    def take_back(self) -> None:
        """The prompt was never prefilled: drop what it brought and nobody has used since."""
        self._holding.take_back(self._chain, self._known, self._now_s)
        self._chain = ()
