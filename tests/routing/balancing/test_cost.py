from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from routing.balancing.candidates import EXCESS_TOKENS, FAIR_RATIO, MIN_EXCESS, Candidates
from routing.balancing.hash_ring import HashRing
from routing.balancing.load_tracker import DEFAULT_RATE, MAX_WEIGHT, RECENT_S, LoadTracker
from routing.balancing.residency import Residency
from routing.balancing.strategies.cached_prefix import (
    CHOICES,
    MAX_TIE_TOKENS,
    NO_KEY,
    STEP_S,
    TIE_RATIO,
    TIE_S,
    CostRule,
    preferred_key,
)
from routing.balancing.strategies.holders import (
    MAX_COMPARED,
    MAX_HOLDERS,
    bits_of,
    consecutive_bits,
    least_loaded_holders,
)
from routing.schema import LowestCostSettings
from routing.types import Reason, ReplicaId
from tests.routing.building import as_tuple, names

PROMPT = list(range(1000, 1010))  # ten blocks


class Fleet:
    """Replicas with loads and cached prefixes of one prompt of ten blocks."""

    def __init__(self, count: int, weights: dict[str, float] | None = None, block_tokens: int = 10) -> None:
        self.names = names(count)
        self.tracker = LoadTracker(lambda: 0.0)
        self.residency = Residency(block_tokens=block_tokens)
        self.weights = {name: (weights or {}).get(name, 1.0) for name in self.names}
        bits = {name: self.residency.add_replica(name).bit for name in self.names}
        self.candidates = Candidates(self.weights, self.tracker, bits=bits)
        self.ring = HashRing(self.weights)

    def hold(self, replica: ReplicaId, blocks: int) -> None:
        self.residency.insert(replica, PROMPT[:blocks], 0.0)

    def queue(self, replica: ReplicaId, tokens: int) -> None:
        self.tracker.dispatch(replica, tokens)

    def finish_requests(self, replica: ReplicaId, requests: int) -> None:
        for _ in range(requests):
            self.tracker.dispatch(replica, 0).end()

    def choose(self, tokens: int = 100, alpha: float = 2.0, *, by_rate: bool = False):
        match = self.residency.match(PROMPT)
        rule = CostRule(self.ring, LowestCostSettings(alpha=alpha), by_rate=by_rate)
        sole = rule.sole_holder(match, tokens, self.candidates)
        return sole or rule.choose(match, preferred_key(PROMPT, match, None), tokens, self.candidates)

    def preferred_of(self, key: int, candidates: Candidates | None = None) -> ReplicaId:
        """The choice for an uncached prompt while all replicas are idle."""
        match, rule = self.residency.match([key]), CostRule(self.ring, LowestCostSettings(), by_rate=False)
        return rule.choose(match, key, 100, candidates or self.candidates).target


REQUEST_TOKENS = STEP_S * DEFAULT_RATE
TIE_TOKENS = TIE_S * DEFAULT_RATE

loads = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2000)), max_size=12)
cached_prefixes = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10)), max_size=6)
positions = st.integers(0, 2 * MAX_COMPARED + 7)
ended_requests = st.lists(st.tuples(positions, st.integers(0, 40)), max_size=6)


@given(loads, cached_prefixes, st.sampled_from([0.0, 1.0, 2.0, 10.0]), st.integers(100, 4000))
def test_no_candidate_costs_less_than_the_choice_except_for_ties_and_rebalancing(queued, held, alpha, tokens):
    fleet = Fleet(4)
    for number, work in queued:
        fleet.queue(fleet.names[number], work)
    for number, blocks in held:
        fleet.hold(fleet.names[number], blocks)
    longest = [max((blocks for at, blocks in held if at == number), default=0) for number in range(4)]

    busy_ratio = len({at for at, work in queued if work}) / 4
    price = min(1.0, alpha) + max(0.0, alpha - 1.0) * busy_ratio**CHOICES

    def cost(number: int) -> float:
        requests = [work for at, work in queued if at == number]
        return sum(requests) + REQUEST_TOKENS * len(requests) + price * (tokens - 10 * longest[number])

    def excess(number: int) -> float:
        return max(0.0, len([at for at, _ in queued if at == number]) - FAIR_RATIO * len(queued) / 4 - MIN_EXCESS)

    choice = fleet.choose(tokens, alpha)
    chosen = fleet.names.index(choice.target)
    least = min(map(cost, range(4)))
    tie = TIE_TOKENS + min(TIE_RATIO * tokens, MAX_TIE_TOKENS)
    rebalanced = max(EXCESS_TOKENS * excess(at) for at in range(4) if cost(at) <= least + tie)
    assert cost(chosen) <= least + 2 * tie + rebalanced
    assert choice.hit_tokens == 10 * longest[chosen]
    holds_most = longest[chosen] == max(longest)
    longest_reason = Reason.HIT if choice.hit_tokens else Reason.COLD
    other_reason = Reason.ELSEWHERE if cost(chosen) <= least + tie else Reason.SPREAD
    assert choice.reason in ({longest_reason} if holds_most else {other_reason, Reason.SPREAD})


