"""Common replicas: where routers find what other routers have sent, and what they learn from responses."""

from __future__ import annotations

import random

import pytest

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import record_dispatch
from routing.balancing.replicas import GroupReplicas, HealthRegistry
from routing.balancing.residency import MIN_TOKENS, Residency, UnrecordedHits
from routing.balancing.strategies.cached_prefix import LowestCost
from routing.schema import LowestCostSettings, ReplicaConfig
from routing.types import TargetId
from tests.routing.building import FixedKeys

BLOCK_TOKENS = 64


def keys_of(*chain: int, session: int | None = None) -> FixedKeys:
    """A prompt of whole blocks."""
    return FixedKeys(session, chain=chain, prompt_tokens=BLOCK_TOKENS * len(chain), block_tokens=BLOCK_TOKENS)


def prompt(number: int, blocks: int = 20) -> FixedKeys:
    """One of many different prompts."""
    chance = random.Random(number)
    return keys_of(*(chance.getrandbits(64) for _ in range(blocks)))


class Router:
    """One router with its own loads and residency."""

    def __init__(self) -> None:
        configs = [ReplicaConfig(name=f"gpu-{number}", url="http://gpu") for number in range(8)]
        self.loads, self.residency = LoadTracker(lambda: 0.0), Residency(BLOCK_TOKENS)
        replicas = GroupReplicas(configs, self.loads, residency=self.residency)
        self.strategy = LowestCost(replicas, LowestCostSettings(), by_rate=False)
        self.candidates = replicas.candidates(HealthRegistry())

    def choose(self, keys: FixedKeys):
        return self.strategy.choose(keys, self.candidates)

    def send(self, keys: FixedKeys, cached_tokens: int | None = None) -> TargetId:
        """Place a prompt; ``cached_tokens`` are reported by its response, None: as predicted."""
        choice = self.choose(keys)
        ticket = record_dispatch(choice, keys, self.loads, self.residency)
        cached = (choice.hit_tokens or 0) + choice.unrecorded_hit_tokens if cached_tokens is None else cached_tokens
        ticket.record_response(None, keys.prompt_tokens, cached)
        ticket.end()
        return choice.target

    def learn_of_others(self) -> None:
        """Get responses to new prompts that other routers have sent before."""
        for number in range(1000, 1040):
            self.send(prompt(number), cached_tokens=prompt(number).prompt_tokens)


def test_routers_with_different_loads_send_a_new_prompt_to_the_same_replica_once_they_know_of_each_other():
    alone, aware = [Router(), Router()], [Router(), Router()]
    for router in aware:
        router.learn_of_others()
    for one, _ in (alone, aware):
        for name in list(one.candidates)[:4]:
            one.loads.dispatch(name, 900)  # work of which the other router does not know

    def disagreements(routers: list[Router]) -> int:
        return sum(len({router.choose(prompt(number)).target for router in routers}) > 1 for number in range(40))

    assert disagreements(alone) > 10
    assert disagreements(aware) == 0


def test_a_busy_common_replica_yields_to_the_same_one_at_every_router():
    routers = [Router(), Router()]
    for router in routers:
        router.learn_of_others()
    common = routers[0].choose(prompt(1)).target
    for router in routers:
        router.loads.dispatch(common, 100_000)

    first, second = (router.choose(prompt(1)).target for router in routers)

    assert first == second != common


def test_a_router_that_recorded_a_prompt_at_another_replica_returns_to_the_common_one():
    one, other = Router(), Router()
    for router in (one, other):
        router.learn_of_others()
    common = other.choose(prompt(1)).target
    another = next(name for name in one.candidates if name != common)
    one.residency.insert(another, prompt(1, blocks=2).chain, 0.0)  # an early turn of the conversation

    assert one.choose(prompt(1)).target == common


def test_conversations_with_a_popular_beginning_have_several_common_replicas():
    router = Router()
    system = prompt(0, blocks=30).chain
    conversations = [keys_of(*system, *prompt(number).chain) for number in range(1, 60)]
    router.learn_of_others()
    for keys in conversations:
        router.send(keys, cached_tokens=keys.prompt_tokens)

    common = {router.choose(keys_of(*system, *prompt(number).chain)).target for number in range(100, 140)}

    assert len(common) > 4  # although all conversations begin with the same system prompt


def test_with_a_session_key_all_turns_of_a_conversation_go_to_one_replica_whichever_router_gets_them():
    """Without it, a router that has sent a few turns takes the first blocks of the conversation for popular ones."""

    def replicas_per_conversation(*, with_keys: bool) -> float:
        routers, chance, count = [Router(), Router()], random.Random("conversations"), 0
        for router in routers:
            router.learn_of_others()
        for _ in range(8):
            chain = [chance.getrandbits(64) for _ in range(240)]
            session = chance.getrandbits(64) if with_keys else None
            cached: dict[TargetId, int] = {}  # tokens of the conversation, by replica
            for blocks in range(20, 240, 20):
                turn, router = keys_of(*chain[:blocks], session=session), chance.choice(routers)
                target = router.choose(turn).target
                assert router.send(turn, cached.get(target, 0)) == target
                cached[target] = turn.prompt_tokens
            count += len(cached)
        return count / 8

    assert replicas_per_conversation(with_keys=True) == 1.0
    assert replicas_per_conversation(with_keys=False) > 1.0


def test_expected_tokens_are_part_of_the_prediction_and_of_the_load():
    router = Router()
    router.learn_of_others()
    keys = prompt(1)

    choice = router.choose(keys)
    record_dispatch(choice, keys, router.loads, router.residency)

    assert 0.5 * keys.prompt_tokens < choice.unrecorded_hit_tokens <= keys.prompt_tokens
    assert router.loads.load(choice.target).waiting_tokens == keys.prompt_tokens - choice.unrecorded_hit_tokens
    (estimate,) = router.strategy.estimate(prompt(1), router.candidates, [choice.target])
    assert estimate.hit_tokens is not None


def test_a_router_that_is_alone_expects_nothing():
    router = Router()
    for number in range(40):
        router.send(prompt(number), cached_tokens=0)
        router.send(prompt(number))

    assert not router.residency.unrecorded_hits.has_other_routers
    assert router.choose(prompt(1000)).hit_tokens == 0


def test_a_router_that_becomes_the_only_one_stops_expecting():
    router = Router()
    router.learn_of_others()
    for number in range(2000, 4500):
        router.send(prompt(number), cached_tokens=0)

    assert not router.residency.unrecorded_hits.has_other_routers


def test_shares_are_clipped_and_few_tokens_are_not_expected():
    hits = UnrecordedHits()
    for _ in range(200):
        hits.learn(4000, 9000.0, hits.of_new)
        hits.learn(4000, -50.0, None)

    assert hits.of_new.ratio(4000) == pytest.approx(1.0, abs=0.15)
    assert hits.of_new.ratio(MIN_TOKENS - 1) == 0.0
    assert hits.of_recorded.ratio(4000) == 0.0
