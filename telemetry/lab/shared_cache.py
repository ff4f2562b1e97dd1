"""Whether a shared or offloaded cache tier would pay: from which prefix length, how many tokens a day, how much time.

A tier supplies ``n`` tokens in ``latency + n * bytes per token / bytes per second``; computing them takes ``n / prefill
rate``. So fetching wins from a break-even length on, or never, if the tier is slower for each token than prefill.
Published figures: 0 to 2 ms for blocks in GPU memory, 10 to 40 ms from CPU memory, 25 to 120 ms from another machine,
and a rule of thumb of 300 to 500 tokens.

What a tier can add is what the breakdown shows as lost to capacity and to fragmentation: tokens that were computed
before and that no placement could have kept in the present caches. Losses to placement are not counted: a policy wins
them without a tier. Of each request, the lost tokens form one gap after its cached prefix. A tier pays its latency once
for each gap, so only gaps of at least the break-even length are counted.

The tier is taken as large enough, and engines as waiting for each fetch; with asynchronous loading a little more is
saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import log
from typing import Any, NamedTuple

from telemetry.lab.chains import Floats
from telemetry.lab.costs import Price

LENGTHS = (0.0, *(float(round(64 * 2 ** (step / 2))) for step in range(27)))  # tokens, up to 524,288
MIN_REQUESTS = 100  # for a verdict
WORTH_RATIO = 0.02  # of the prefill time spent: a smaller saving is within the error of the rate and the breakdown
# Factors of latency, bandwidth and prefill rate by which these may be other than given.
DEVIATIONS = ((2.0, 1.0, 1.0), (1.0, 0.5, 1.0), (1.0, 1.0, 1.3), (1.0, 1.0, 0.7))


@dataclass(frozen=True, slots=True)
class CacheTier:
    """A cache tier: seconds before the first byte, and bytes per second afterwards."""

    key: str
    name: str
    latency_s: float
    bytes_per_s: float


TIERS = (
    CacheTier("cpu", "CPU memory", 0.025, 20e9),
    CacheTier("ssd", "Local SSD", 0.050, 5e9),
    CacheTier("remote", "Remote store", 0.075, 10e9),
)


LATENCY_MS = (0.0, 60_000.0)  # range of each tier's latency
GB_PER_S = (0.001, 10_000.0)  # range of each tier's bandwidth


def tier_parameters() -> dict[str, tuple[str, float, tuple[float, float]]]:
    """Parameters that describe the tiers: name to label, default and range."""
    parameters: dict[str, tuple[str, float, tuple[float, float]]] = {}
    for tier in TIERS:
        parameters[f"{tier.key}_latency_ms"] = (f"{tier.name}: latency, ms", 1000 * tier.latency_s, LATENCY_MS)
        parameters[f"{tier.key}_gb_per_s"] = (f"{tier.name}: bandwidth, GB/s", tier.bytes_per_s / 1e9, GB_PER_S)
    return parameters


def tiers_of(values: Mapping[str, float | None]) -> list[CacheTier]:
    """The tiers, with values of ``tier_parameters`` instead of the defaults."""

    def given(name: str, default: float) -> float:
        value = values.get(name)
        return default if value is None else value

    return [
        replace(
            tier,
            latency_s=given(f"{tier.key}_latency_ms", 1000 * tier.latency_s) / 1000,
            bytes_per_s=given(f"{tier.key}_gb_per_s", tier.bytes_per_s / 1e9) * 1e9,
        )
        for tier in TIERS
    ]


class Gap(NamedTuple):
    """Sums over the gaps of at least a length."""

    at_least: float  # tokens
    requests: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """Lengths of the prefixes that a pool lost to capacity and fragmentation, from captured requests."""

    requests: int  # number of examined requests
    prompt_tokens: float  # of these requests
    error_tokens: float  # standard error of one gap, from block sampling
    sums: tuple[Gap, ...]  # by ascending length, the first of all gaps

    @classmethod
    def of(cls, lost_tokens: Floats, prompt_tokens: Floats, error_tokens: float) -> Gaps:
        """From the lost tokens of each request."""
        sums = tuple(
            Gap(length, float((rows := lost_tokens >= max(length, 1.0)).sum()), float(lost_tokens[rows].sum()))
            for length in LENGTHS
        )
        return cls(len(lost_tokens), float(prompt_tokens.sum()), error_tokens, sums)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Gaps:
        """From ``as_json``."""
        return cls(**{**document, "sums": tuple(Gap(*row) for row in document["sums"])})

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def at_least(self, length: float) -> Gap:
        """Sums over the gaps of at least ``length`` tokens, interpolated in the logarithm of the length."""
        for shorter, longer in zip(self.sums, self.sums[1:], strict=False):
            if length <= longer.at_least:
                part = _part(shorter.at_least, longer.at_least, length)
                requests, tokens = (a + part * (b - a) for a, b in zip(shorter[1:], longer[1:], strict=True))
                return Gap(length, requests, tokens)
        return Gap(length, 0.0, 0.0)


def _part(low: float, high: float, value: float) -> float:
    low, high, value = (log(1 + number) for number in (low, high, value))
    return min(max((value - low) / (high - low), 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of a pool; None: unknown."""

    kv_bytes: float | None  # per token
    prefill_rate: float | None  # tokens/s of a replica
    gaps: Gaps | None
    lost_tokens: float | None  # a day, to capacity and fragmentation
    computed_tokens: float | None  # a day
    price: Price | None = None


