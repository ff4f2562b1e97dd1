"""Shared beginnings that end inside a cache block: engines cache whole blocks, so the rest is computed every time.

A block of 16 tokens loses at most 15 tokens a request, which is never worth a finding; engines with blocks of hundreds
of tokens lose more. Structures have bytes, so the tokens of the shared beginning are estimated: they are what the
engine-counted prompt tokens are at no bytes of user text, by least squares over first turns. Without a clear result
(the margin includes a block boundary) there is no finding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import median

from telemetry.lint.structure import PromptStructure

MIN_PROMPTS = 8  # first turns with the same beginning
MIN_LOST_TOKENS = 32  # of a request, with the margin taken off
MIN_LOST_SHARE = 0.01  # of the median prompt
MIN_DISTINCT = 0.8  # of the user texts that begin differently, so that the shared beginning ends before them
TEMPLATE_TOKENS = 8  # at most, that a chat template adds behind the user's text
MAX_MARGIN_TOKENS = 200
NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Alignment:
    """A shared beginning of estimated length that ends inside a block."""

    segment: str  # kind of its last segment
    shared_tokens: int
    margin_tokens: int  # 95 % interval of ``shared_tokens``, half of it
    block_tokens: int
    prompts: int

    @property
    def lost_tokens(self) -> int:
        """Tokens of the beginning in the unfinished block."""
        return self.shared_tokens % self.block_tokens


def alignment(prompts: Sequence[PromptStructure]) -> Alignment | None:
    """The most expensive one; None if there is none or the engine reports too little."""
    by_beginning: dict[tuple[str, ...], list[PromptStructure]] = defaultdict(list)
    for prompt in prompts:
        if prompt.system_segments and len(prompt.history) == 1 and prompt.prompt_tokens and prompt.block_tokens:
            by_beginning[prompt.signature].append(prompt)
    found = [one for same in by_beginning.values() if (one := _alignment(same)) is not None]
    return max(found, key=lambda one: one.lost_tokens * one.prompts, default=None)


def _alignment(prompts: Sequence[PromptStructure]) -> Alignment | None:
    if len(prompts) < MIN_PROMPTS or len({_first_text(prompt) for prompt in prompts}) < MIN_DISTINCT * len(prompts):
        return None
    fitted = _intercept(
        [float(prompt.length - prompt.history[0].at) for prompt in prompts],
        [float(prompt.prompt_tokens or 0) for prompt in prompts],
    )
    if fitted is None:
        return None
    shared, error = fitted[0] - TEMPLATE_TOKENS / 2, fitted[1]
    margin = TEMPLATE_TOKENS / 2 + NORMAL_95 * error
    block = Counter(prompt.block_tokens or 0 for prompt in prompts).most_common(1)[0][0]
    whole_prompt = median(prompt.prompt_tokens or 0 for prompt in prompts)
    is_clear = (
        margin <= MAX_MARGIN_TOKENS and shared - margin > 0 and (shared - margin) // block == (shared + margin) // block
    )
    lost = shared % block - margin
    if not is_clear or lost < max(MIN_LOST_TOKENS, MIN_LOST_SHARE * whole_prompt):
        return None
    return Alignment(prompts[0].system_segments[-1].kind, round(shared), ceil(margin), block, len(prompts))


def _first_text(prompt: PromptStructure) -> str:
    """Hash of the first piece of the first message."""
    at = prompt.history[0].at
    return next((piece.hash for piece in prompt.pieces if piece.at >= at), "")


def _intercept(texts: Sequence[float], tokens: Sequence[float]) -> tuple[float, float] | None:
    """(tokens without any text, standard error) by least squares; None if all texts have the same length."""
    count, mean, mean_tokens = len(texts), sum(texts) / len(texts), sum(tokens) / len(tokens)
    squares = sum((text - mean) ** 2 for text in texts)
    if not squares:
        return None
    slope = sum((text - mean) * (of - mean_tokens) for text, of in zip(texts, tokens, strict=True)) / squares
    intercept = mean_tokens - slope * mean
    rest = sum((of - intercept - slope * text) ** 2 for text, of in zip(texts, tokens, strict=True))
    return intercept, sqrt(rest / (count - 2) * (1 / count + mean**2 / squares))
