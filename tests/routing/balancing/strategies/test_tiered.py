from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.candidates import Candidates
from routing.balancing.hash_ring import HashRing
from routing.balancing.load_tracker import Load, LoadTracker
from routing.balancing.strategies.hashing import Tiered
from routing.schema import TieredSettings
from routing.types import Reason, TargetId
from tests.routing.building import FixedKeys, names

WEIGHTS = dict.fromkeys(names(8), 1.0)
RING = HashRing(WEIGHTS)
hashes = st.integers(0, 2**64 - 1)


class CountedLookups(dict[TargetId, Load]):
    """Loads that count how often a replica is looked for."""

    count = 0

    def __contains__(self, target: object) -> bool:
        self.count += 1
        return super().__contains__(target)


def tiered(replicas: int = 3, min_bound: int = 4) -> Tiered:
    return Tiered(RING, TieredSettings(replicas=replicas, load_factor=1.0, min_bound=min_bound))


@given(prefix=hashes, conversations=st.sets(hashes, min_size=30, max_size=30), size=st.integers(1, 8))
def test_a_prefix_has_some_replicas_and_a_conversation_one_of_them(prefix, conversations, size: int) -> None:
    candidates = Candidates(WEIGHTS, LoadTracker())
    chosen = {tiered(size).choose(FixedKeys(tier1=prefix, tier2=key), candidates).target for key in conversations}
    preferred_replicas = [replica for replica, _ in zip(RING.walk(prefix), range(size), strict=False)]

    assert chosen <= set(preferred_replicas)
    assert len(chosen) > 1 or size == 1


@given(prefix=hashes, conversation=hashes)
def test_if_all_replicas_of_a_prefix_are_full_the_next_in_ring_order_follows(prefix: int, conversation: int) -> None:
    tracker = LoadTracker()
    preferred_replicas = list(RING.walk(prefix))
    for replica in preferred_replicas[:3]:
        for _ in range(20):
            tracker.dispatch(replica, 10)
    choice = tiered().choose(FixedKeys(tier1=prefix, tier2=conversation), Candidates(WEIGHTS, tracker))

    assert (choice.target, choice.reason) == (preferred_replicas[3], Reason.SPILL)
    assert set(choice.skipped) == set(preferred_replicas[:3])


def test_only_the_first_replicas_in_ring_order_are_looked_at() -> None:
    weights = dict.fromkeys(names(500), 1.0)
    candidates = Candidates(weights, LoadTracker())
    candidates.loads = lookups = CountedLookups(candidates.loads)
    strategy = Tiered(HashRing(weights), TieredSettings(replicas=3))
    strategy.choose(FixedKeys(tier1=1, tier2=2), candidates)

    assert lookups.count <= 5


@given(prefix=hashes, conversation=hashes)
def test_if_a_replica_leaves_only_its_conversations_move_to_its_replacement(prefix: int, conversation: int) -> None:
    candidates = Candidates(WEIGHTS, LoadTracker())
    keys = FixedKeys(tier1=prefix, tier2=conversation)
    preferred_replica, replacement = tiered().choose(keys, candidates).target, list(RING.walk(prefix))[3]

    for unavailable in set(WEIGHTS) - {preferred_replica}:
        assert tiered().choose(keys, candidates.without({unavailable})).target in {preferred_replica, replacement}


def test_without_a_prefix_the_least_loaded_without_a_conversation_the_first_of_the_prefix() -> None:
    tracker = LoadTracker()
    for replica in names(7):
        tracker.dispatch(replica, 10)
    candidates = Candidates(WEIGHTS, tracker)

    assert tiered().choose(FixedKeys(), candidates).reason is Reason.NO_KEY
    assert tiered().choose(FixedKeys(), candidates).target == names(8)[7]
    assert tiered().choose(FixedKeys(tier1=5), candidates).target == next(RING.walk(5))
