"""How fast a replica prefills, learnt from its own answers.

Theory of operation. A request that found ``ahead`` tokens waiting and brought ``uncached`` of its own had its first
token after ``ttft_s``, so the replica got through ``ahead + uncached`` tokens in that time. The rate is the tokens of
the latest answers over their seconds, so that long work counts more than short work, which says more about fixed costs.
Older answers fade: one counts half after ``HALF_LIFE`` more. A time more than ``CLIP`` times off what the rate says
counts as if it were ``CLIP`` times off: one stall or one lucky hit moves little, and a change of hardware is followed.
Where a replica has answered little, it is taken to be as fast as all are: a guess for one that is measured against
others would starve it or flood it.

How many tokens prompts have for their bytes, learnt per pool and model from what engines report.

Theory of operation. The router sees bytes, and engines have room, work and limits in tokens. Each response reports the
tokens of its prompt (``usage.prompt_tokens``); tokens over bytes, both summed over many prompts, is the ratio of this
tokenizer, this chat template and these texts. Sums count long prompts for more, up to ``MAX_RATIO_BYTES`` each. They
begin with a prior of ``BLOCK_TOKENS`` in ``BLOCK_BYTES`` (4 bytes a token), which the first ``PRIOR_BYTES`` of prompts
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

from routing.schema import PoolConfig
from routing.types import BLOCK_BYTES, BLOCK_TOKENS

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


PRIOR_BYTES: Final = 16_384.0  # about four prompts of 4 KiB
HALF_LIFE_BYTES: Final = 4_194_304.0  # about a thousand prompts of 4 KiB
MIN_RATIO_BYTES: Final = 512  # of a sample: the template's own tokens are too large a part of a shorter prompt
MAX_RATIO_BYTES: Final = 16_384.0  # that one sample counts for
HYSTERESIS: Final = 0.75  # tokens of a block
LEAST_TOKENS, MOST_TOKENS = 8, 512  # of a block: 32 bytes a token, and two tokens a byte; others are no tokenizer's

_RATIO_FADE: Final = 0.6931471805599453 / HALF_LIFE_BYTES  # ln 2


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
        """Take in a response: a prompt of ``size`` bytes had so many tokens. Below ``MIN_RATIO_BYTES`` nothing
        happens.
        """
        if size < MIN_RATIO_BYTES or tokens <= 0:
            return
        ratio = self._tokens / self._bytes
        weight = size if size < MAX_RATIO_BYTES else MAX_RATIO_BYTES  # noqa: FURB136 -- min is a call
        sample = min(max(tokens / size, ratio / CLIP), ratio * CLIP)
        kept = 1.0 - _RATIO_FADE * weight
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
