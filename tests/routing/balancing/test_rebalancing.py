from __future__ import annotations

from collections import Counter

import pytest

from routing.balancing.candidates import EXCESS_TOKENS, FAIR_RATIO, MIN_EXCESS
from routing.balancing.load_tracker import MAX_WEIGHT, RECENT_S, LoadTracker
from routing.balancing.strategies.holders import MAX_COMPARED
from routing.types import Reason
from tests.routing.balancing.fleet import Fleet
from tests.routing.building import names

MANY = 2 * MAX_COMPARED + 8


@pytest.mark.parametrize("count", [4, 16, MANY])
def test_a_prefix_of_all_prompts_spreads_to_every_replica_of_an_idle_fleet(count):
    fleet, requests_by_replica, prefilled = Fleet(count), Counter(), 0
    for _ in range(200 * count):
        choice = fleet.choose(2000)
        prefilled += choice.hit_tokens == 0
        fleet.hold(choice.target, 10)
        fleet.finish_requests(choice.target, 1)
        requests_by_replica[choice.target] += 1

    assert max(requests_by_replica.values()) < 1.3 * 200
    assert prefilled <= count


@pytest.mark.parametrize("count", [4, MANY])
@pytest.mark.parametrize(("offset", "moves"), [(-0.1, True), (0.1, False)])
def test_a_replica_with_excess_yields_only_if_that_costs_less_than_the_excess_is_worth(count, offset, moves):
    holder, requests = names(1)[0], 30
    too_many = requests * (1 - FAIR_RATIO / count) - MIN_EXCESS
    fleet = Fleet(count, block_tokens=int(EXCESS_TOKENS * (too_many + offset)) // 10)
    fleet.hold(holder, 10)
    fleet.finish_requests(holder, requests)
    assert fleet.candidates.recent.excess(fleet.candidates.by_name[holder]) == pytest.approx(too_many)

    choice = fleet.choose(10 * fleet.residency.block_tokens)
    assert (choice.target != holder) is moves
    assert choice.reason is (Reason.SPREAD if moves else Reason.HIT)


def test_one_conversation_is_not_rebalanced():
    fleet = Fleet(4)
    fleet.hold(fleet.names[0], 10)
    for _ in range(int(MIN_EXCESS)):
        assert fleet.choose(100).target == fleet.names[0]
        fleet.finish_requests(fleet.names[0], 1)


def test_no_request_waits_longer_for_rebalancing():
    fleet = Fleet(4)
    holder, *others = fleet.names
    fleet.hold(holder, 10)
    fleet.finish_requests(holder, 100)
    for name in others:
        fleet.queue(name, 1)
    assert fleet.choose(100).target == holder

    fleet.queue(holder, 1)
    assert fleet.choose(100).target != holder


def test_nothing_is_rebalanced_if_all_have_their_share():
    fleet = Fleet(4)
    for name in fleet.names:
        fleet.finish_requests(name, 100)
    fleet.hold(fleet.names[2], 10)
    fleet.finish_requests(fleet.names[2], 10)

    assert (fleet.choose(100).target, fleet.choose(100).reason) == (fleet.names[2], Reason.HIT)


def test_a_replica_of_twice_the_weight_has_twice_the_fair_share():
    fleet = Fleet(4, {"replica-0": 2.0})
    fleet.hold(fleet.names[0], 10)
    for name, requests in zip(fleet.names, (200, 100, 100, 100), strict=True):
        fleet.finish_requests(name, requests)

    assert fleet.choose(100).target == fleet.names[0]


def test_two_routers_rebalance_to_the_same_replica():
    chosen = set()
    for _ in range(2):
        fleet = Fleet(8)
        fleet.hold(fleet.names[0], 10)
        fleet.finish_requests(fleet.names[0], 100)
        chosen.add(fleet.choose(100).target)

    assert len(chosen) == 1
    assert chosen != {fleet.names[0]}


def test_a_recent_request_counts_half_after_its_half_life():
    now_s = 0.0
    tracker, (a, b) = LoadTracker(lambda: now_s), names(2)
    for name in (a, a, b):
        tracker.dispatch(name, 0).end()
        now_s += RECENT_S / 2

    assert tracker.load(a).recent / tracker.request_weight == pytest.approx(2**-1 + 2**-0.5)
    assert tracker.load(b).recent / tracker.request_weight == 1.0


def test_recent_counts_do_not_overflow():
    now_s = 0.0
    tracker, (a, b) = LoadTracker(lambda: now_s), names(2)
    greatest = 0.0
    for _ in range(2000):
        now_s += RECENT_S
        for name in (a, b, b):
            tracker.dispatch(name, 0).end()
        greatest = max(greatest, tracker.load(b).recent)

    assert tracker.load(b).recent / tracker.load(a).recent == pytest.approx(2.0)
    assert tracker.load(a).recent / tracker.request_weight == pytest.approx(2.0)
    assert greatest < 10 * MAX_WEIGHT


def test_older_requests_count_nothing_after_a_very_long_pause():
    now_s = 0.0
    tracker, (a, b) = LoadTracker(lambda: now_s), names(2)
    tracker.dispatch(a, 0).end()
    now_s += 100_000 * RECENT_S
    tracker.dispatch(b, 0).end()

    assert (
        tracker.load(a).recent / tracker.request_weight < 1e-200,
        tracker.load(b).recent / tracker.request_weight,
    ) == (
        True,
        1.0,
    )
