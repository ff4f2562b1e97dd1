"""A small part of the guard benchmark: fails when harmless canaries are rolled back or harmful ones are missed."""

from __future__ import annotations

import pytest

from tests.benchmarks.guard import (
    FOUND_BY,
    HARMFUL,
    HARMLESS,
    HARMS,
    MAX_FALSE,
    MIN_FOUND,
    Harm,
    Runs,
    Scenario,
    harmful_runs,
    harmless_runs,
)
from tests.pace import examples

TEST_SEED = 3001
RUNS = examples(20)  # of each scenario
pytestmark = pytest.mark.generated


@pytest.mark.timeout(900)
def test_harmless_canaries_are_rarely_rolled_back_within_an_hour() -> None:
    scenarios = (
        Scenario(share=0.05, prompts=2000, groups=4, session=5),
        Scenario(share=0.25, prompts=200, groups=1),
        Scenario(share=0.5, prompts=200, groups=4, session=20, drift=0.05),
        Scenario("group", prompts=200, groups=4, session=20),
        Scenario("router", prompts=30, groups=4, session=5),
    )
    played = [harmless_runs(scenario, runs=RUNS, first_seed=TEST_SEED) for scenario in scenarios]
    assert sum(runs.failed for runs in played) <= MAX_FALSE * sum(map(len, played))


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.name)
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_harmful_canary_is_found_within_15_minutes(share: float, harm: Harm) -> None:
    scenario = Scenario(share=share, prompts=2000, groups=4)
    assert harmful_runs(scenario, harm, runs=RUNS, first_seed=TEST_SEED).failed >= RUNS * MIN_FOUND


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.name)
def test_a_canary_of_5_percent_finds_them_too_if_its_prefixes_have_traffic(harm: Harm) -> None:
    scenario = Scenario(share=0.05, prompts=2000, groups=4)
    found = harmful_runs(scenario, harm, runs=20, first_seed=TEST_SEED)
    assert found.failed >= 20 * MIN_FOUND
    assert found.minute <= FOUND_BY


def test_the_oracle_shows_what_the_requests_cannot_tell() -> None:
    large, small = (Scenario(share=share, prompts=2000, groups=4) for share in (0.25, 0.02))
    for harm in HARMS:
        most, few = (harmful_runs(each, harm, runs=4, first_seed=TEST_SEED) for each in (large, small))
        assert most.oracle > 0.99
        assert few.failed / len(few) <= few.oracle <= most.oracle
    assert str(Runs(4, 0, 1, 0.5)) == "0% (no verdict 25%, oracle 50%)"


def test_with_few_prompts_there_is_no_verdict_by_hit_rate_and_ttft() -> None:
    few = Scenario(share=0.05, prompts=30, groups=1)
    for harm in HARMS[:2]:
        found = harmful_runs(few, harm, runs=RUNS, first_seed=TEST_SEED)
        assert found.failed <= RUNS / 4 <= found.unjudged


def test_the_benchmark_has_every_combination() -> None:
    assert len(set(HARMLESS)) == 3 * 3 * 2 * 3 + 2 * 3 * 3
    assert len(set(HARMFUL)) == 3 * 3 * 2 + 2 * 3
