"""The computed share of moved keys, compared with hash rings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.hash_ring import HashRing
from routing.schema import ConfigError, ReplicaConfig, check_config
from routing.schema.ring import MAX_ON_RING, moved_by_chance, moved_ratio, points_of
from routing.types import PrefixHash, ReplicaId
from tests.routing.building import config, pool

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
def test_the_moved_ratio_agrees_with_rings(before: dict[ReplicaId, float], after: dict[ReplicaId, float]) -> None:
    rings = range(12)  # shares of one ring differ from the weights by chance; the mean of many hardly does
    pairs = [
        pair
        for salt in rings
        for pair in zip(preferred_replicas(before, salt), preferred_replicas(after, salt), strict=True)
    ]

    moved = sum(old != new for old, new in pairs) / len(pairs)

    assert moved_ratio(points_of(before), points_of(after)) == pytest.approx(moved, abs=0.12)


@given(fleet=fleets)
def test_nothing_moves_without_a_change(fleet: dict[ReplicaId, float]) -> None:
    assert moved_ratio(points_of(fleet), points_of(fleet)) == 0.0


def test_one_of_eight_replicas_that_leaves_moves_an_eighth() -> None:
    eight = points_of(dict.fromkeys("abcdefgh", 1.0))

    assert moved_ratio(eight, {name: eight[name] for name in "bcdefgh"}) == pytest.approx(1 / 8)
    assert moved_ratio(eight, {name: eight[name] for name in "ab"}) == pytest.approx(3 / 4)


def test_a_rehash_moves_keys_in_proportion_to_replica_shares() -> None:
    assert moved_by_chance(points_of(dict.fromkeys("abcd", 1.0))) == pytest.approx(3 / 4)
    assert moved_by_chance(points_of({"a": 1.0})) == 0.0


def test_the_moved_ratio_of_an_empty_ring_is_none() -> None:
    assert moved_ratio({}, points_of({"a": 1.0})) is None
    assert moved_ratio(points_of({"a": 1.0}), {}) is None


@pytest.mark.parametrize(("extra", "is_rejected"), [(0, False), (1, True)])
def test_the_number_of_ranks_of_a_pool_is_bounded(extra: int, is_rejected: bool) -> None:
    wide = [ReplicaConfig(name=f"wide-{at}", url="http://a", data_parallel_size=1024) for at in range(63)]
    rest = [ReplicaConfig(name="rest", url="http://a", data_parallel_size=1023 + extra)]
    full = config(pool(members=(*wide, *rest, ReplicaConfig(name="last", url="http://a"))))

    assert sum(replica.data_parallel_size for replica in full.pools[0].replicas) == MAX_ON_RING + extra
    if is_rejected:
        with pytest.raises(ConfigError, match="65537 replicas and ranks"):
            check_config(full)
    else:
        check_config(full)
