"""Strategies that prefer a home keep it while waiting there costs little more than at the cheapest replica."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.load_tracker import DEFAULT_RATE, LoadTracker
from routing.balancing.placement import record_dispatch
from routing.balancing.replicas import GroupReplicas, HealthRegistry
from routing.balancing.residency import Residency
from routing.balancing.strategies.cached_prefix import queued_work
from routing.balancing.strategies.holders import MAX_COMPARED
from routing.balancing.strategies.registry import build_strategy
from routing.schema import (
    AffinityGroupsSettings,
    CacheAwareSettings,
    PrefixHashSettings,
    SessionAffinitySettings,
    Settings,
    TieredSettings,
)
from routing.types import Reason
from tests.routing.building import FixedKeys, as_tuple, names, replicas

HASHED = (PrefixHashSettings, SessionAffinitySettings, TieredSettings, AffinityGroupsSettings)
hashed = pytest.mark.parametrize("kind", HASHED, ids=lambda kind: kind.name)
hashes = st.integers(0, 2**64 - 1)
PREFIX, CONVERSATION = 17, 4711
WORDS = range(0, 2**64, 2**64 // 1009)
PROMPT = list(range(1000, 1200))  # 200 blocks of ten tokens


def keys(value: int = PREFIX, chain: list[int] = PROMPT, conversation: int | None = CONVERSATION) -> FixedKeys:
    """Keys of a prompt in which prefix and session have one value."""
    return FixedKeys(value, value, conversation, chain, 10 * len(chain))


class Rig:
    """Replicas with queues and estimated caches, and a strategy."""

    def __init__(self, settings: Settings, count: int = 5, seed: int = 0) -> None:
        self.names = names(count)
        self.loads = LoadTracker(lambda: 0.0)
        self.group = GroupReplicas(replicas(count), self.loads, seed, Residency(block_tokens=10))
        self.candidates = self.group.candidates(HealthRegistry())
        self.strategy = build_strategy(settings, self.group, seed)

    def choose(self, request: FixedKeys | None = None, without: object = ()):
        return self.strategy.choose(request or keys(), self.candidates.without(set(without)))

    def send(self, request: FixedKeys):
        """Choose a replica and count the request there; the ticket ends it."""
        choice = self.choose(request)
        return choice, record_dispatch(choice, request, self.loads, self.group.residency)

    def hold(self, replica: str, blocks: int) -> None:
        self.group.residency.insert(replica, PROMPT[:blocks], 0.0)

    def queue(self, replica: str, tokens: int) -> None:
        self.loads.dispatch(replica, tokens)

    def work(self, replica: str) -> float:
        return queued_work(self.loads.load(replica), 0.0)


@hashed
@given(key=hashes, count=st.sampled_from([1, 5, 40]))
def test_routers_agree_on_the_home_of_a_key_and_on_the_one_after_it(kind, key, count):
    one, other = Rig(kind(), count, seed=1), Rig(kind(), count, seed=2)
    other.queue(one.names[0], 400)  # less than the slack
    home = one.choose(keys(key))

    assert (home.reason, home.skipped) == (Reason.AFFINITY, ())
    assert other.choose(keys(key)).target == home.target
    if count > 1:
        assert one.choose(keys(key), {home.target}).target == other.choose(keys(key), {home.target}).target


@pytest.mark.parametrize("kind", [PrefixHashSettings, SessionAffinitySettings])
def test_the_home_is_the_first_available_replica_in_ring_order(kind):
    rig = Rig(kind())
    order = list(rig.group.ring.walk(PREFIX))

    assert [rig.choose(without=order[:number]).target for number in range(5)] == order


@hashed
def test_a_request_without_a_key_goes_to_the_least_loaded(kind):
    rig = Rig(kind())
    for name in rig.names[:4]:
        rig.queue(name, 10)
    choice = rig.choose(FixedKeys(tier2=CONVERSATION))

    assert (choice.target, choice.reason) == (rig.names[4], Reason.NO_KEY)


@pytest.mark.parametrize(
    ("kind", "cached", "kept", "too_long"),
    [
        *((kind, 0, 400, 600) for kind in HASHED),
        *((kind, 100, 1400, 1600) for kind in HASHED),
    ],
)
def test_a_home_is_kept_while_the_wait_there_is_at_most_what_its_cache_saves_and_the_slack(
    kind, cached, kept, too_long
):
    waits, full = Rig(kind()), Rig(kind())
    home = waits.choose().target
    for rig, tokens in ((waits, kept), (full, too_long)):
        rig.hold(home, cached)
        rig.queue(home, tokens)
    spilled = full.choose()

    assert (waits.choose().target, waits.choose().reason) == (home, Reason.AFFINITY)
    assert spilled.target != home
    assert (spilled.reason, spilled.skipped[0]) == (Reason.SPILL, home)


@pytest.mark.parametrize("kind", [PrefixHashSettings, SessionAffinitySettings])
def test_overflow_goes_to_a_replica_that_has_the_prefix_cached_by_then_until_its_share_is_too_large(kind):
    rig = Rig(kind())
    home = rig.choose().target
    rig.queue(home, 50_000)
    targets = []
    for _ in range(100):
        choice, ticket = rig.send(keys())
        ticket.end()
        targets.append(choice.target)

    assert home not in targets
    assert len(set(targets[:10])) == 1
    assert max(map(targets.count, rig.names)) <= 50


@pytest.mark.parametrize(("rate", "kept", "too_long"), [(8000, 400, 600), (48_000, 2500, 2750)])
def test_the_slack_is_a_time_at_the_measured_rate(rate, kept, too_long):
    waits, full = Rig(PrefixHashSettings()), Rig(PrefixHashSettings())
    home = waits.choose().target
    for rig, tokens in ((waits, kept), (full, too_long)):
        for name in rig.names:
            rig.loads.load(name).prefill.learn(rate, 1.0)
        rig.queue(home, tokens)

    assert waits.choose().target == home
    assert full.choose().target != home


@hashed
@pytest.mark.parametrize(("is_busy", "least", "most"), [(False, 1, 2), (True, 5, 5)])
def test_a_hot_prefix_has_as_many_replicas_as_its_work_needs(kind, is_busy, least, most):
    rig, targets = Rig(kind()), set()
    for number in range(100):
        end = range(10_000 * number, 10_000 * number + 20)
        choice, ticket = rig.send(keys(chain=[*PROMPT, *end], conversation=number % 2 * CONVERSATION))
        targets.add(choice.target)
        if not is_busy:
            ticket.end()
    works = [rig.work(name) for name in rig.names]

    assert least <= len(targets) <= most
    assert max(works) - min(works) <= 2 * 2200 + 632


@given(
    settings=st.sampled_from([kind(slack_s=slack) for kind in HASHED for slack in (0, 0.06, 0.6)])
    | st.sampled_from([CacheAwareSettings(slack_s=slack) for slack in (0, 0.06, 0.6)]),
    queues=st.lists(st.integers(0, 20_000), min_size=1, max_size=MAX_COMPARED),  # of more, a shortlist is compared
    cached=st.lists(st.integers(0, len(PROMPT)), min_size=MAX_COMPARED, max_size=MAX_COMPARED),
    key=hashes,
)
def test_no_queue_runs_ahead_of_the_shortest_by_more_than_the_cache_saves_and_the_slack(settings, queues, cached, key):
    rig = Rig(settings, len(queues))
    for name, tokens, blocks in zip(rig.names, queues, cached, strict=False):
        rig.hold(name, blocks)
        if tokens:
            rig.queue(name, tokens)
    choice = rig.choose(keys(key))
    costs = [it.cost for it in rig.strategy.estimate(keys(key), rig.candidates, rig.names)]

    saved = 2 * choice.hit_tokens  # an uncached token costs others time too, at most its own
    allowed = max(DEFAULT_RATE * settings.slack_s, 632)  # within which the cost rule counts costs as equal
    assert rig.work(choice.target) - min(map(rig.work, rig.names)) <= saved + allowed
    assert costs[rig.names.index(choice.target)] <= min(costs) + allowed


# --- tiered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 16, 25])
def test_a_prefix_has_some_replicas_and_a_conversation_one_of_them(size):
    rig, rng = Rig(TieredSettings(replicas=size), 30), random.Random(size)
    order = list(rig.group.ring.walk(PREFIX))
    group, replacement = set(order[:size]), order[size]
    homes = {conversation: rig.choose(keys(conversation=conversation)).target for conversation in rng.sample(WORDS, 40)}

    assert set(homes.values()) <= group
    assert len(set(homes.values())) > min(size, 12) / 2
    for gone in order[:2]:
        for conversation, home in homes.items():
            moved = rig.choose(keys(conversation=conversation), {gone}).target
            assert moved in {home, replacement} if home != gone else moved in (group | {replacement}) - {gone}


def test_without_a_conversation_the_first_replica_of_the_prefix_is_its_home():
    rig = Rig(TieredSettings(replicas=3))

    assert rig.choose(keys(conversation=None)).target == next(rig.group.ring.walk(PREFIX))


# --- cache_aware -----------------------------------------------------------------------------------------


def test_the_home_is_the_least_loaded_replica_with_the_longest_prefix_then_one_with_a_shorter_one():
    rig = Rig(CacheAwareSettings())
    a, b, c, d, _ = rig.names
    rig.hold(a, 100)
    rig.hold(b, 160)
    rig.hold(c, 160)
    rig.queue(b, 100)
    assert (rig.choose().target, rig.choose().reason, rig.choose().hit_tokens) == (c, Reason.AFFINITY, 1600)

    rig.queue(b, 9000)
    rig.queue(c, 2000)
    assert (rig.choose().target, rig.choose().reason, rig.choose().skipped) == (a, Reason.SPILL, (c,))

    rig.queue(a, 9000)
    rig.queue(c, 9000)
    spilled = rig.choose()
    assert (spilled.reason, set(spilled.skipped), spilled.hit_tokens) == (Reason.SPILL, {a, b}, 0)
    assert spilled.target not in {a, b, c}
    assert d in rig.names


@pytest.mark.parametrize("blocks", [79, 80])
def test_a_short_cached_prefix_does_not_count(blocks):
    rig = Rig(CacheAwareSettings(min_hit_ratio=0.4, slack_s=0.6))
    rig.hold(rig.names[0], blocks)
    rig.queue(rig.names[0], 2000)
    choice = rig.choose()

    assert (choice.target == rig.names[0], choice.reason) == (
        (True, Reason.AFFINITY) if blocks == 80 else (False, Reason.ELSEWHERE)
    )


def test_routers_send_an_uncached_prompt_to_the_same_idle_replica():
    choices = [as_tuple(Rig(CacheAwareSettings(), seed=seed).choose()) for seed in range(5)]

    assert choices == choices[:1] * 5
    assert choices[0][1] is Reason.COLD


@hashed
@pytest.mark.parametrize(("missing", "keeps"), [(20, True), (30, False)])
def test_the_slack_is_less_by_what_the_home_would_prefill_although_the_cheapest_has_it(kind, missing, keeps):
    rig = Rig(kind())
    home, other = rig.choose().target, list(rig.group.ring.walk(PREFIX))[3]
    rig.hold(home, 100)
    rig.hold(other, 100 + missing)
    choice = rig.choose()

    assert (choice.target, choice.reason) == ((home, Reason.AFFINITY) if keeps else (other, Reason.HIT))


@hashed
def test_with_much_slack_a_home_is_kept_whatever_others_have_cached(kind):
    rig = Rig(kind(slack_s=60))
    home = rig.choose().target
    for name in set(rig.names) - {home}:
        rig.hold(name, 200)
    rig.queue(home, 20_000)

    assert (rig.choose().target, rig.choose().reason) == (home, Reason.AFFINITY)


def test_a_prefix_that_is_cached_elsewhere_is_a_hit_and_no_overflow():
    rig = Rig(PrefixHashSettings())
    other = list(rig.group.ring.walk(PREFIX))[1]
    rig.hold(other, 190)

    assert (rig.choose().target, rig.choose().reason) == (other, Reason.HIT)
