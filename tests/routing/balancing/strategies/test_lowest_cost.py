from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Placement
from routing.balancing.replicas import HealthRegistry
from routing.balancing.request import PlacementRequest, read_body
from routing.schema import CacheAwareSettings, LeastTtftSettings, LowestCostSettings, ReplicaConfig
from routing.types import Reason
from tests.routing.building import as_tuple, config, pool, replicas, request

costs = pytest.mark.parametrize(
    "settings", [LowestCostSettings(), LeastTtftSettings(), CacheAwareSettings()], ids=lambda settings: settings.name
)


def routers(settings, count: int = 2, size: int = 5) -> list[Placement]:
    """Idle routers with different seeds and the same configuration, each with its own loads."""
    return [Placement(config(pool(settings, replicas(size))), LoadTracker(), seed=seed) for seed in range(count)]


@costs
@given(text=st.text(max_size=2000), size=st.sampled_from([1, 4, 40]))
def test_routers_send_an_uncached_prompt_to_the_same_replica(settings, text, size):
    chosen = [router.decide(request(text), HealthRegistry()).choice for router in routers(settings, size=size)]

    assert as_tuple(chosen[0]) == as_tuple(chosen[1])
    assert chosen[0].reason is Reason.COLD


@costs
def test_routers_agree_even_if_only_one_knows_the_system_prompt(settings):
    one, other = routers(settings)
    system = "You are of help. " * 300
    for router, texts in ((one, ["first"]), (other, ["second", "third"])):
        for text in texts:
            ticket = router.dispatch(router.decide(request(system + text), HealthRegistry()))
            ticket.record_response()
            ticket.end()
    chosen = {
        router.decide(request(system + "and now? " * 100), HealthRegistry()).choice.target for router in (one, other)
    }

    assert len(chosen) == 1


@costs
def test_uncached_prompts_reach_every_idle_replica(settings):
    (router,) = routers(settings, 1, 8)
    chosen = {router.decide(request(f"{number} " * 200), HealthRegistry()).choice.target for number in range(100)}

    assert len(chosen) == 8


@costs
def test_a_conversation_returns_to_its_replica(settings):
    (router,) = routers(settings, 1, 6)
    text = "How are caches warmed? " * 50
    preferred_replicas = set()
    for _ in range(10):
        decision = router.decide(request(text), HealthRegistry())
        ticket = router.dispatch(decision)
        ticket.record_first_byte()
        ticket.record_response()
        ticket.end()
        preferred_replicas.add(decision.choice.target)
        text += "And what then? " * 30

    assert len(preferred_replicas) == 1
    assert decision.choice.hit_tokens / decision.keys.prompt_tokens > 0.8


@costs
def test_the_explained_costs_agree_with_the_choice(settings):
    (router,) = routers(settings, 1, 4)
    text = "A shared document. " * 400
    decision = router.decide(request(text), HealthRegistry())
    router.dispatch(decision).record_first_byte()
    decision = router.decide(request(text + "What does it say?"), HealthRegistry())
    explained = decision.candidate_costs()
    shown = dict(zip(explained.targets, explained.estimates, strict=True))
    assert shown.keys() == {replica.name for replica in replicas(4)}

    chosen = shown.pop(decision.choice.target)
    assert chosen.hit_tokens == decision.choice.hit_tokens > 1000
    assert {candidate.hit_tokens for candidate in shown.values()} == {0}
    assert chosen.cost < min(candidate.cost for candidate in shown.values())


def test_a_smaller_cache_evicts_sooner():
    small = (ReplicaConfig(name="small", url="http://small", block_tokens=16, capacity_blocks=200),)
    router = Placement(config(pool(LowestCostSettings(), small)), LoadTracker())
    for number in range(20):
        ticket = router.dispatch(router.decide(request(f"{number} " * 1000), HealthRegistry()))
        ticket.record_first_byte()
        ticket.end()

    held = [router.decide(request(f"{number} " * 1000), HealthRegistry()).choice.hit_tokens for number in range(20)]
    assert held[0] == held[10] == 0
    assert held[19] > 500


@costs
def test_a_request_without_cached_blocks_is_placed_by_load_and_teaches_nothing(settings):
    """An engine computes the whole prompt for ``prompt_logprobs``, and stores its blocks."""
    (router,) = routers(settings, 1, 2)
    text = "A task with a few examples. " * 400
    first = router.decide(request(text), HealthRegistry())
    ticket = router.dispatch(first)
    ticket.record_first_byte()
    ticket.record_response(prompt_tokens=first.keys.prompt_tokens, cached_tokens=0)
    ticket.end()
    without = PlacementRequest("llama", None, None, request(text).prompt)
    without.prompt.reads_cache = False

    chosen = []
    for _ in range(8):
        decision = router.decide(without, HealthRegistry())
        assert (decision.choice.hit_tokens or 0, decision.choice.reason) in {(0, Reason.COLD), (0, Reason.SPILL)}
        running = router.dispatch(decision)
        running.record_response(prompt_tokens=decision.keys.prompt_tokens, cached_tokens=0)
        chosen.append(decision.choice.target)

    assert set(chosen) == {"replica-0", "replica-1"}
    again = router.decide(request(text), HealthRegistry())
    assert again.choice.hit_tokens > 0.9 * again.keys.prompt_tokens
    held = dict(zip(again.candidate_costs().targets, again.candidate_costs().estimates, strict=True))
    assert all(estimate.hit_tokens > 1000 for estimate in held.values()), "the engines have stored the blocks"


def about_an_image(text: str, image: str) -> PlacementRequest:
    """A chat about an image, which comes after the text."""
    parts = [
        {"type": "text", "text": text},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
    ]
    body = {"model": "llama", "messages": [{"role": "user", "content": parts}]}
    reading = read_body("/v1/chat/completions", json.dumps(body).encode())
    return PlacementRequest("llama", None, None, reading.prompt)


@pytest.mark.parametrize("settings", [LowestCostSettings(), LeastTtftSettings()], ids=lambda settings: settings.name)
def test_an_image_goes_to_the_same_replica_after_any_text(settings):
    chosen: dict[int, set[str]] = {}
    for number in range(40):
        for router in routers(settings, size=8):
            request = about_an_image(f"{number} " * 300, f"image{number % 10}")
            chosen.setdefault(number % 10, set()).add(router.decide(request, HealthRegistry()).choice.target)

    assert {len(targets) for targets in chosen.values()} == {1}
    assert len(set().union(*chosen.values())) > 3


def test_a_cached_prefix_outweighs_an_image_after_it():
    (router,) = routers(LowestCostSettings(), 1, 8)
    conversation = "An old conversation. " * 400
    first = router.decide(about_an_image(conversation, "one"), HealthRegistry())
    ticket = router.dispatch(first)
    ticket.record_response()
    ticket.end()
    images = [about_an_image(conversation + f"turn {number}", f"image{number}") for number in range(20)]

    assert {router.decide(request, HealthRegistry()).choice.target for request in images} == {first.choice.target}
