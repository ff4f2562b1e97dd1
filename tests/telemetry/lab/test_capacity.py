"""Reuse distances against caches that are really run, each with its room."""

from __future__ import annotations

import pytest

from telemetry.lab.capacity import CapacityCurve, Fenwick, ReuseDistances
from tests.telemetry.lab.replaying import PlainCache
from tests.telemetry.lab.traces import sampled, traffic


def test_a_fenwick_tree_sums_what_was_put_in():
    tree, plain = Fenwick(64), [0] * 65
    for place, value in ((1, 1), (64, 1), (33, 1), (33, -1), (32, 1)):
        tree.add(place, value)
        plain[place] += value
        assert [tree.up_to(at) for at in range(65)] == [sum(plain[: at + 1]) for at in range(65)]
    assert tree.total == 3


@pytest.mark.parametrize("room", [1, 50, 333, 2000, 10**6])
def test_one_pass_tells_what_a_cache_of_any_room_hits(room):
    distances, cache, hits = ReuseDistances(), PlainCache(room), 0
    for one in traffic(1500):
        hits += cache.match(one.blocks)
        cache.use(one.blocks)
        distances.use(one.blocks, [1.0] * len(one.blocks))
    assert distances.hits(room) == hits


def test_a_sample_of_the_blocks_tells_the_same_curve():
    requests, ratio = traffic(3000), 0.125
    whole, part = ReuseDistances(), ReuseDistances()
    for one, thin in zip(requests, sampled(requests, ratio), strict=True):
        whole.use(one.blocks, [1.0] * len(one.blocks))
        part.use(thin.blocks, [1 / ratio] * len(thin.blocks))
    asked = sum(len(one.blocks) for one in requests)
    for room in (500, 2000, 8000):
        assert part.hits(room * ratio) / asked == pytest.approx(whole.hits(room) / asked, abs=0.03)


def test_a_shared_cache_is_never_worse_than_a_split_one_where_prompts_are_placed_at_random():
    curve = CapacityCurve()
    for number, one in enumerate(traffic(3000, placed="random")):
        counts = number >= 500
        curve.use(one.replica, one.blocks, [64.0] * len(one.blocks), one.prompt_tokens if counts else None)
    points = curve.points({f"r{number}": 800 for number in range(4)})
    assert [point.multiple for point in points] == [0.25, 0.5, 1, 2, 4, 8]
    for point in points:
        assert point.one <= point.shared
        assert point.split < point.shared <= 1
    for name in ("one", "split", "shared"):
        rates = [getattr(point, name) for point in points]
        assert rates == sorted(rates)
    assert curve.requests == 2500


def test_without_room_or_traffic_there_is_no_curve():
    assert CapacityCurve().points({"r0": 10}) == []
    curve = CapacityCurve()
    curve.use("r0", [1], [64.0], 64.0)
    assert curve.points({}) == []
