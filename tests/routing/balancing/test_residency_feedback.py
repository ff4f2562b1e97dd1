"""Effects of dispatches and responses on loads and residency."""

from __future__ import annotations

import pytest

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Decision, Placement
from routing.balancing.replicas import HealthRegistry
from routing.balancing.residency import Residency
from routing.schema import LeastLoadSettings, LowestCostSettings, PolicyConfig, TaskGroupConfig
from routing.types import Reason
from tests.routing.building import as_tuple, config, pool, request

LONG_TEXT = "A long document. " * 1000
COSTS = pool(LowestCostSettings())


class Rig:
    """A placement with its load tracker, residency and clock."""

    def __init__(self, *pools) -> None:
        self.now_s = 0.0
        self.loads, self.residency = LoadTracker(lambda: self.now_s), Residency()
        self.placement = Placement(config(*pools), self.loads, residency=self.residency)

    def decide(self, text: str = LONG_TEXT, **fields) -> Decision:
        return self.placement.decide(request(text, **fields), HealthRegistry())

    def send(self, text: str = LONG_TEXT, **fields):
        self.now_s += 10.0
        decision = self.decide(text, **fields)
        return decision, self.placement.dispatch(decision)


def test_only_the_uncached_tokens_are_charged():
    rig = Rig(COSTS)
    first, ticket = rig.send()
    prompt_tokens = first.keys.prompt_tokens
    assert ticket.load.waiting_tokens == prompt_tokens

    ticket.end()
    ticket = rig.send()[1]
    assert ticket.load.waiting_tokens == prompt_tokens  # the failed request was rolled back

    ticket.record_response(1.0, prompt_tokens, 0)
    ticket.end()
    second, ticket = rig.send()
    assert (second.reason, second.choice.target) == (Reason.HIT, first.choice.target)
    assert ticket.load.waiting_tokens == prompt_tokens - second.choice.hit_tokens < 64


def test_a_prompt_with_a_first_byte_stays_cached_after_cancellation():
    rig = Rig(COSTS)
    ticket = rig.send()[1]
    ticket.record_first_byte()
    ticket.end()

    assert rig.decide().choice.hit_tokens > 4000


def test_responses_teach_the_prefill_rate():
    rig = Rig(COSTS)
    decision, ticket = rig.send()
    ticket.record_response(0.5, 5000, 1000)

    assert rig.loads.load(decision.choice.target).prefill.tokens_per_s == pytest.approx(8000)


@pytest.mark.parametrize("reported", [(None, 5000, 1000), (0.5, None, None), (0.5, 5000, None)])
def test_an_incomplete_response_teaches_nothing(reported):
    rig = Rig(COSTS)
    ticket = rig.send()[1]
    ticket.record_response(*reported)

    assert ticket.load.prefill.samples == 0


def test_prompts_are_not_recorded_if_no_policy_uses_the_residency():
    rig = Rig(pool(LeastLoadSettings()))
    rig.send()

    assert len(rig.residency) == 0


def test_all_prompts_are_recorded_if_one_task_group_uses_the_residency():
    own = PolicyConfig(name="batch", revision=1, settings=LowestCostSettings())
    rig = Rig(pool(LeastLoadSettings(), groups=[TaskGroupConfig(name="batch", policy=own)]))
    decision, ticket = rig.send()
    ticket.record_first_byte()
    ticket.end()

    assert decision.choice.hit_tokens is None
    again = rig.decide(group="batch")
    assert (again.reason, again.choice.target) == (Reason.HIT, decision.choice.target)


def test_the_residency_survives_a_new_configuration():
    rig = Rig(COSTS)
    decision, ticket = rig.send()
    ticket.record_first_byte()
    ticket.end()
    rig.placement = Placement(config(pool(LowestCostSettings(alpha=1.0))), rig.loads, residency=rig.residency)

    assert rig.decide().choice.target == decision.choice.target
    assert rig.decide().choice.hit_tokens > 4000


def test_a_burst_with_one_uncached_prefix_stays_on_one_replica():
    rig = Rig(COSTS)
    sent = [rig.send(LONG_TEXT + str(number))[0].choice.target for number in range(20)]

    assert len(set(sent)) == 1


def test_deciding_changes_nothing():
    rig = Rig(COSTS)
    decisions = {as_tuple(rig.decide().choice) for _ in range(10)}

    assert len(decisions) == 1
    assert len(rig.residency) == 0
