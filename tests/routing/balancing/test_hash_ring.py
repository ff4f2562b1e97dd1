from __future__ import annotations

from collections import Counter
from statistics import pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from routing.balancing.hash_ring import MAX_SHARED_POINTS, HashRing, shared_ring
from routing.schema.ring import points_of
from routing.types import PrefixHash, ReplicaId
from tests.routing.building import names

A, B = names(2)

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
    assert len(HashRing(dict.fromkeys(names(3), 1000.0)).points) <= 3 * 8 * 160


def test_a_ring_is_shared_between_users() -> None:
    one, same = shared_ring(((A, 1.0), (B, 2.0))), shared_ring(((A, 1.0), (B, 2.0)))
    other = shared_ring(((A, 1.0), (B, 1.0)))

    assert one is same
    assert one is not other


def test_rings_of_earlier_fleets_do_not_stay_in_memory() -> None:
    """Autoscaling gives a large fleet another ring several times a day."""
    fleets = [tuple((ReplicaId(f"{number}-{name}"), 8.0) for name in names(300)) for number in range(4)]
    rings = [shared_ring(fleet) for fleet in fleets]

    assert shared_ring(fleets[-1]) is rings[-1]
    assert len(rings[0].points) > MAX_SHARED_POINTS / 3
    assert shared_ring(fleets[0]) is not rings[0]


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
