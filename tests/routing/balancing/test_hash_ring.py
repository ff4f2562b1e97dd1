from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import islice
from statistics import pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from routing.balancing.candidates import Candidates
from routing.balancing.hash_ring import LONG_WALK_REPLICAS, MAX_LONG_WALKS, HashRing, bounded_choice
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.shared_rings import shared_ring
from routing.schema.ring import points_of
from routing.types import PrefixHash, Reason, ReplicaId
from tests.routing.building import names

A, B = names(2)
LARGE = HashRing(dict.fromkeys(names(LONG_WALK_REPLICAS * 2 + 8), 1.0))

keys = st.integers(0, 2**64 - 1).map(PrefixHash)
weights = st.dictionaries(
    st.text("abcdef-", min_size=1, max_size=3).map(ReplicaId),
    st.sampled_from([0.6, 1.0, 2.0, 7.5]),
    min_size=1,
    max_size=6,
)


def spread(count: int) -> list[PrefixHash]:
    """Keys evenly spread over the ring."""
    return [PrefixHash(number * (2**64 // count)) for number in range(count)]


def preferred_replica(ring: HashRing, key: PrefixHash) -> ReplicaId:
    return next(ring.walk(key))


@given(fleet=weights, key=keys | st.integers(0, 63).map(lambda arc: PrefixHash(arc << 58)))
def test_the_preferred_replica_owns_the_first_point_behind_the_key(
    fleet: dict[ReplicaId, float], key: PrefixHash
) -> None:
    points = {
        xxh3_64_intdigest(name.encode().ljust(4, b"\0"), number): name
        for name, count in points_of(fleet).items()
        for number in range(count)
    }

    first = min(points, key=lambda point: (point - key) % 2**64)
    assert preferred_replica(HashRing(fleet), key) == points[first]


@given(fleet=weights, key=keys)
def test_a_walk_meets_every_replica_once(fleet: dict[ReplicaId, float], key: PrefixHash) -> None:
    assert sorted(HashRing(fleet).walk(key)) == sorted(fleet)


@given(fleet=weights, key=keys)
def test_the_order_of_configuration_does_not_matter(fleet: dict[ReplicaId, float], key: PrefixHash) -> None:
    backwards = dict(reversed(fleet.items()))

    assert list(HashRing(fleet).walk(key)) == list(HashRing(backwards).walk(key))


@given(fleet=weights, key=keys, data=st.data())
def test_a_replica_that_leaves_moves_only_its_own_keys(
    fleet: dict[ReplicaId, float], key: PrefixHash, data: st.DataObject
) -> None:
    removed = data.draw(st.sampled_from(sorted(fleet)))
    remaining = {name: weight for name, weight in fleet.items() if name != removed}

    assert list(HashRing(remaining).walk(key)) == [name for name in HashRing(fleet).walk(key) if name != removed]


@given(fleet=weights, key=keys, heavier=st.sampled_from([1.0, 3.0, 8.0]))
def test_a_growing_weight_moves_keys_only_to_its_replica(
    fleet: dict[ReplicaId, float], key: PrefixHash, heavier: float
) -> None:
    grown = min(fleet)
    after = HashRing({**fleet, grown: max(heavier, fleet[grown])})

    assert preferred_replica(after, key) in {preferred_replica(HashRing(fleet), key), grown}


# --- a single preferred replica ----------------------------------------------------------------------


@given(fleet=weights, key=keys, data=st.data())
def test_nearest_moves_only_the_keys_of_a_replica_that_leaves(
    fleet: dict[ReplicaId, float], key: PrefixHash, data: st.DataObject
) -> None:
    removed = data.draw(st.sampled_from(sorted(fleet)))
    remaining = {name: weight for name, weight in fleet.items() if name != removed}
    ring = HashRing(fleet)
    preferred_replica = ring.nearest(key, fleet)

    assert preferred_replica in fleet
    if preferred_replica != removed:
        assert ring.nearest(key, remaining) == preferred_replica  # it is unavailable
        if max(remaining.values()) == max(fleet.values()):  # otherwise weights may be scaled differently
            assert HashRing(remaining).nearest(key, remaining) == preferred_replica  # it is no longer configured


@pytest.mark.parametrize("count", [16, 100])
def test_nearest_balances_better_than_first_points(count: int) -> None:
    ring, among = HashRing(dict.fromkeys(names(count), 1.0)), frozenset(names(count))
    sample_keys = [PrefixHash(xxh3_64_intdigest(b"", number)) for number in range(300 * count)]
    shares = Counter(ring.nearest(key, among) for key in sample_keys)
    walked = Counter(preferred_replica(ring, key) for key in sample_keys)

    assert set(shares) == among
    assert pstdev(shares.values()) < 0.07 * 300
    assert pstdev(shares.values()) < pstdev(walked.values())


def test_the_keys_of_a_replica_that_leaves_go_to_many_others() -> None:
    fleet_names = names(20)
    ring, remaining = HashRing(dict.fromkeys(fleet_names, 1.0)), frozenset(fleet_names[1:])
    lost = [key for key in spread(5000) if ring.nearest(key, frozenset(fleet_names)) == fleet_names[0]]

    assert len({ring.nearest(key, remaining) for key in lost}) > 15


def test_nearest_may_find_none_among_few() -> None:
    ring = HashRing(dict.fromkeys(names(1000), 1.0))
    found = Counter(ring.nearest(key, {A}) for key in spread(400))

    assert found[A] < 40
    assert found[None] == 400 - found[A]
    assert HashRing({}).nearest(PrefixHash(7), {A}) is None


@pytest.mark.parametrize("count", [4, 100])
def test_replicas_share_the_keys_about_evenly(count: int) -> None:
    ring = HashRing(dict.fromkeys(names(count), 1.0))
    share = Counter(preferred_replica(ring, key) for key in spread(20_000))

    assert len(share) == count
    assert max(share.values()) < 1.35 * 20_000 / count
    assert min(share.values()) > 0.65 * 20_000 / count


@pytest.mark.parametrize("unit", [0.01, 0.3, 1.0, 4.0, 80.0, 500.0])
def test_keys_follow_the_weights_whatever_their_unit(unit: float) -> None:
    light, heavy = names(2)
    ring = HashRing({light: unit, heavy: 2 * unit})
    share = Counter(preferred_replica(ring, key) for key in spread(20_000))

    assert share[heavy] / share[light] == pytest.approx(2.0, rel=0.35)


def test_a_ring_of_heavy_replicas_is_no_larger_than_one_of_light_ones() -> None:
    assert len(HashRing(dict.fromkeys(names(3), 1000.0))._points) <= 3 * 8 * 160


@given(key=keys, steps=st.lists(st.integers(0, 2 * LONG_WALK_REPLICAS + 8), max_size=6))
def test_cached_walks_are_the_same_walks(key: PrefixHash, steps: list[int]) -> None:
    order = list(LARGE.walk(key))
    for count in steps:
        assert list(islice(LARGE.walk(key), count)) == order[:count]


def test_two_walks_of_one_key_do_not_disturb_each_other() -> None:
    key = PrefixHash(17)
    order = list(LARGE.walk(key))
    one, other = LARGE.walk(key), LARGE.walk(key)
    ahead = list(islice(one, 20))
    overtaking = list(islice(other, 30))

    assert (ahead, overtaking) == (order[:20], order[:30])
    assert (list(one), list(other)) == (order[20:], order[30:])


def test_the_number_of_cached_walks_is_bounded() -> None:
    ring = HashRing(dict.fromkeys(names(20), 1.0))
    for key in spread(3 * MAX_LONG_WALKS):
        list(ring.walk(key))

    assert len(ring._long_walks) == MAX_LONG_WALKS


def test_a_ring_is_shared_between_users() -> None:
    one, same = shared_ring({A: 1.0, B: 2.0}), shared_ring({B: 2.0, A: 1.0})
    other = shared_ring({A: 1.0, B: 1.0})

    assert one is same
    assert one is not other


@pytest.mark.parametrize("form", ["vm{}", "r1{}", "r{0}", "{0}", "{0}{0}{0}", "gpu-{}", "node{}"])
@pytest.mark.parametrize("weight", [1.0, 8.0])
def test_replicas_have_their_own_points_whatever_their_names(form: str, weight: float) -> None:
    fleet = {ReplicaId(form.format(number)): weight for number in range(10)} | {ReplicaId("r11"): weight}
    ring = HashRing(fleet)
    preferred_replicas = Counter(preferred_replica(ring, key) for key in spread(5000))

    share = 5000 / len(fleet)
    assert all(0.6 * share < preferred_replicas[name] < 1.5 * share for name in fleet), preferred_replicas


# --- golden values: a change here moves every fleet's prompts ----------------------------------------


def test_ring_orders_never_change() -> None:
    ring = HashRing({name: 1.0 + number % 2 for number, name in enumerate(names(5))})

    orders = [[name[-1] for name in ring.walk(PrefixHash(key))] for key in (0, 2**62, 2**63, 2**64 - 2**60)]
    assert ["".join(order) for order in orders] == ["40312", "03142", "23140", "10234"]


def candidates_with(*running: int, weights: list[float] | None = None) -> Candidates:
    """Candidates replica-0, replica-1 ... with this many running requests."""
    tracker = LoadTracker()
    fleet = names(len(running))
    for name, count in zip(fleet, running, strict=True):
        for _ in range(count):
            tracker.dispatch(name, 10)
    return Candidates(dict(zip(fleet, weights or [1.0] * len(fleet), strict=True)), tracker)


def order(*numbers: int) -> list[ReplicaId]:
    return [ReplicaId(f"replica-{number}") for number in numbers]


def test_replicas_that_are_not_candidates_are_not_reported_as_skipped() -> None:
    choice = bounded_choice(order(7, 1, 0), candidates_with(0, 0), 1.25, 4)

    assert (choice.target, choice.reason, choice.skipped) == ("replica-1", Reason.AFFINITY, ())


def test_only_candidates_count_towards_the_mean() -> None:
    tracker = LoadTracker()
    for _ in range(100):
        tracker.dispatch(ReplicaId("replica-9"), 1)
    for _ in range(4):
        tracker.dispatch(ReplicaId("replica-0"), 1)
    candidates = Candidates(dict.fromkeys(names(2), 1.0), tracker)

    assert bounded_choice(order(0, 1), candidates, 1.25, 4).target == "replica-1"


def test_if_all_in_order_are_full_the_least_loaded_gets_the_request() -> None:
    choice = bounded_choice(order(0, 1), candidates_with(9, 9, 1), 1.0, 1)  # an order without the last candidate

    assert (choice.target, choice.reason, choice.bound) == ("replica-2", Reason.SPILL, None)


@given(
    running=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    load_factor=st.sampled_from([1.0, 1.25, 2.0, 3.0]),
    min_bound=st.integers(1, 6),
    data=st.data(),
)
def test_no_replica_exceeds_its_bound(
    running: list[int], load_factor: float, min_bound: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=len(running), max_size=len(running)))
    ring_order = data.draw(st.permutations(names(len(running))))
    candidates = candidates_with(*running, weights=weights)

    choice = bounded_choice(ring_order, candidates, load_factor, min_bound)

    def bound(number: int) -> int:
        mean_weight = Fraction(sum(map(Fraction, weights)), len(weights))
        share = Fraction(load_factor) * (sum(running) + 1) / len(running) * Fraction(weights[number]) / mean_weight
        return max(min_bound, math.ceil(share))

    accepting = [name for name in ring_order if running[int(name[-1])] + 1 <= bound(int(name[-1]))]
    assert choice.target == accepting[0]
    assert choice.reason is (Reason.AFFINITY if choice.target == ring_order[0] else Reason.SPILL)
    assert choice.bound == bound(int(choice.target[-1]))
    assert choice.skipped == tuple(ring_order[: ring_order.index(choice.target)])


@pytest.mark.parametrize("load_factor", [1.0, 1.25, 2.0])
def test_a_hot_key_overflows_to_the_same_replicas_in_the_same_order(load_factor: float) -> None:
    tracker = LoadTracker()
    candidates = Candidates(dict.fromkeys(names(6), 1.0), tracker)
    ring_order = order(3, 5, 0, 1, 4, 2)
    used: list[ReplicaId] = []
    for _ in range(200):
        replica = bounded_choice(ring_order, candidates, load_factor, 4).target
        tracker.dispatch(replica, 1)
        if replica not in used:
            used.append(replica)

    assert used == ring_order[: len(used)]
    assert max(load.running for load in candidates.loads.values()) <= math.ceil(load_factor * 200 / 6)
