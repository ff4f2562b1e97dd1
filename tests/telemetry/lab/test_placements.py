"""Round robin and placement by prefix, compared with plain caches and over sampled blocks."""

from __future__ import annotations

import random

import pytest

from telemetry.lab.chains import Prompts
from telemetry.lab.worth import BATCHES, Placements, compare_placements
from tests.telemetry.lab.replaying import PlainCache
from tests.telemetry.lab.traces import HASH_TOKENS, Request, columns, request, sampled, traffic

CAPACITY = 600


def compared(requests: list[Request], *, replicas: int = 4, capacity: int = CAPACITY, warm: int | None = None):
    ratio = requests[0].sample_ratio if requests else 1.0
    rows = columns(requests)
    prompts = Prompts.of(rows, rows.prompt_tokens, ratio)
    blocks = [max(1, round(capacity * ratio))] * replicas
    return compare_placements(rows, prompts, blocks, warm=len(requests) // 3 if warm is None else warm)


def test_round_robin_is_that_of_plain_caches_in_turn():
    requests = traffic(1500)
    caches, cached = [PlainCache(CAPACITY) for _ in range(4)], 0
    for number, one in enumerate(requests):
        cache = caches[number % 4]
        if number >= 500:
            cached += HASH_TOKENS * cache.match(one.blocks)
        cache.use(one.blocks)

    found = compared(requests)

    total = sum(one.prompt_tokens for one in requests[500:])
    assert found.requests == 1000
    assert found.round_robin == pytest.approx(cached / total, abs=0.02)  # a partly cached block counts half
    assert found.by_prefix > found.round_robin + 0.1
    assert 0 < found.standard_error < 0.02


def test_one_prompt_shared_by_all_makes_no_difference():
    rng = random.Random(5)
    shared = [rng.getrandbits(64) for _ in range(40)]
    requests = [request(n, [*shared, *(rng.getrandbits(64) for _ in range(4))]) for n in range(300)]

    found = compared(requests)

    assert found.round_robin > 0.8
    assert abs(found.difference) < 0.001


def test_the_newer_half_differs_less_while_round_robin_warms_its_caches():
    rng = random.Random(7)
    prompts = [[rng.getrandbits(64) for _ in range(30)] for _ in range(40)]
    found = compared([request(n, rng.choice(prompts)) for n in range(1200)], capacity=10_000)

    assert found.difference > 0.02
    assert found.newer_difference < found.difference / 2


def test_nothing_reused_gives_no_hits_in_either():
    rng = random.Random(6)
    found = compared([request(n, [rng.getrandbits(64) for _ in range(9)]) for n in range(90)])

    assert found == Placements(60, 0.0, 0.0, 0.0, 0.0)


def test_a_sample_of_the_blocks_gives_the_same_difference_within_its_error():
    requests = traffic(3000)
    exact, estimated = compared(requests), compared(sampled(requests, 0.125))

    assert estimated.standard_error > exact.standard_error
    assert abs(estimated.difference - exact.difference) < 4 * estimated.standard_error
    assert estimated.difference == pytest.approx(exact.difference, abs=0.04)


def test_the_standard_error_is_the_spread_over_repeated_traffic():
    found = [compared(traffic(1200, seed=seed)) for seed in range(12)]
    differences = [one.difference for one in found]
    mean = sum(differences) / len(differences)
    spread = (sum((one - mean) ** 2 for one in differences) / (len(differences) - 1)) ** 0.5

    assert sum(one.standard_error for one in found) / len(found) == pytest.approx(spread, rel=0.7)


def test_too_few_requests_or_unknown_sizes_are_not_compared():
    assert compared(traffic(40), warm=40 - BATCHES + 1) is None
    assert compared(traffic(40), replicas=0) is None
    assert compared(traffic(40), replicas=1).difference == pytest.approx(0.0, abs=1e-9)
