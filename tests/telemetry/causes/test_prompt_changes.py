"""Which change of the prompts is named, from few described prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from telemetry.causes import rank
from telemetry.causes.evidence import DescribedPrompt, Evidence, Period, Route, Sums
from telemetry.causes.workload import check_prompt_change
from telemetry.lab.breakdown import TERMS, Breakdown
from tests.telemetry.conftest import T0
from tests.telemetry.lint.prompts import DATED, prompt_structure, rules

TEAMS = 12
MINUTE = timedelta(minutes=1)


def tools(team: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"team{team}_tool{number}", "description": rules(team, 5)}}
        for number in range(4)
    ]


def period(start, count: int, hit_rate: float, system: Callable[[int], str], tools_of=tools) -> Period:
    """Agents of several teams, each with its own tools; ``system`` makes the beginning of the n-th prompt."""
    prompts = [
        DescribedPrompt(
            "agent",
            start + number * timedelta(seconds=1),
            prompt_structure(
                system(number) + rules(number % TEAMS), f"Question {number}", tools=tools_of(number % TEAMS)
            ),
        )
        for number in range(count)
    ]
    route = Route("agent", "r1", "p", 1, Sums(count, 1000.0 * count, hit_rate * 1000.0 * count))
    return Period(start, start + MINUTE, routes=[route], prompts=prompts)


def finding_of(now: Period):
    before = period(T0 - MINUTE, 60, 0.9, lambda _: "")
    finding = check_prompt_change(Evidence(now, before, (), T0))
    assert finding is not None
    return finding


@pytest.mark.parametrize("count", [6, 18, 40])
def test_a_date_is_found_though_few_of_the_new_prompts_have_the_same_tools(count: int) -> None:
    finding = finding_of(period(T0, count, 0.3, lambda number: DATED.format(n=number)))

    if count > TEAMS:
        assert finding.evidence["kind"] == "date"
    assert finding.evidence["segment"] == "system"
    assert finding.evidence["keeps_changing"]


def test_another_tool_list_is_said_without_a_place() -> None:
    finding = finding_of(period(T0, 18, 0.3, lambda _: "", lambda team: tools(team)[:3]))

    assert finding.evidence["kind"] == "tools"
    assert "of task group agent have a different tool list" in finding.summary
    assert "list in the tool list" not in finding.summary


def test_another_system_prompt_is_changing_text() -> None:
    finding = finding_of(period(T0, 18, 0.3, lambda _: "You are a careful assistant.\n"))

    assert (finding.evidence["kind"], finding.evidence["segment"]) == ("other", "system")


def test_new_prompts_that_repeat_are_not_different_in_each_request() -> None:
    """24 new prompts in 55 requests, two of each team: nearly half of the beginnings are different ones."""
    order = random.Random(5)
    drawn = [number % TEAMS + TEAMS * order.randrange(2) for number in range(55)]
    assert len(set(drawn)) > 0.3 * len(drawn)

    finding = finding_of(period(T0, 55, 0.3, lambda number: rules(100 + drawn[number], 3), lambda _: []))

    assert finding.evidence["keeps_changing"] is False
    assert "in each request" not in finding.summary


def test_new_prompts_that_repeat_lose_what_no_cache_could_have_and_too_small_caches_the_rest() -> None:
    """Reachable fell from 90 to 60 %, and of that half is evicted."""

    def with_breakdown(of: Period, reachable: float, capacity: float) -> Period:
        tokens = of.total.prompt
        terms = {"reachable": reachable, "capacity": capacity, "best": capacity, "delivered": capacity}
        known = {name: terms.get(name, capacity) * tokens for name in TERMS}
        return replace(of, breakdown=Breakdown(prompt_tokens=tokens, requests=60, sample_ratio=1.0, **known))

    now = period(T0, 55, 0.3, lambda number: rules(100 + number % 24, 3), lambda _: [])
    before = period(T0 - MINUTE, 60, 0.9, lambda _: "")
    evidence = Evidence(with_breakdown(now, 0.6, 0.3), with_breakdown(before, 0.9, 0.9), (), T0)

    causes = {cause.kind: cause.evidence["explained_ratio"] for cause in rank(evidence)}
    assert causes == {"prompt_changed": pytest.approx(0.5, abs=0.01), "capacity": pytest.approx(0.5, abs=0.01)}