@settings(deadline=None)  # a ring of many replicas takes long to build
@given(
    st.sampled_from([2, 4, MAX_COMPARED + 2, 2 * MAX_COMPARED + 8]),
    st.sampled_from([1.0, 2.0]),
    st.lists(st.tuples(positions, st.integers(0, 2000)), max_size=12),
    st.lists(st.tuples(positions, st.integers(0, 10)), max_size=9),
    ended_requests,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(100, 4000),
)
@example(4, 1.0, [(0, 1)], [(0, 4), (1, 4)], [], 1.0, 120)  # the tie of the cheapest counts, not that of the first
def test_a_sole_holder_is_what_comparing_all_would_choose(count, heaviest, queued, held, ended, alpha, tokens):
    fleet = Fleet(count, {"replica-2": heaviest})
    for number, work in queued:
        fleet.queue(fleet.names[number % count], work)
    for number, blocks in held:
        fleet.hold(fleet.names[number % count], blocks)
    for number, requests in ended:
        fleet.finish_requests(fleet.names[number % count], requests)

    match, rule = fleet.residency.match(PROMPT), CostRule(fleet.ring, LowestCostSettings(alpha=alpha), by_rate=False)
    key = preferred_key(PROMPT, match, None)
    sole = rule.sole_holder(match, tokens, fleet.candidates)
    chosen = rule.choose(match, key, tokens, fleet.candidates)
    assert sole is None or as_tuple(sole) == as_tuple(chosen)


def test_a_sole_holder_with_little_work_is_chosen_directly():
    fleet = Fleet(4)
    fleet.hold(fleet.names[0], 10)
    match, rule = fleet.residency.match(PROMPT), CostRule(fleet.ring, LowestCostSettings(), by_rate=False)

    sole = rule.sole_holder(match, 100, fleet.candidates)
    assert sole is not None
    assert (sole.target, sole.reason, sole.hit_tokens) == (fleet.names[0], Reason.HIT, 100)
    fleet.queue(fleet.names[0], 200)
    assert rule.sole_holder(match, 100, fleet.candidates) is None


def test_the_example_of_the_documentation():
    fleet = Fleet(8, block_tokens=160)
    a, *others = fleet.names
    fleet.hold(a, 10)
    fleet.queue(a, 500)
    fleet.queue(a, 500)
    rule, match, members = (
        CostRule(fleet.ring, LowestCostSettings(), by_rate=False),
        fleet.residency.match(PROMPT),
        fleet.candidates.members,
    )

    def costs() -> list[int]:
        estimates = rule.estimates(members, match, NO_KEY, 2000, fleet.candidates)
        return [round(estimate.cost) for estimate in estimates[:2]]

    assert costs() == [1481, 2004]
    assert fleet.choose(2000).target == a
    fleet.queue(a, 1000)
    assert fleet.choose(2000).target != a
    for name in others:
        fleet.queue(name, 1)
    assert costs() == [2000 + 3 * 40 + 800, 1 + 40 + 4000]


@pytest.mark.parametrize("count", [4, MAX_COMPARED + 4])
def test_a_burst_with_a_new_prefix_is_prefilled_at_several_idle_replicas_but_not_all(count):
    fleet = Fleet(count, block_tokens=1000)
    chosen = set()
    for _ in range(12):
        choice = fleet.choose(10_200)
        fleet.hold(choice.target, 10)
        fleet.queue(choice.target, 10_200 - choice.hit_tokens)
        chosen.add(choice.target)

    assert 1 < len(chosen) < min(count, 12)


def test_crowded_caches_avoid_copies_even_if_replicas_are_idle():
    fleet = Fleet(4)
    a = fleet.names[0]
    fleet.hold(a, 10)
    fleet.queue(a, int(1.1 * 100 - REQUEST_TOKENS))
    fleet.residency.reuse.ratio = 1.0
    assert fleet.choose(100).target == a


@pytest.mark.parametrize(("tokens", "requests", "stays"), [(8000, 7, True), (8000, 20, False), (100, 2, False)])
def test_only_long_new_prompts_ignore_a_few_running_requests_at_their_preferred_replica(tokens, requests, stays):
    idle, busy = Fleet(4), Fleet(4)
    preferred_replica = idle.choose(tokens).target
    for _ in range(requests):
        busy.tracker.dispatch(preferred_replica, 0)

    assert (busy.choose(tokens).target == preferred_replica) is stays
    busy.queue(preferred_replica, 1000)
    assert busy.choose(tokens).target != preferred_replica


