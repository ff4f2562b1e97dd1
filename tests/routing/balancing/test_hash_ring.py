from __future__ import annotations

from collections import Counter
from statistics import pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from routing.balancing.hash_ring import MAX_SHARED_POINTS, HashRing, shared_ring
from routing.schema import ConfigError, ReplicaConfig, check_config
from routing.schema.ring import MAX_ON_RING, moved_by_chance, moved_ratio, points_of
from routing.types import PrefixHash, ReplicaId
from tests.routing.building import config, names, pool

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
def test_the_preferred_replica_owns_the_first_point_behind_the_key(fleet, key):
    points = {
        xxh3_64_intdigest(name.encode().ljust(4, b"\0"), number): name
        for name, count in points_of(fleet).items()
        for number in range(count)
    }

    first = min(points, key=lambda point: (point - key) % 2**64)
    assert preferred_replica(HashRing(fleet), key) == points[first]


@given(fleet=weights, key=keys)
def test_a_walk_meets_every_replica_once(fleet, key):
    assert sorted(HashRing(fleet).walk(key)) == sorted(fleet)


@given(fleet=weights, key=keys)
def test_the_order_of_configuration_does_not_matter(fleet, key):
    backwards = dict(reversed(fleet.items()))

    assert list(HashRing(fleet).walk(key)) == list(HashRing(backwards).walk(key))


@given(fleet=weights, key=keys, data=st.data())
def test_a_replica_that_leaves_moves_only_its_own_keys(fleet, key, data):
    removed = data.draw(st.sampled_from(sorted(fleet)))
    remaining = {name: weight for name, weight in fleet.items() if name != removed}

    assert list(HashRing(remaining).walk(key)) == [name for name in HashRing(fleet).walk(key) if name != removed]


@given(fleet=weights, key=keys, heavier=st.sampled_from([1.0, 3.0, 8.0]))
def test_a_growing_weight_moves_keys_only_to_its_replica(fleet, key, heavier):
    grown = min(fleet)
    after = HashRing({**fleet, grown: max(heavier, fleet[grown])})

    assert preferred_replica(after, key) in {preferred_replica(HashRing(fleet), key), grown}


# --- a single preferred replica ----------------------------------------------------------------------


@given(fleet=weights, key=keys, data=st.data())
def test_nearest_moves_only_the_keys_of_a_replica_that_leaves(fleet, key, data):
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
def test_nearest_balances_better_than_first_points(count):
    ring, among = HashRing(dict.fromkeys(names(count), 1.0)), frozenset(names(count))
    sample_keys = [PrefixHash(xxh3_64_intdigest(b"", number)) for number in range(300 * count)]
    shares = Counter(ring.nearest(key, among) for key in sample_keys)
    walked = Counter(preferred_replica(ring, key) for key in sample_keys)

    assert set(shares) == among
    assert pstdev(shares.values()) < 0.07 * 300
    assert pstdev(shares.values()) < pstdev(walked.values())


def test_the_keys_of_a_replica_that_leaves_go_to_many_others():
    fleet_names = names(20)
    ring, remaining = HashRing(dict.fromkeys(fleet_names, 1.0)), frozenset(fleet_names[1:])
    lost = [key for key in spread(5000) if ring.nearest(key, frozenset(fleet_names)) == fleet_names[0]]

    assert len({ring.nearest(key, remaining) for key in lost}) > 15


def test_nearest_may_find_none_among_few():
    ring = HashRing(dict.fromkeys(names(1000), 1.0))
    found = Counter(ring.nearest(key, {A}) for key in spread(400))

    assert found[A] < 40
    assert found[None] == 400 - found[A]
    assert HashRing({}).nearest(PrefixHash(7), {A}) is None


@pytest.mark.parametrize("count", [4, 100])
def test_replicas_share_the_keys_about_evenly(count):
    ring = HashRing(dict.fromkeys(names(count), 1.0))
    share = Counter(preferred_replica(ring, key) for key in spread(20_000))

    assert len(share) == count
    assert max(share.values()) < 1.35 * 20_000 / count
    assert min(share.values()) > 0.65 * 20_000 / count


@pytest.mark.parametrize("unit", [0.01, 0.3, 1.0, 4.0, 80.0, 500.0])
def test_keys_follow_the_weights_whatever_their_unit(unit):
    light, heavy = names(2)
    ring = HashRing({light: unit, heavy: 2 * unit})
    share = Counter(preferred_replica(ring, key) for key in spread(20_000))

    assert share[heavy] / share[light] == pytest.approx(2.0, rel=0.35)


def test_a_ring_of_heavy_replicas_is_no_larger_than_one_of_light_ones():
    assert len(HashRing(dict.fromkeys(names(3), 1000.0)).points) <= 3 * 8 * 160