class Advice(StrEnum):
    """Whether a tier is worth it."""

    WORTH_IT = "worth_it"
    NOT_WORTH_IT = "not_worth_it"
    UNCERTAIN = "uncertain"  # the answer depends on figures that are not known precisely enough
    UNKNOWN = "unknown"  # an input is missing


@dataclass(frozen=True, slots=True)
class TierEffect:
    """What a tier would bring."""

    tokens_per_day: float
    saved_s_per_day: float  # of replicas
    saved_ratio: float  # of the prefill time spent


@dataclass(frozen=True, slots=True)
class TierAdvice:
    """The advice on one tier."""

    tier: CacheTier
    break_even_tokens: float | None  # None: unknown, or fetching never wins
    never_wins: bool
    effect: TierEffect | None  # None: an input is missing
    money_per_day: float | None
    advice: Advice
    needs: tuple[str, ...]  # the missing inputs
    summary: str


def break_even_tokens(tier: CacheTier, kv_bytes: float, prefill_rate: float) -> float | None:
    """The shortest prefix that is fetched sooner than computed; None if there is none."""
    gain_s = 1 / prefill_rate - kv_bytes / tier.bytes_per_s  # for each token
    return tier.latency_s / gain_s if gain_s > 0 else None


def advise(tier: CacheTier, situation: Situation) -> TierAdvice:
    """The advice on a tier."""
    needs, rate, kv_bytes = _needs(situation), situation.prefill_rate, situation.kv_bytes
    break_even = None if rate is None or kv_bytes is None else break_even_tokens(tier, kv_bytes, rate)
    never_wins = rate is not None and kv_bytes is not None and break_even is None
    if needs:
        summary = f"{tier.name}: unknown."
        return TierAdvice(tier, break_even, never_wins, None, None, Advice.UNKNOWN, needs, summary)
    effect = _effect(tier, situation)
    money = effect.saved_s_per_day * situation.price.replica_s if situation.price else None
    advice = _verdict(tier, situation, effect)
    summary = _describe(tier, advice, break_even, effect)
    return TierAdvice(tier, break_even, never_wins, effect, money, advice, (), summary)


def _needs(situation: Situation) -> tuple[str, ...]:
    missing = {
        "needs: the size of the KV cache per token; set the model in the pool's settings": situation.kv_bytes,
        "needs: the prefill rate; run a capacity sweep or a what-if, and stream responses": situation.prefill_rate,
        "needs: the cache size of every replica and requests in the last hour": situation.gaps,
        "needs: a breakdown with known losses in this range": situation.lost_tokens,
        "needs: responses that report cached tokens (--enable-prompt-tokens-details)": situation.computed_tokens,
    }
    needs = [text for text, value in missing.items() if value is None]
    if situation.gaps is not None and situation.gaps.requests < MIN_REQUESTS:
        needs.append(f"needs: {MIN_REQUESTS} requests in the last hour; {situation.gaps.requests} were examined")
    return tuple(needs)


def _effect(tier: CacheTier, situation: Situation) -> TierEffect:
    rate, kv_bytes, gaps = situation.prefill_rate, situation.kv_bytes, situation.gaps
    if (
        rate is None
        or kv_bytes is None
        or gaps is None
        or situation.lost_tokens is None
        or situation.computed_tokens is None
    ):
        raise AssertionError("checked by _needs")
    length = break_even_tokens(tier, kv_bytes, rate)
    every = gaps.sums[0]
    if length is None or not every.tokens:
        return TierEffect(0.0, 0.0, 0.0)
    long = gaps.at_least(length)
    scale = situation.lost_tokens / every.tokens  # to a day
    fetched_s = long.requests * tier.latency_s + long.tokens * kv_bytes / tier.bytes_per_s
    saved_s = max(0.0, scale * (long.tokens / rate - fetched_s))
    spent_s = situation.computed_tokens / rate
    return TierEffect(scale * long.tokens, saved_s, min(saved_s / spent_s, 1.0) if spent_s else 0.0)


def _verdict(tier: CacheTier, situation: Situation, effect: TierEffect) -> Advice:
    """The verdict on an effect, if that of each deviation is the same."""
    is_worth = effect.saved_ratio >= WORTH_RATIO
    for latency, bandwidth, rate in DEVIATIONS:
        changed = replace(tier, latency_s=latency * tier.latency_s, bytes_per_s=bandwidth * tier.bytes_per_s)
        deviating = replace(situation, prefill_rate=rate * (situation.prefill_rate or 0.0))
        if (_effect(changed, deviating).saved_ratio >= WORTH_RATIO) is not is_worth:
            return Advice.UNCERTAIN
    return Advice.WORTH_IT if is_worth else Advice.NOT_WORTH_IT


def _describe(tier: CacheTier, advice: Advice, break_even: float | None, effect: TierEffect) -> str:
    """One sentence about a tier."""
    if break_even is None:
        return f"{tier.name}: not worth it. Fetching a token takes longer than computing it, at any length."
    return (
        f"{tier.name}: {advice.replace('_', ' ')}. Fetching is faster from {break_even:,.0f} tokens on; "
        f"it would add {effect.tokens_per_day / 1e6:,.1f} million cached tokens a day and save "
        f"{effect.saved_s_per_day / 60:,.0f} minutes of replicas, {100 * effect.saved_ratio:.1f} % of the prefill time."
    )
