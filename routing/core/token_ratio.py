"""How many tokens prompts have for their bytes, learnt per pool and model from what engines report.

Theory of operation. The router sees bytes, and engines have room, work and limits in tokens. Each response reports the
tokens of its prompt (``usage.prompt_tokens``); tokens over bytes, both summed over many prompts, is the ratio of this
tokenizer, this chat template and these texts. Sums count long prompts for more, up to ``MOST_BYTES`` each. They begin
with a prior of ``BLOCK_TOKENS`` in ``BLOCK_BYTES`` (4 bytes a token), which the first ``PRIOR_BYTES`` of prompts
outweigh, and fade by half every ``HALF_LIFE_BYTES``, so that a new tokenizer is learnt. A prompt that is more than
``CLIP`` times off the ratio counts as if it were that much off: odd text of a few clients moves it little.

Whatever a prompt's bytes do not show is no sample: attachments, token ids, stored responses, templates and truncation
that the client chose (``CanonicalPrompt.text_bytes``).

What others see is ``block_tokens``, whole tokens for each ``BLOCK_BYTES``. It moves only when the ratio has left it by
``HYSTERESIS`` of a token: capacities in blocks are derived from it, and must not change with each response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from routing.core.types import BLOCK_BYTES, BLOCK_TOKENS
from routing.schema import PoolConfig

PRIOR_BYTES: Final = 16_384.0  # about four prompts of 4 KiB
HALF_LIFE_BYTES: Final = 4_194_304.0  # about a thousand prompts of 4 KiB
LEAST_BYTES: Final = 512  # of a sample: the template's own tokens are too large a part of a shorter prompt
MOST_BYTES: Final = 16_384.0  # that one sample counts for
CLIP: Final = 2.0
HYSTERESIS: Final = 0.75  # tokens of a block
LEAST_TOKENS, MOST_TOKENS = 8, 512  # of a block: 32 bytes a token, and two tokens a byte; others are no tokenizer's

_FADE: Final = 0.6931471805599453 / HALF_LIFE_BYTES  # ln 2


class TokenRatio:
    """Tokens per byte of one model's prompts in one pool."""

    __slots__ = ("_bytes", "_tokens", "block_tokens", "samples")

    def __init__(self) -> None:
        self.block_tokens = BLOCK_TOKENS  # for each BLOCK_BYTES
        self.samples = 0
        self._bytes = PRIOR_BYTES  # of all samples and the prior, as far as they have not faded
        self._tokens = PRIOR_BYTES * BLOCK_TOKENS / BLOCK_BYTES

    @property
    def tokens_per_byte(self) -> float:
        """As learnt, without the rounding of ``block_tokens``."""
        return self._tokens / self._bytes

    def tokens(self, size: int) -> int:
        """Estimated tokens of so many bytes of a prompt."""
        return -(-size * self.block_tokens // BLOCK_BYTES)

    def learn(self, size: int, tokens: int) -> None:
        """Take in a response: a prompt of ``size`` bytes had so many tokens. Below ``LEAST_BYTES`` nothing happens."""
        if size < LEAST_BYTES or tokens <= 0:
            return
        ratio = self._tokens / self._bytes
        weight = size if size < MOST_BYTES else MOST_BYTES  # noqa: FURB136 -- min is a call
        sample = min(max(tokens / size, ratio / CLIP), ratio * CLIP)
        kept = 1.0 - _FADE * weight
        self._bytes = kept * self._bytes + weight
        self._tokens = kept * self._tokens + weight * sample
        self.samples += 1
        learnt = BLOCK_BYTES * self._tokens / self._bytes
        if not -HYSTERESIS <= learnt - self.block_tokens <= HYSTERESIS:
            self.block_tokens = min(max(round(learnt), LEAST_TOKENS), MOST_TOKENS)


class TokenRatios:
    """Those of all pools and models; they outlive configurations."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], TokenRatio] = {}

    def of(self, pool: str, model: str) -> TokenRatio:
        """The ratio of a pool's model, which begins with the prior."""
        return self._known.setdefault((pool, model), TokenRatio())

    def items(self) -> Iterator[tuple[tuple[str, str], TokenRatio]]:
        """``((pool, model), ratio)`` of each."""
        return iter(list(self._known.items()))

    def forget_all_but(self, names: Iterable[tuple[str, str]]) -> None:
        """Drop the ratios of other pools and models."""
        kept = set(names)
        self._known = {name: ratio for name, ratio in self._known.items() if name in kept}


def models_of(pool: PoolConfig) -> tuple[str, ...]:
    """The models of a pool that have a ratio each, adapters under the model that they adapt; "" is any other."""
    return (*pool.models, "")