@pytest.mark.parametrize("count", [12, MAX_COMPARED, MAX_COMPARED + 4])
def test_costs_of_some_candidates_equal_their_costs_among_all(count):
    fleet = Fleet(count)
    for name in fleet.names[:8]:
        fleet.queue(name, 500)
    rule, match, members = (
        CostRule(fleet.ring, LowestCostSettings(), by_rate=False),
        fleet.residency.match(PROMPT),
        fleet.candidates.members,
    )

    among_all = rule.estimates(members, match, NO_KEY, 1000, fleet.candidates)
    assert rule.estimates(members[:8], match, NO_KEY, 1000, fleet.candidates) == among_all[:8]


def test_a_replica_of_twice_the_weight_gets_twice_the_work():
    fleet = Fleet(2, {"replica-1": 2.0})
    light, heavy = fleet.names
    fleet.queue(light, 5000)
    fleet.queue(heavy, 9000)

    assert fleet.choose(100).target == heavy


def test_by_rate_the_faster_replica_gets_more():
    fleet = Fleet(2)
    slow, fast = fleet.names
    for _ in range(500):
        fleet.tracker.load(slow).prefill.learn(10_000, 10.0)
        fleet.tracker.load(fast).prefill.learn(10_000, 1.0)
    fleet.queue(fast, 5000)

    assert fleet.choose(3000, by_rate=True).target == fast
    assert fleet.choose(3000, by_rate=False).target == slow


@pytest.mark.parametrize(("apart", "chosen"), [(0.01, 2), (0.2, 1)])
def test_by_rate_small_differences_of_measured_rates_are_ties(apart, chosen):
    fleet = Fleet(2)
    for name, rate in zip(fleet.names, (1.0, 1.0 + apart), strict=True):
        for _ in range(500):
            fleet.tracker.load(name).prefill.learn(10_000, 10_000 / (DEFAULT_RATE * rate))
    rule = CostRule(fleet.ring, LowestCostSettings(), by_rate=True)

    chosen_replicas = {
        rule.choose(fleet.residency.match([key]), key * 0x9E3779B97F4A7C15 % 2**64, 10_000, fleet.candidates).target
        for key in range(1, 30)
    }

    assert len(chosen_replicas) == chosen


@pytest.mark.parametrize("count", [8, 40])
def test_ties_are_decided_by_the_key_never_by_the_smallest_index(count):
    fleet, other = Fleet(count), Fleet(count)
    preferred_replicas = Counter()
    for number in range(100 * count):
        key = number * 0x9E3779B97F4A7C15 & 2**64 - 1
        choices = [
            CostRule(one.ring, LowestCostSettings(), by_rate=False).choose(
                one.residency.match([key]), key, 100, one.candidates
            )
            for one in (fleet, other)
        ]
        assert as_tuple(choices[0]) == as_tuple(choices[1])
        preferred_replicas[choices[0].target] += 1

    assert set(preferred_replicas) == set(fleet.names)
    assert max(preferred_replicas.values()) < 150


@pytest.mark.parametrize("count", [3, MAX_COMPARED - 1, MAX_COMPARED, MAX_COMPARED + 1, 3 * MAX_COMPARED])
def test_a_new_replica_gets_its_share_and_no_other_key_moves(count):
    fleet, grown = Fleet(count), Fleet(count + 1)
    moved = Counter()
    for number in range(40 * count):
        key = number * 0x9E3779B97F4A7C15 & 2**64 - 1
        before, after = fleet.preferred_of(key), grown.preferred_of(key)
        moved[after] += before != after

    assert set(+moved) == {grown.names[-1]}
    assert 0.5 * 40 * count / (count + 1) < moved.total() < 1.5 * 40 * count / (count + 1)


@pytest.mark.parametrize("count", [4, MAX_COMPARED + 1, 3 * MAX_COMPARED])
def test_a_replica_that_goes_down_moves_only_its_own_keys(count):
    fleet = Fleet(count)
    rest = fleet.candidates.without({fleet.names[0]})
    for number in range(20 * count):
        key = number * 0x9E3779B97F4A7C15 & 2**64 - 1
        before, after = fleet.preferred_of(key), fleet.preferred_of(key, rest)
        assert after == before or before == fleet.names[0]


def test_a_lone_holder_and_a_lone_idle_replica_are_found_among_many():
    fleet = Fleet(MAX_COMPARED * 5)
    *busy, holder, idle = fleet.names
    for name in busy:
        fleet.queue(name, 5000)
    fleet.hold(holder, 10)
    fleet.queue(holder, 500)
    assert fleet.choose(1000, 10.0).target == holder

    fleet.queue(holder, 50_000)
    assert fleet.choose(1000, 10.0).target == idle


