"""Reuse distances, compared with simulated caches of each size."""

from __future__ import annotations

import pytest

from telemetry.lab.capacity import CapacityCurve, Fenwick, ReuseDistances
from tests.telemetry.lab.replaying import PlainCache
from tests.telemetry.lab.traces import Request, sampled, traffic


def test_a_fenwick_tree_returns_prefix_sums():
    tree, plain = Fenwick(64), [0] * 65
    for position, value in ((1, 1), (64, 1), (33, 1), (33, -1), (32, 1)):
        tree.add(position, value)
        plain[position] += value
        assert [tree.up_to(at) for at in range(65)] == [sum(plain[: at + 1]) for at in range(65)]
    assert tree.total == 3


def test_one_pass_gives_the_hits_of_a_cache_of_any_size():
    requests, distances = traffic(1500), ReuseDistances()
    for request in requests:
        distances.use(request.blocks, [1.0] * len(request.blocks))
    for capacity in (1, 50, 333, 2000, 10**6):
        assert distances.hits(capacity) == plain_hits(requests, capacity), capacity


def plain_hits(requests: list[Request], capacity: int) -> int:
    """Blocks that a cache of this size hits."""
    cache, hits = PlainCache(capacity), 0
    for request in requests:
        hits += cache.match(request.blocks)
        cache.use(request.blocks)
    return hits


def test_a_sample_of_the_blocks_gives_the_same_curve():
    requests, ratio = traffic(2000), 0.125
    whole, part = ReuseDistances(), ReuseDistances()
    for request, sample in zip(requests, sampled(requests, ratio), strict=True):
        whole.use(request.blocks, [1.0] * len(request.blocks))
        part.use(sample.blocks, [1 / ratio] * len(sample.blocks))
    total = sum(len(request.blocks) for request in requests)
    for capacity in (500, 2000, 8000):
        assert part.hits(capacity * ratio) / total == pytest.approx(whole.hits(capacity) / total, abs=0.03)


def test_a_shared_cache_is_never_worse_than_a_split_one_where_prompts_are_placed_at_random():
    curve = CapacityCurve()
    for number, request in enumerate(traffic(3000, placed="random")):
        counts = number >= 500
        curve.use(
            request.replica, request.blocks, [64.0] * len(request.blocks), request.prompt_tokens if counts else None
        )
    points = curve.points({f"r{number}": 800 for number in range(4)})
    assert [point.multiple for point in points] == [0.25, 0.5, 1, 2, 4, 8]
    for point in points:
        assert point.one <= point.shared
        assert point.split < point.shared <= 1
    for name in ("one", "split", "shared"):
        rates = [getattr(point, name) for point in points]
        assert rates == sorted(rates)
    assert curve.requests == 2500


def test_the_working_set_is_the_cache_size_that_has_most_of_the_reuse():
    curve, requests = CapacityCurve(), traffic(3000)
    for request in requests:
        curve.use(request.replica, request.blocks, [64.0] * len(request.blocks), request.prompt_tokens)
    found, distances = curve.working_set(64.0), ReuseDistances()
    for request in requests:
        distances.use(request.blocks, [64.0] * len(request.blocks))

    reused = distances.hits(10**9)
    assert distances.hits(found.tokens / 64) == pytest.approx(0.9 * reused, rel=0.01)
    assert found.low <= found.tokens <= found.high
    assert 2000 < found.requests < 3000
    sample = CapacityCurve()
    for request in sampled(requests, 0.125):
        sample.use(request.replica, request.blocks, [512.0] * len(request.blocks), request.prompt_tokens)
    assert sample.working_set(512.0).tokens == pytest.approx(found.tokens, rel=0.1)


def test_too_little_reuse_has_no_working_set():
    curve = CapacityCurve()
    for number in range(60):
        curve.use("r0", [number // 3], [64.0], 64.0 if number < 30 else None)
    assert curve.working_set(64.0).requests == 20  # of the counted ones
    assert CapacityCurve().working_set(64.0) is None


def test_a_curve_without_capacities_or_traffic_has_no_points():
    assert CapacityCurve().points({"r0": 10}) == []
    curve = CapacityCurve()
    curve.use("r0", [1], [64.0], 64.0)
    assert curve.points({}) == []
