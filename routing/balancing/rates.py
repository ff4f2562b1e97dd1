"""Learns how fast replicas prefill, and how many tokens prompts have for their bytes.

Prefill rate. A request that found ``queued`` tokens at a replica and had ``uncached`` tokens of its own got its first
token after ``ttft_s``, so the replica prefilled ``queued + uncached`` tokens in that time. The rate is the tokens of
recent responses divided by their seconds, so that long work counts more than short work, whose time is mostly fixed
cost. Older responses fade: a sample counts half after ``HALF_LIFE`` more. A sample that is off by more than ``CLIP``
times counts as if it were off by ``CLIP`` times, so a stall or a lucky hit moves little, while a change of hardware is
followed. A replica with few samples is assumed to be as fast as the fleet: a fixed guess would starve or flood it.

Token ratio. The router sees bytes, but engines have capacity, work and limits in tokens. Each response reports the
tokens of its prompt (``usage.prompt_tokens``). The sum of tokens divided by the sum of bytes is the ratio of a
tokenizer, its chat template and the texts. Long prompts count more, up to ``MAX_RATIO_BYTES`` each. The sums start with
a prior of ``BLOCK_TOKENS`` in ``BLOCK_BYTES`` (4 bytes a token), which weighs as much as ``PRIOR_BYTES`` of prompts,
and fade by half every ``HALF_LIFE_BYTES``, so that a new tokenizer is learnt. Samples are clipped by ``CLIP`` as well.
Prompts whose tokens do not all come from their bytes are not used (``CanonicalPrompt.sample_bytes``). Other code uses
``block_tokens``, whole tokens for each ``BLOCK_BYTES``. It changes only when the ratio is off by more than
``HYSTERESIS`` tokens, because capacities in blocks are derived from it and must not change with each response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from routing.schema import PoolConfig
from routing.types import BLOCK_BYTES, BLOCK_TOKENS

DEFAULT_RATE: Final = 8000.0  # tokens/s until any replica was measured; the rate of the simulated engines
FLEET_SAMPLES: Final = 24.0  # weight of the fleet's rate in each replica's own
MIN_TOKENS: Final = 512  # of a sample's work
HALF_LIFE: Final = 128  # samples
CLIP: Final = 2.0
SLOWEST, FASTEST = 50.0, 5_000_000.0  # tokens/s; rates outside are clock errors

_FADE: Final = 0.5 ** (1 / HALF_LIFE)


class PrefillRate:
    """Prefill rate of one replica; ``fleet`` is the rate of all replicas, the default."""

    __slots__ = ("_fleet", "_mass", "_seconds", "_tokens", "measured", "samples")

    def __init__(self, fleet: PrefillRate | None = None) -> None:
        self._fleet = fleet
        self.measured: float | None = None  # tokens/s by its own responses; read directly where a property is too slow
        self.samples = 0
        self._mass = 0.0  # samples, faded
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s; without own samples, the fleet's rate."""
        return self.measured or (DEFAULT_RATE if self._fleet is None else self._fleet.tokens_per_s)

    @property
    def is_measured(self) -> bool:
        """Whether this replica or any other has samples."""
        return bool(self.samples) or (self._fleet is not None and self._fleet.is_measured)

    def learn(self, tokens: float, ttft_s: float) -> None:
        """Add a sample: ``tokens`` were prefilled in ``ttft_s``."""
        if tokens < MIN_TOKENS or ttft_s <= 0:
            return
        fleet = self._fleet
        if fleet is not None:
            fleet.learn(tokens, ttft_s)
        if self.measured is not None:
            expected_s = tokens / self.measured
            if not expected_s / CLIP <= ttft_s <= expected_s * CLIP:
                ttft_s = min(max(ttft_s, expected_s / CLIP), expected_s * CLIP)
        if not SLOWEST * ttft_s <= tokens <= FASTEST * ttft_s:
            ttft_s = min(max(ttft_s, tokens / FASTEST), tokens / SLOWEST)
        self.samples += 1
        self._mass = mass = _FADE * self._mass + 1.0
        self._tokens = total = _FADE * self._tokens + tokens
        self._seconds = total_s = _FADE * self._seconds + ttft_s
        if fleet is None:
            self.measured = total / total_s
        else:
            prior = FLEET_SAMPLES * total / mass
            self.measured = (total + prior) / (total_s + prior / (fleet.measured or fleet.tokens_per_s))


