"""Sums of tokens: what answers said came from the cache, and what had been predicted of the same answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routing.proxy.decisions.record import Record


class Predictions:
    """Sums over the answers of which a hit was predicted, and that said how many tokens came from the cache."""

    __slots__ = ("answers", "cached", "predicted", "prompt")

    def __init__(self) -> None:
        self.answers = self.prompt = self.predicted = self.cached = 0

    def add(self, hit: int, estimate: int, prompt: int, cached: int) -> None:
        """Count one answer: ``hit`` of the estimated prompt were predicted, which is told in tokens of the real one."""
        self.answers += 1
        self.prompt += prompt
        self.cached += cached
        if estimate:
            self.predicted += min(prompt, round(hit * prompt / estimate))


class Tokens:
    """Sums over the answers that said how many tokens came from the cache."""

    __slots__ = ("answers", "cacheable", "cached", "predictions", "prompt")

    def __init__(self) -> None:
        self.answers = self.prompt = self.cached = 0
        self.cacheable: int | None = None  # None: the replica's block size is not known
        self.predictions: Predictions | None = None  # None: the strategy asks for no residency

    def add(self, record: Record, prompt: int, cached: int) -> None:
        """Count one answer, and what was expected of it beside what came.

        An engine always computes a prompt's last token, hence ``prompt - 1``.
        """
        self.answers += 1
        self.prompt += prompt
        self.cached += cached
        block_tokens = record.block_tokens
        if block_tokens:
            self.cacheable = (self.cacheable or 0) + (prompt - 1) // block_tokens * block_tokens
        if record.hit_tokens is not None:
            if self.predictions is None:
                self.predictions = Predictions()
            self.predictions.add(record.hit_tokens, record.prompt_tokens_estimate, prompt, cached)