def test_a_ring_is_shared_between_users():
    one, same = shared_ring(((A, 1.0), (B, 2.0))), shared_ring(((A, 1.0), (B, 2.0)))
    other = shared_ring(((A, 1.0), (B, 1.0)))

    assert one is same
    assert one is not other


def test_rings_of_earlier_fleets_do_not_stay_in_memory():
    """Autoscaling gives a large fleet another ring several times a day."""
    fleets = [tuple((ReplicaId(f"{number}-{name}"), 8.0) for name in names(300)) for number in range(4)]
    rings = [shared_ring(fleet) for fleet in fleets]

    assert shared_ring(fleets[-1]) is rings[-1]
    assert len(rings[0].points) > MAX_SHARED_POINTS / 3
    assert shared_ring(fleets[0]) is not rings[0]


@pytest.mark.parametrize("form", ["vm{}", "r1{}", "r{0}", "{0}", "{0}{0}{0}", "gpu-{}", "node{}"])
@pytest.mark.parametrize("weight", [1.0, 8.0])
def test_replicas_have_their_own_points_whatever_their_names(form, weight):
    fleet = {ReplicaId(form.format(number)): weight for number in range(10)} | {ReplicaId("r11"): weight}
    ring = HashRing(fleet)
    preferred_replicas = Counter(preferred_replica(ring, key) for key in spread(5000))

    share = 5000 / len(fleet)
    assert all(0.6 * share < preferred_replicas[name] < 1.5 * share for name in fleet), preferred_replicas


# --- golden values: a change here moves every fleet's prompts ----------------------------------------


def test_ring_orders_never_change():
    ring = HashRing({name: 1.0 + number % 2 for number, name in enumerate(names(5))})

    orders = [[name[-1] for name in ring.walk(PrefixHash(key))] for key in (0, 2**62, 2**63, 2**64 - 2**60)]
    assert ["".join(order) for order in orders] == ["40312", "03142", "23140", "10234"]


# --- The computed share of moved keys, compared with rings ---


KEYS = 250
fleets = st.dictionaries(
    st.sampled_from([ReplicaId(f"r{number}") for number in range(12)]),
    st.sampled_from([0.25, 1.0, 2.0, 7.5, 16.0]),
    min_size=1,
    max_size=12,
)


def preferred_replicas(weights: dict[ReplicaId, float], salt: int) -> list[ReplicaId]:
    """The preferred replica of many keys, on a ring whose replica names contain a salt."""
    ring = HashRing({ReplicaId(f"{name}-{salt}"): weight for name, weight in weights.items()})
    return [next(ring.walk(PrefixHash(number * (2**64 // KEYS)))) for number in range(KEYS)]


@given(before=fleets, after=fleets)
def test_the_moved_ratio_agrees_with_rings(before, after):
    rings = range(12)  # shares of one ring differ from the weights by chance; the mean of many hardly does
    pairs = [
        pair
        for salt in rings
        for pair in zip(preferred_replicas(before, salt), preferred_replicas(after, salt), strict=True)
    ]

    moved = sum(old != new for old, new in pairs) / len(pairs)

    assert moved_ratio(points_of(before), points_of(after)) == pytest.approx(moved, abs=0.12)


@given(fleet=fleets)
def test_nothing_moves_without_a_change(fleet):
    assert moved_ratio(points_of(fleet), points_of(fleet)) == 0.0


def test_one_of_eight_replicas_that_leaves_moves_an_eighth():
    eight = points_of(dict.fromkeys("abcdefgh", 1.0))

    assert moved_ratio(eight, {name: eight[name] for name in "bcdefgh"}) == pytest.approx(1 / 8)
    assert moved_ratio(eight, {name: eight[name] for name in "ab"}) == pytest.approx(3 / 4)


def test_a_rehash_moves_keys_in_proportion_to_replica_shares():
    assert moved_by_chance(points_of(dict.fromkeys("abcd", 1.0))) == pytest.approx(3 / 4)
    assert moved_by_chance(points_of({"a": 1.0})) == 0.0


def test_the_moved_ratio_of_an_empty_ring_is_none():
    assert moved_ratio({}, points_of({"a": 1.0})) is None
    assert moved_ratio(points_of({"a": 1.0}), {}) is None


@pytest.mark.parametrize(("extra", "is_rejected"), [(0, False), (1, True)])
def test_the_number_of_ranks_of_a_pool_is_bounded(extra, is_rejected):
    wide = [ReplicaConfig(name=f"wide-{at}", url="http://a", data_parallel_size=1024) for at in range(63)]
    rest = [ReplicaConfig(name="rest", url="http://a", data_parallel_size=1023 + extra)]
    full = config(pool(members=(*wide, *rest, ReplicaConfig(name="last", url="http://a"))))

    assert sum(replica.data_parallel_size for replica in full.pools[0].replicas) == MAX_ON_RING + extra
    if is_rejected:
        with pytest.raises(ConfigError, match="65537 replicas and ranks"):
            check_config(full)
    else:
        check_config(full)