@pytest.mark.parametrize(("cached", "key"), [(0, 1000), (4, 1004), (10, 1009)])
def test_the_key_is_the_first_uncached_block_or_the_tier1_key(cached, key):
    fleet = Fleet(2)
    fleet.hold(fleet.names[0], cached)

    assert preferred_key(PROMPT, fleet.residency.match(PROMPT), None) == key
    assert preferred_key([], fleet.residency.match([]), 77) == 77
    assert preferred_key([], fleet.residency.match([]), None) == 0


def test_by_rate_a_replica_in_slow_start_counts_as_slower():
    """With a quarter of its share it gets a prompt if others have four times the work; weights do not matter."""
    tracker, (a, b) = LoadTracker(lambda: 0.0), names(2)
    residency = Residency(block_tokens=10)
    bits = {name: residency.add_replica(name).bit for name in (a, b)}
    candidates = Candidates({a: 0.5, b: 1.0}, tracker, bits=bits, shares={a: 0.25})
    rule, match = (
        CostRule(HashRing({a: 1.0, b: 1.0}), LowestCostSettings(alpha=1.0), by_rate=True),
        residency.match(PROMPT),
    )

    def chosen() -> ReplicaId:
        return rule.choose(match, 1, 1000, candidates).target

    tracker.dispatch(b, 2500)
    assert chosen() == b
    tracker.dispatch(b, 2500)
    assert chosen() == a


FLEET = names(100)
SPREAD = 0x9E3779B97F4A7C15  # spreads numbers over the keys


def fleet() -> tuple[Candidates, LoadTracker]:
    tracker, residency = LoadTracker(lambda: 0.0), Residency()
    bits = {name: residency.add_replica(name).bit for name in FLEET}
    return Candidates(dict.fromkeys(FLEET, 1.0), tracker, bits=bits), tracker


@given(st.sets(st.integers(0, 300), max_size=60), st.integers(0, 8), st.integers(0, 2**64 - 1))
def test_consecutive_bits_of_a_mask_are_chosen_reproducibly(numbers, count, key):
    mask = sum(1 << number for number in numbers)
    shown = consecutive_bits(mask, count, key)

    assert len(shown) == len(set(shown)) == min(count, len(numbers))
    assert set(shown) <= set(bits_of(mask))
    assert shown == consecutive_bits(mask, count, key)


@pytest.mark.parametrize("numbers", [range(100), [*range(50), 990], [3, 4, 5, 500, 501, 998, 999]])
def test_every_bit_has_the_same_chance(numbers):
    mask = sum(1 << number for number in numbers)
    shown = Counter(bit for key in range(20 * len(numbers)) for bit in consecutive_bits(mask, MAX_HOLDERS, key))

    assert set(shown) == set(bits_of(mask))
    assert set(shown.values()) == {20 * MAX_HOLDERS}


def test_the_idle_holder_is_found_among_many():
    for idle in (0, 7, 50, 99):
        candidates, tracker = fleet()
        for number, name in enumerate(FLEET):
            if number != idle:
                tracker.dispatch(name, 1000 + 50 * number)
        chosen_replicas = least_loaded_holders(candidates.mask, 5, candidates)
        assert chosen_replicas[0].target == FLEET[idle]
        assert len(chosen_replicas) == MAX_HOLDERS


def test_requests_for_a_widely_cached_prefix_are_spread_over_all_holders():
    candidates, tracker = fleet()
    holders = sum(candidates.by_name[name].bit for name in (*FLEET[:30], FLEET[99]))
    requests_by_replica = Counter()
    for number in range(31 * 100):
        chosen_replicas = least_loaded_holders(holders, number * SPREAD % 2**64, candidates)[0].target
        tracker.dispatch(chosen_replicas, 100).end()
        requests_by_replica[chosen_replicas] += 1

    assert len(requests_by_replica) == 31
    assert max(requests_by_replica.values()) < 150


# --- Replicas with more than their share yield ---


MANY = 2 * MAX_COMPARED + 8


@pytest.mark.parametrize("count", [4, 16, MANY])
def test_a_prefix_of_all_prompts_spreads_to_every_replica_of_an_idle_fleet(count):
    fleet, requests_by_replica, prefilled = Fleet(count), Counter(), 0
    for _ in range(100 * count):
        choice = fleet.choose(2000)
        prefilled += choice.hit_tokens == 0
        fleet.hold(choice.target, 10)
        fleet.finish_requests(choice.target, 1)
        requests_by_replica[choice.target] += 1

    assert max(requests_by_replica.values()) < 1.3 * 100
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
