"""The grid of cache layouts and sizes, compared with plain caches and over sampled blocks."""

from __future__ import annotations

import random

import pytest

from telemetry.lab.cache_grid import BATCHES, CacheGrid, Placements
from tests.telemetry.lab.replaying import PlainCache
from tests.telemetry.lab.traces import HASH_TOKENS, Request, columns, request, sampled, traffic

CAPACITY = 600


def grid_of(requests: list[Request], *, replicas: int = 4, capacity: float = CAPACITY, warm: int = 0) -> CacheGrid:
    """``capacity``: of each cache, in blocks."""
    sizes = {f"r{number}": round(HASH_TOKENS * capacity) for number in range(replicas)}
    return CacheGrid(columns(requests), sizes, warm=warm, most_blocks=10**9)


def compared(requests: list[Request], *, warm: int | None = None, **caches: float) -> Placements | None:
    return grid_of(requests, warm=len(requests) // 3 if warm is None else warm, **caches).placements()


def plain_hit_rate(requests: list[Request], sizes: dict[str, float] | float, warm: int) -> float:
    """Of plain caches: one for each replica, or one for all."""
    caches: dict[str, PlainCache] = {}
    cached = 0
    for number, one in enumerate(requests):
        name = one.replica if isinstance(sizes, dict) else ""
        cache = caches.setdefault(name, PlainCache(round(sizes[name] if isinstance(sizes, dict) else sizes)))
        if number >= warm:
            cached += HASH_TOKENS * cache.match(one.blocks)
        cache.use(one.blocks)
    return cached / sum(one.prompt_tokens for one in requests[warm:])


def test_each_size_and_layout_has_the_hits_of_plain_caches():
    requests, sizes = traffic(2000, placed="random"), {f"r{number}": 800.0 for number in range(4)}

    points = {point.multiple: point for point in grid_of(requests, capacity=800, warm=500).points()}

    assert list(points) == [0.25, 0.5, 1, 2, 4, 8]
    for multiple in (0.25, 1, 4):
        plain = (
            plain_hit_rate(requests, 800 * multiple, 500),
            plain_hit_rate(requests, {name: multiple * size for name, size in sizes.items()}, 500),
            plain_hit_rate(requests, 4 * 800 * multiple, 500),
        )
        found = points[multiple]
        assert (found.one, found.split, found.shared) == pytest.approx(plain, abs=0.02)
        assert found.split < found.shared


def test_a_sample_of_the_blocks_gives_the_same_curve_and_working_set():
    requests = traffic(2000)
    whole, part = grid_of(requests), grid_of(sampled(requests, 0.125))
    for one, other in zip(whole.points(), part.points(), strict=True):
        assert (other.one, other.split, other.shared) == pytest.approx((one.one, one.split, one.shared), abs=0.03)
    assert part.working_set().tokens == pytest.approx(whole.working_set().tokens, rel=0.1)


def test_the_working_set_is_the_cache_size_that_has_most_of_the_reuse():
    requests = traffic(3000)
    found = grid_of(requests).working_set()

    reused = plain_hit_rate(requests, 10**9, 0)
    assert plain_hit_rate(requests, found.tokens / HASH_TOKENS, 0) == pytest.approx(0.9 * reused, rel=0.02)
    assert found.low <= found.tokens <= found.high
    assert 2000 < found.requests < 3000


def test_too_little_reuse_has_no_working_set():
    requests = [request(number, [number // 3]) for number in range(60)]
    assert grid_of(requests, warm=30).working_set().requests == 20  # of the counted ones
    assert grid_of(requests, warm=33).working_set() is None


def test_without_capacities_there_are_no_points():
    assert grid_of(traffic(40), replicas=0).points() == []


def test_lost_tokens_are_those_that_larger_caches_would_have():
    rng = random.Random(8)
    prompts = [[rng.getrandbits(64) for _ in range(20)] for _ in range(10)]
    requests = [request(number, prompts[number % 10]) for number in range(200)]

    lost = grid_of(requests, replicas=1, capacity=60, warm=100).lost_tokens()
    assert lost.tolist() == pytest.approx([20 * HASH_TOKENS] * 100, rel=0.1)  # each prompt is evicted before its turn
    assert not grid_of(requests, replicas=1, capacity=250, warm=100).lost_tokens().any()


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
