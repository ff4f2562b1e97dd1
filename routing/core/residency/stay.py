"""One prompt at a replica, from its dispatch on: what it was believed to find there is checked against the answer.

Theory of operation. A replica reports cached tokens. Of an LRU cache that has lost a prefix everything used longer ago
is gone as well, so after ``MISSES`` answers in a row that had much less than was expected, all that the replica last
used up to then is forgotten. Predictions that lean on something dispatched in the last ``SETTLED_S`` do not count: it
may be on its way.

The response also says how long the prompt's tail is (``tails.py``), and whether the tail of the turn before was there.
"""

from __future__ import annotations

from typing import Final

from routing.core.residency.holdings import Holding, Use
from routing.core.residency.runs import Chain, Run
from routing.core.residency.tails import Branches, Tail, TailReuse, tail_tokens

SETTLED_S: Final = 5.0  # after which a dispatched prompt has been prefilled, or never will be
MISSES: Final = 3  # in a row, until a replica's old entries are forgotten
MISS_RATIO: Final = 0.5  # delivered / predicted tokens below which a prediction was wrong
MIN_CHECKED_TOKENS: Final = 256  # predictions of fewer say nothing
MIN_TAIL_TOKENS: Final = 32  # of a tail that teaches anything: shorter ones are less than the estimate is off
WHOLE_RATIO: Final = 0.9  # of what stands before a tail: with less of it cached, it says nothing whether the tail was
FOUND_RATIO: Final = 0.5  # of a tail: with so much of it cached, the chain behind it stands for the same tokens


class Stay:
    """One dispatched prompt's place in the residency: confirmed by the answer, or taken back."""

    __slots__ = (
        "_before",
        "_before_tokens",
        "_branches",
        "_chain",
        "_held_tokens",
        "_holding",
        "_known",
        "_leans_on_s",
        "_prompt_tokens",
        "_tail",
        "_tails",
        "_use",
    )

    def __init__(
        self,
        holding: Holding,
        chain: Chain,
        known: int,
        use: Use,
        leans_on_s: float,
        prompt_tokens: int,
        held_tokens: int,
        learnt: tuple[TailReuse, Branches],
        tail: Run | None,
        before: Run | None,
    ) -> None:
        self._holding = holding
        self._chain = chain
        self._known = known  # blocks that it found; this prompt brought the others
        self._use = use
        self._leans_on_s = leans_on_s  # when the replica last used what it already had of the prompt
        self._prompt_tokens = prompt_tokens  # estimated, as the next
        self._held_tokens = held_tokens  # of the blocks that it found
        self._tails, self._branches = learnt
        self._tail = tail  # its own; None where tails are not kept yet
        self._before = before  # the tail of the prompt that it goes on from, if it goes on
        self._before_tokens = tail_tokens(before) if before is not None else 0

    def confirm(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int | None = None) -> None:
        """The answer says how much was cached; all in the engine's tokens."""
        if self._prompt_tokens <= 0 or prompt_tokens <= 0:
            return
        scale = prompt_tokens / self._prompt_tokens  # the engine's tokens for each estimated one
        self._learn_tails(scale, cached_tokens, generated_tokens)
        predicted = min(1.0, self._held_tokens / self._prompt_tokens) * prompt_tokens
        if predicted < MIN_CHECKED_TOKENS or self._use.used_s - self._leans_on_s < SETTLED_S:
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

    def _learn_tails(self, scale: float, cached_tokens: int, generated_tokens: int | None) -> None:
        """Give the prompt's own tail its length, and look whether the one before it was in the cache."""
        holding, tail = self._holding, self._tail
        if generated_tokens is not None:
            holding.keeps_tails = True
        if isinstance(tail, Tail):
            blocks = len(self._chain)
            block_tokens = self._held_tokens // self._known if self._known else holding.block_tokens
            rest = max(0, self._prompt_tokens - blocks * block_tokens)
            tail.tokens = int(rest + (generated_tokens or 0) / scale)
            holding.lengthen(tail, round(tail.tokens / block_tokens))
        if not 0 < self._known < len(self._chain) or cached_tokens < WHOLE_RATIO * scale * self._held_tokens:
            return
        found_tokens, before = cached_tokens / scale - self._held_tokens, self._before
        if before is None:
            self._branches.learn(self._chain[self._known - 1], found_tokens, self._held_tokens, holding.block_tokens)
        elif self._before_tokens >= MIN_TAIL_TOKENS:
            self._tails.learn(found_tokens / self._before_tokens)
            if found_tokens > FOUND_RATIO * self._before_tokens:
                holding.drop(before)

    def take_back(self) -> None:
        """The prompt was never prefilled: drop what it brought and nobody has used since."""
        self._holding.take_back(self._use, len(self._chain) - self._known)
        self._chain = ()
