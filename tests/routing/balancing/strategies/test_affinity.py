"""What session_affinity and prefix_hash have in common: ring order of a key, with bounded load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.candidates import Candidates
from routing.balancing.hash_ring import HashRing
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.strategies.hashing import PrefixHashStrategy, SessionAffinity
from routing.balancing.strategies.strategy import Strategy
from routing.schema import PrefixHashSettings, SessionAffinitySettings
from routing.types import PrefixHash, Reason
from tests.routing.building import FixedKeys, names

WEIGHTS = dict.fromkeys(names(5), 1.0)
RING = HashRing(WEIGHTS)
BOTH = [SessionAffinity(RING, SessionAffinitySettings()), PrefixHashStrategy(RING, PrefixHashSettings())]

both = pytest.mark.parametrize("strategy", BOTH, ids=lambda strategy: type(strategy).__name__)


def key(strategy: Strategy, value: int) -> FixedKeys:
    """Keys with this value for the strategy's own key and another value for the other key."""
    session = isinstance(strategy, SessionAffinity)
    return FixedKeys(session=value if session else value ^ 2**63, tier1=value ^ 2**63 if session else value)


@both
@given(value=st.integers(0, 2**64 - 1))
def test_a_key_goes_to_its_preferred_replica(strategy: Strategy, value: int) -> None:
    choice = strategy.choose(key(strategy, value), Candidates(WEIGHTS, LoadTracker()))

    assert (choice.target, choice.reason) == (next(RING.walk(PrefixHash(value))), Reason.AFFINITY)


@both
def test_an_unavailable_replica_is_replaced_by_the_next_in_ring_order(strategy: Strategy) -> None:
    first, second, *_ = RING.walk(PrefixHash(17))
    choice = strategy.choose(key(strategy, 17), Candidates(WEIGHTS, LoadTracker()).without({first}))

    assert (choice.target, choice.reason) == (second, Reason.AFFINITY)


@both
def test_a_full_replica_overflows_to_the_next(strategy: Strategy) -> None:
    first, second, *_ = RING.walk(PrefixHash(17))
    tracker = LoadTracker()
    for _ in range(4):
        tracker.dispatch(first, 10)
    choice = strategy.choose(key(strategy, 17), Candidates(WEIGHTS, tracker))

    assert (choice.target, choice.reason, choice.skipped) == (second, Reason.SPILL, (first,))


@both
def test_a_request_without_a_key_goes_to_the_least_loaded(strategy: Strategy) -> None:
    tracker = LoadTracker()
    for name in names(4):
        tracker.dispatch(name, 10)
    choice = strategy.choose(FixedKeys(), Candidates(WEIGHTS, tracker))

    assert (choice.target, choice.reason) == ("replica-4", Reason.NO_KEY)