PRIOR_BYTES: Final = 16_384.0  # about four prompts of 4 KiB
HALF_LIFE_BYTES: Final = 4_194_304.0  # about a thousand prompts of 4 KiB
MIN_RATIO_BYTES: Final = 512  # of a sample: a shorter prompt consists mostly of the template's own tokens
MAX_RATIO_BYTES: Final = 16_384.0  # for which one sample counts
HYSTERESIS: Final = 0.75  # tokens of a block
LEAST_TOKENS, MOST_TOKENS = 8, 512  # of a block: 32 bytes a token to two tokens a byte; no tokenizer is outside

_RATIO_FADE: Final = 0.6931471805599453 / HALF_LIFE_BYTES  # ln 2


class TokenRatio:
    """Tokens per byte of one model's prompts in one pool."""

    __slots__ = ("_bytes", "_tokens", "block_tokens", "samples")

    def __init__(self) -> None:
        self.block_tokens = BLOCK_TOKENS  # for each BLOCK_BYTES
        self.samples = 0
        self._bytes = PRIOR_BYTES  # of all samples and the prior, faded
        self._tokens = PRIOR_BYTES * BLOCK_TOKENS / BLOCK_BYTES

    @property
    def tokens_per_byte(self) -> float:
        """The learnt ratio, without the rounding of ``block_tokens``."""
        return self._tokens / self._bytes

    def tokens(self, size: int) -> int:
        """Estimated tokens of ``size`` bytes of a prompt."""
        return -(-size * self.block_tokens // BLOCK_BYTES)

    def learn(self, size: int, tokens: int) -> None:
        """Add a sample: a prompt of ``size`` bytes had ``tokens``. Ignores prompts below ``MIN_RATIO_BYTES``."""
        if size < MIN_RATIO_BYTES or tokens <= 0:
            return
        ratio = self._tokens / self._bytes
        weight = size if size < MAX_RATIO_BYTES else MAX_RATIO_BYTES  # noqa: FURB136 -- min is a call
        sample = min(max(tokens / size, ratio / CLIP), ratio * CLIP)
        retained = 1.0 - _RATIO_FADE * weight
        self._bytes = retained * self._bytes + weight
        self._tokens = retained * self._tokens + weight * sample
        self.samples += 1
        learnt = BLOCK_BYTES * self._tokens / self._bytes
        if not -HYSTERESIS <= learnt - self.block_tokens <= HYSTERESIS:
            self.block_tokens = min(max(round(learnt), LEAST_TOKENS), MOST_TOKENS)


class TokenRatios:
    """The token ratios of all pools and models; they outlive configurations."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[str, str], TokenRatio] = {}

    def of(self, pool: str, model: str) -> TokenRatio:
        """The ratio of a pool's model, which starts with the prior."""
        return self._ratios.setdefault((pool, model), TokenRatio())

    def items(self) -> Iterator[tuple[tuple[str, str], TokenRatio]]:
        """``((pool, model), ratio)`` of each."""
        return iter(list(self._ratios.items()))

    def forget_all_but(self, names: Iterable[tuple[str, str]]) -> None:
        """Drop the ratios of all other pools and models."""
        retained = set(names)
        self._ratios = {name: ratio for name, ratio in self._ratios.items() if name in retained}


def models_of(pool: PoolConfig) -> tuple[str, ...]:
    """The models of a pool with a ratio of their own; "" is any other. Adapters use the model that they adapt."""
    return (*pool.models, "")
