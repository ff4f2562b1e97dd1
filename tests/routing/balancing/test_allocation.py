from __future__ import annotations

import random
from collections import Counter
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.allocation import GAIN_MARGIN, LOSS_MARGIN, MAX_KEYS, Shares, allocate, next_size, trim_sizes
from routing.balancing.shared_rings import shared_ring
from routing.prompt.hashing import PrefixHasher
from routing.types import ReplicaId
from tests.routing.building import SECRET, names

HASHER = PrefixHasher(SECRET)
GROUPS = "abcdef"

replica_counts = st.integers(2, 24)
key_sizes = st.dictionaries(st.sampled_from(GROUPS), st.integers(1, 8), min_size=1, max_size=6)


def plan(
    sizes: dict[str, int], weights: dict[ReplicaId, float], owners: dict[ReplicaId, int] | None = None
) -> dict[str, list[ReplicaId]]:
    ring = shared_ring(weights).ring
    orders = {key: list(ring.walk(HASHER.group("chat", key))) for key in sizes}
    return allocate(dict(sorted(sizes.items())), orders, weights, owners or {})


def equal(count: int) -> dict[ReplicaId, float]:
    return dict.fromkeys(names(count), 1.0)


# --- sizes -------------------------------------------------------------------------------------------


@given(st.integers(0, 20), st.floats(-2, 2))
def test_a_size_is_kept_while_the_share_is_near(before: int, difference: float) -> None:
    share = max(0.0, before + difference)
    size = next_size(before, share)

    assert size >= 1
    if before and before - LOSS_MARGIN <= share < before + GAIN_MARGIN:
        assert size == before
    assert next_size(size, share) == size  # stable for the same share
    assert size == 1 or share - GAIN_MARGIN <= size <= share + LOSS_MARGIN


@given(key_sizes, st.dictionaries(st.sampled_from(GROUPS), st.integers(0, 3)), replica_counts)
def test_excess_is_taken_from_the_largest(sizes: dict[str, int], floors: dict[str, int], count: int) -> None:
    trimmed = trim_sizes(sizes, floors, count)

    assert all(min(size, max(1, floors.get(key, 0))) <= trimmed[key] <= size for key, size in sizes.items())
    if sum(sizes.values()) <= count:
        assert trimmed == sizes
    elif all(trimmed[key] > max(1, floors.get(key, 0)) for key in sizes):
        assert sum(trimmed.values()) == count
    reduced = [key for key in sizes if trimmed[key] < sizes[key]]
    assert all(
        trimmed[key] + 1 >= trimmed[other]
        for key in reduced
        for other in sizes
        if trimmed[other] > floors.get(other, 0)
    )


# --- allocation --------------------------------------------------------------------------------------


@given(key_sizes, replica_counts)
def test_every_key_gets_its_size_and_sets_are_disjoint_if_possible(sizes: dict[str, int], count: int) -> None:
    sets = plan(sizes, equal(count))
    owners = Counter(replica for owned in sets.values() for replica in owned)

    assert {key: len(owned) for key, owned in sets.items()} == {key: min(size, count) for key, size in sizes.items()}
    assert all(len(set(owned)) == len(owned) for owned in sets.values())
    if sum(sizes.values()) <= count:
        assert set(owners.values()) == {1}


@given(key_sizes, replica_counts, st.data())
def test_growth_keeps_previous_replicas_and_takes_none_from_smaller_keys(
    sizes: dict[str, int], count: int, data: st.DataObject
) -> None:
    grown = data.draw(st.sampled_from(sorted(sizes)))
    before, after = plan(sizes, equal(count)), plan(sizes | {grown: sizes[grown] + 1}, equal(count))

    assert after[grown][: len(before[grown])] == before[grown]
    assert len(after[grown]) == min(len(before[grown]) + 1, count)
    for key in sizes.keys() - {grown}:
        if sizes[key] <= sizes[grown]:
            assert after[key] == before[key]


@pytest.mark.parametrize("newcomer", [False, True])
def test_growth_makes_others_exchange_a_fraction_of_a_replica(newcomer: bool) -> None:
    rng, exchanges, growths = random.Random(1), Counter[int](), 0
    while growths < 300:
        count = rng.randrange(4, 25)
        sizes = {key: rng.randrange(1, 9) for key in rng.sample(GROUPS[:-1], rng.randrange(2, 6))}
        if sum(sizes.values()) >= count:
            continue
        growths += 1
        grown = GROUPS[-1] if newcomer else rng.choice(sorted(sizes))
        before = plan(sizes, equal(count))
        after = plan(sizes | {grown: sizes.get(grown, 0) + 1}, equal(count))
        exchanges.update(len(set(before[key]) - set(after[key])) for key in sizes if key != grown)

    assert exchanges.total() >= 300
    assert sum(moves * times for moves, times in exchanges.items()) / growths < (1.0 if newcomer else 0.4)
    assert sum(times for moves, times in exchanges.items() if moves > 1) <= 0.01 * exchanges.total()


