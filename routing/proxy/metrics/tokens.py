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

    __slots__ = ("answers", "cached", "predictions", "prompt")

    def __init__(self) -> None:
        self.answers = self.prompt = self.cached = 0
        self.predictions: Predictions | None = None  # None: the strategy asks for no residency

    def add(self, record: Record, prompt: int, cached: int) -> None:
        """Count one answer, and what was expected of it beside what came."""
        self.answers += 1
        self.prompt += prompt
        self.cached += cached
        if record.hit_tokens is not None:
            if self.predictions is None:
                self.predictions = Predictions()
            self.predictions.add(record.hit_tokens, record.prompt_tokens_estimate, prompt, cached)
