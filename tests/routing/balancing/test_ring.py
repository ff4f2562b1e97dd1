from __future__ import annotations

from collections import Counter
from itertools import islice
from statistics import pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from routing.balancing.hash_ring import LONG_WALK, LONG_WALKS, HashRing
from routing.balancing.shared_rings import shared_ring
from routing.schema.ring import points_of
from routing.types import PrefixHash, ReplicaId
from tests.routing.building import names

A, B = names(2)
LARGE = HashRing(dict.fromkeys(names(LONG_WALK * 2 + 8), 1.0))

keys = st.integers(0, 2**64 - 1).map(PrefixHash)
weights = st.dictionaries(
    st.text("abcdef-", min_size=1, max_size=3).map(ReplicaId),
    st.sampled_from([0.6, 1.0, 2.0, 7.5]),
    min_size=1,
    max_size=6,
)


def spread(count: int) -> list[PrefixHash]:
    """Keys evenly over the circle."""
    return [PrefixHash(number * (2**64 // count)) for number in range(count)]


def home(ring: HashRing, key: PrefixHash) -> ReplicaId:
    return next(ring.walk(key))


@given(fleet=weights, key=keys | st.integers(0, 63).map(lambda arc: PrefixHash(arc << 58)))
def test_a_home_is_the_first_point_behind_a_key(fleet: dict[ReplicaId, float], key: PrefixHash) -> None:
    points = {
        xxh3_64_intdigest(name.encode().ljust(4, b"\0"), number): name
        for name, count in points_of(fleet).items()
        for number in range(count)
    }

    first = min(points, key=lambda point: (point - key) % 2**64)
    assert home(HashRing(fleet), key) == points[first]


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
    gone = data.draw(st.sampled_from(sorted(fleet)))
    left = {name: weight for name, weight in fleet.items() if name != gone}

    assert list(HashRing(left).walk(key)) == [name for name in HashRing(fleet).walk(key) if name != gone]


@given(fleet=weights, key=keys, heavier=st.sampled_from([1.0, 3.0, 8.0]))
def test_a_weight_that_grows_draws_keys_only_to_itself(
    fleet: dict[ReplicaId, float], key: PrefixHash, heavier: float
) -> None:
    grown = min(fleet)
    after = HashRing({**fleet, grown: max(heavier, fleet[grown])})

    assert home(after, key) in {home(HashRing(fleet), key), grown}


# --- a single home -----------------------------------------------------------------------------------


@given(fleet=weights, key=keys, data=st.data())
def test_only_the_keys_of_a_replica_that_leaves_get_another_home(
    fleet: dict[ReplicaId, float], key: PrefixHash, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(fleet)))
    left = {name: weight for name, weight in fleet.items() if name != gone}
    ring = HashRing(fleet)
    home = ring.nearest(key, fleet)

    assert home in fleet
    if home != gone:
        assert ring.nearest(key, left) == home  # it is away
        if max(left.values()) == max(fleet.values()):  # else a weight may stand for other points
            assert HashRing(left).nearest(key, left) == home  # it is no longer configured


@pytest.mark.parametrize("count", [16, 100])
def test_homes_are_shared_more_evenly_than_first_places_of_walks(count: int) -> None:
    ring, among = HashRing(dict.fromkeys(names(count), 1.0)), frozenset(names(count))
    asked = [PrefixHash(xxh3_64_intdigest(b"", number)) for number in range(300 * count)]
    shares = Counter(ring.nearest(key, among) for key in asked)
    walked = Counter(home(ring, key) for key in asked)

    assert set(shares) == among
    assert pstdev(shares.values()) < 0.07 * 300
    assert pstdev(shares.values()) < pstdev(walked.values())


def test_the_keys_of_one_that_leaves_go_to_many() -> None:
    everybody = names(20)
    ring, left = HashRing(dict.fromkeys(everybody, 1.0)), frozenset(everybody[1:])
    lost = [key for key in spread(5000) if ring.nearest(key, frozenset(everybody)) == everybody[0]]

    assert len({ring.nearest(key, left) for key in lost}) > 15


def test_where_few_are_asked_for_nobody_may_be_near() -> None:
    ring = HashRing(dict.fromkeys(names(1000), 1.0))
    found = Counter(ring.nearest(key, {A}) for key in spread(400))

    assert found[A] < 40
    assert found[None] == 400 - found[A]
    assert HashRing({}).nearest(PrefixHash(7), {A}) is None


@pytest.mark.parametrize("count", [4, 100])
def test_replicas_share_the_keys_about_evenly(count: int) -> None:
    ring = HashRing(dict.fromkeys(names(count), 1.0))
    share = Counter(home(ring, key) for key in spread(20_000))

    assert len(share) == count
    assert max(share.values()) < 1.35 * 20_000 / count
    assert min(share.values()) > 0.65 * 20_000 / count


@pytest.mark.parametrize("unit", [0.01, 0.3, 1.0, 4.0, 80.0, 500.0])
def test_keys_are_shared_by_weight_whatever_its_unit(unit: float) -> None:
    light, heavy = names(2)
    ring = HashRing({light: unit, heavy: 2 * unit})
    share = Counter(home(ring, key) for key in spread(20_000))

    assert share[heavy] / share[light] == pytest.approx(2.0, rel=0.35)


def test_a_ring_of_heavy_replicas_is_no_larger_than_one_of_light_ones() -> None:
    assert len(HashRing(dict.fromkeys(names(3), 1000.0))._points) <= 3 * 8 * 160


def test_a_walk_is_lazy() -> None:
    ring = HashRing(dict.fromkeys(names(1000), 1.0))

    assert len(list(islice(ring.walk(PrefixHash(1)), 3))) == 3


@given(key=keys, steps=st.lists(st.integers(0, 2 * LONG_WALK + 8), max_size=6))
def test_walks_that_are_remembered_are_the_same_walks(key: PrefixHash, steps: list[int]) -> None:
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


def test_only_so_many_walks_are_remembered() -> None:
    ring = HashRing(dict.fromkeys(names(20), 1.0))
    for key in spread(3 * LONG_WALKS):
        list(ring.walk(key))

    assert len(ring._long_walks) == LONG_WALKS


def test_an_empty_ring_has_no_homes() -> None:
    assert list(HashRing({}).walk(PrefixHash(1))) == []


def test_a_key_past_the_last_point_begins_anew() -> None:
    ring = HashRing(dict.fromkeys(names(3), 1.0))

    assert list(ring.walk(PrefixHash(2**64 - 1))) == list(ring.walk(PrefixHash(0)))


def test_a_ring_is_shared_while_somebody_holds_it() -> None:
    one, same = shared_ring({A: 1.0, B: 2.0}), shared_ring({B: 2.0, A: 1.0})
    other = shared_ring({A: 1.0, B: 1.0})

    assert one is same
    assert one is not other


@pytest.mark.parametrize("form", ["vm{}", "r1{}", "r{0}", "{0}", "{0}{0}{0}", "gpu-{}", "node{}"])
@pytest.mark.parametrize("weight", [1.0, 8.0])
def test_whatever_replicas_are_called_each_has_points_of_its_own(form: str, weight: float) -> None:
    fleet = {ReplicaId(form.format(number)): weight for number in range(10)} | {ReplicaId("r11"): weight}
    ring = HashRing(fleet)
    preferred_replicas = Counter(home(ring, key) for key in spread(5000))

    share = 5000 / len(fleet)
    assert all(0.6 * share < preferred_replicas[name] < 1.5 * share for name in fleet), preferred_replicas


# --- golden values: a change here moves every fleet's prompts ----------------------------------------


def test_these_home_orders_never_change() -> None:
    ring = HashRing({name: 1.0 + number % 2 for number, name in enumerate(names(5))})

    orders = [[name[-1] for name in ring.walk(PrefixHash(key))] for key in (0, 2**62, 2**63, 2**64 - 2**60)]
    assert ["".join(order) for order in orders] == ["40312", "03142", "23140", "10234"]