@given(key_sizes, replica_counts)
def test_the_order_of_keys_and_replicas_does_not_matter(sizes: dict[str, int], count: int) -> None:
    backwards = dict.fromkeys(reversed(names(count)), 1.0)

    assert plan(sizes, equal(count)) == plan(dict(reversed(sizes.items())), backwards)


def test_a_replica_that_leaves_moves_few_other_sets() -> None:
    sizes = dict.fromkeys(GROUPS, 3)
    before, after = plan(sizes, equal(24)), plan(sizes, equal(23))
    moved = sum(len(set(before[key]) - set(after[key]) - {names(24)[-1]}) for key in sizes)

    assert moved <= 3


def test_unequal_replicas_count_by_their_weight() -> None:
    weights = equal(8) | {names(9)[8]: 8.0}
    sets = plan({"a": 4, "b": 4}, weights)
    target_weight = 4 * mean(weights.values())

    for owned in sets.values():
        assert (
            sum(weights[replica] for replica in owned[:-1])
            < target_weight
            <= sum(weights[replica] for replica in owned)
        )


@given(key_sizes, st.lists(st.sampled_from([0.5, 1.0, 2.0, 8.0]), min_size=2, max_size=24))
def test_sets_of_unequal_replicas_are_disjoint_if_possible(sizes: dict[str, int], weights_: list[float]) -> None:
    weights = dict(zip(names(len(weights_)), weights_, strict=True))
    sizes = trim_sizes(sizes, {}, len(weights_))
    sets = plan(sizes, weights)
    owners = Counter(replica for owned in sets.values() for replica in owned)
    short = [
        key for key, owned in sets.items() if sum(map(weights.get, owned)) < sizes[key] * mean(weights_) * (1 - 1e-6)
    ]

    assert all(sets.values())
    if sum(sizes.values()) <= len(weights_):
        assert set(owners.values()) == {1}
        assert not short or len(owners) == len(weights_)  # no set is below its weight while a replica is free


@pytest.mark.parametrize("size", [1, 3])
def test_owned_replicas_are_picked_last(size: int) -> None:
    owned = dict.fromkeys(names(5), 1)
    assert set(plan({"a": size}, equal(8), owned)["a"]) <= set(names(8)) - set(names(5))
    assert set(plan({"a": 6}, equal(8), owned)["a"]) > set(names(8)) - set(names(5))


def shares_of(keys, half_life: float = 1e6) -> Shares:
    shares = Shares(half_life)
    for key in keys:
        shares.count(key, 1000)
    return shares


def test_shares_are_sorted_the_largest_first() -> None:
    frequent = shares_of([1] * 20 + [2] * 70 + [3] * 10).frequent_keys(0.15)

    assert [key for key, _ in frequent] == [2, 1]
    assert [share for _, share in frequent] == pytest.approx([0.7, 0.2], rel=0.01)


def test_there_are_no_shares_before_any_request() -> None:
    assert shares_of([]).frequent_keys(0.1) == []


def test_old_traffic_fades() -> None:
    shares = shares_of([1] * 10_000 + [2] * 100, half_life=100)

    assert dict(shares.frequent_keys(0.1)) == pytest.approx({1: 0.5, 2: 0.5}, rel=0.02)


def test_shares_stay_correct_in_the_long_run() -> None:
    shares = shares_of((number % 4 for number in range(50_000)), half_life=20)

    assert [share for _, share in shares.frequent_keys(0.1)] == pytest.approx([0.25] * 4, rel=0.1)


def test_few_keys_are_counted_and_heavy_ones_among_them() -> None:
    rng, shares, max_counted = random.Random(5), Shares(10_000), 0
    for _ in range(50_000):
        shares.count(7 if rng.random() < 0.05 else rng.getrandbits(64), 1000)
        max_counted = max(max_counted, len(shares))

    assert max_counted <= 2 * MAX_KEYS + 1
    assert [key for key, _ in shares.frequent_keys(0.03)] == [7]
