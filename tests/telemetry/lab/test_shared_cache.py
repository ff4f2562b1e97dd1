"""From which length a cache tier is faster than prefill, what it would bring, and how certain that is."""

from dataclasses import replace

import numpy as np
import pytest

from telemetry.lab.costs import Price
from telemetry.lab.shared_cache import (
    LENGTHS,
    Advice,
    CacheTier,
    Gaps,
    Situation,
    advise,
    break_even_tokens,
    tier_parameters,
    tiers_of,
)

KV = 320 * 1024  # bytes of a token of Llama 3 70B
CPU = CacheTier("cpu", "CPU memory", 0.025, 20e9)
PRICE = Price(3.6, 2, "USD")


def gaps(*lost: float, prompt: float = 4000) -> Gaps:
    return Gaps.of(np.array(lost, np.float64), np.full(len(lost), prompt), 0.0)


SITUATION = Situation(
    kv_bytes=KV,
    prefill_rate=8000,
    gaps=gaps(*[100] * 100, *[2000] * 100, *[0] * 800),
    lost_tokens=21_000_000,  # a day: 100 times the examined gaps
    computed_tokens=100_000_000,
    price=PRICE,
)


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "kv_bytes", "rate", "expected"),
    [
        (0.025, 20e9, KV, 8000, 0.025 / (1 / 8000 - KV / 20e9)),  # 230 tokens
        (0.0, 20e9, KV, 8000, 0.0),
        (0.1, 1e15, KV, 1000, pytest.approx(100.0, rel=1e-3)),  # only the latency: 100 ms of prefill
        (0.025, 20e9, KV, 100_000, None),  # prefill is faster at any length
        (0.025, 8000 * KV, KV, 8000, None),  # equally fast
        (0.025, 20e9, KV / 8, 100_000, pytest.approx(0.025 / (1e-5 - KV / 8 / 20e9))),  # a smaller model
    ],
)
def test_the_break_even_length_follows_from_latency_and_bandwidth(latency_s, bytes_per_s, kv_bytes, rate, expected):
    assert break_even_tokens(CacheTier("t", "T", latency_s, bytes_per_s), kv_bytes, rate) == expected


def test_gaps_are_summed_by_length():
    found = gaps(0, 100, 2000, 2000)
    assert found.sums[0] == (0.0, 3, 4100)
    assert (found.requests, found.prompt_tokens) == (4, 16_000)
    assert found.at_least(1000)[1:] == (2, 4000)
    assert found.at_least(1e9)[1:] == (0, 0)
    assert Gaps.read(found.as_json()) == found


@pytest.mark.parametrize("length", [1, 70, 300, 777, 5000, 200_000])
def test_sums_between_two_lengths_lie_between_theirs(length):
    random = np.random.default_rng(1)
    lost = np.exp(random.uniform(0, 12, 5000))
    found = Gaps.of(lost, lost, 0.0).at_least(length)
    assert found.tokens == pytest.approx(lost[lost >= length].sum(), rel=0.06)
    assert found.requests == pytest.approx((lost >= length).sum(), rel=0.06, abs=5)
    assert max(LENGTHS) > 200_000


def test_only_long_gaps_count_and_each_pays_the_latency():
    found = advise(CPU, SITUATION)

    effect = found.effect
    assert found.break_even_tokens == pytest.approx(230, abs=1)
    assert effect.tokens_per_day == pytest.approx(20_000_000)  # without the gaps of 100 tokens
    each_s = 2000 / 8000 - 0.025 - 2000 * KV / 20e9
    assert effect.saved_s_per_day == pytest.approx(10_000 * each_s)
    assert effect.saved_ratio == pytest.approx(10_000 * each_s / (100_000_000 / 8000))
    assert found.money_per_day == pytest.approx(effect.saved_s_per_day * 0.002)
    assert found.advice == Advice.WORTH_IT


@pytest.mark.parametrize(
    ("change", "tier", "advice"),
    [
        ({}, CPU, Advice.WORTH_IT),
        ({"lost_tokens": 1_000_000}, CPU, Advice.NOT_WORTH_IT),
        ({"lost_tokens": 0.0}, CPU, Advice.NOT_WORTH_IT),
        ({"gaps": gaps(*[0] * 200)}, CPU, Advice.NOT_WORTH_IT),
        ({"prefill_rate": 200_000}, CPU, Advice.NOT_WORTH_IT),
        ({"lost_tokens": 3_000_000}, CPU, Advice.UNCERTAIN),
        ({}, replace(CPU, latency_s=0.15), Advice.UNCERTAIN),  # twice the latency is more than prefill takes
    ],
)
def test_the_advice_says_whether_the_saving_is_large_enough(change, tier, advice):
    assert advise(tier, replace(SITUATION, **change)).advice == advice


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("kv_bytes", "KV cache per token"),
        ("prefill_rate", "prefill rate"),
        ("gaps", "cache size of every replica"),
        ("lost_tokens", "breakdown"),
        ("computed_tokens", "report cached tokens"),
    ],
)
def test_a_missing_input_is_named_and_gives_no_advice(field, text):
    found = advise(CPU, replace(SITUATION, **{field: None}))
    assert (found.advice, found.effect, found.money_per_day) == (Advice.UNKNOWN, None, None)
    (need,) = found.needs
    assert need.startswith("needs: ")
    assert text in need
    assert found.summary == "CPU memory: unknown."


def test_too_few_requests_are_a_missing_input():
    found = advise(CPU, replace(SITUATION, gaps=gaps(*[2000] * 99)))
    assert found.advice == Advice.UNKNOWN
    assert "99 were examined" in found.needs[0]


def test_tiers_take_given_values_instead_of_the_defaults():
    defaults = tiers_of({})
    assert [tier.key for tier in defaults] == ["cpu", "ssd", "remote"]
    changed = tiers_of({"cpu_latency_ms": 0.0, "remote_gb_per_s": 1.5, "ssd_latency_ms": None})
    assert (changed[0].latency_s, changed[2].bytes_per_s) == (0.0, 1.5e9)
    assert changed[1] == defaults[1]
    assert len(tier_parameters()) == 2 * len(defaults)
