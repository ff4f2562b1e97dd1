"""What keeps prompts from sharing more, as people and scripts are told."""

from __future__ import annotations

import pytest

from controlplane.models import Router
from controlplane.services.fleet.pools import create_pool
from telemetry.models import Decision
from tests.telemetry.lint.prompts import DATED, store_prompts
from tests.telemetry.web.conftest import NOW


@pytest.fixture
def prompts(fleet) -> None:
    """Three task groups of two pools: a date in front, nothing wrong, too few."""
    create_pool("batch")
    store_prompts(
        Router.objects.get(),
        NOW,
        {("chat", "retrieval"): ("", 12), ("chat", "coding"): (DATED, 12), ("batch", ""): (DATED, 3)},
    )
    assert Decision.objects.exclude(prompt_structure=None).count() == 27


def test_the_most_expensive_finding_comes_first_with_its_position_cost_and_advice(visitor, prompts):
    text = visitor.get("/prompts/").text

    assert text.index(">coding<") < text.index(">retrieval<")
    assert "<strong>A date or time</strong> in the system prompt, about 5 tokens in, in 100.0 % of the prompts" in text
    assert "tokens per day</strong> are computed again" in text
    assert "Move it after all constant text" in text
    assert "No findings" in text
    assert "Not enough prompts" in text
    assert 'href="/pools/chat/groups/coding/"' in text


def test_a_pool_can_be_chosen_and_one_that_is_gone_is_named(visitor, prompts):
    assert ">coding<" not in visitor.get("/prompts/?pool=batch").text
    assert "There is no pool named nowhere" in visitor.get("/prompts/?pool=nowhere").text
    part = visitor.get("/prompts/?pool=chat", headers={"HX-Request": "true"}).text
    assert "<html" not in part
    assert ">coding<" in part


def test_before_any_request_the_page_says_what_is_missing(visitor):
    assert "No prompts yet" in visitor.get("/prompts/").text


def test_rest_returns_the_same_findings(visitor, prompts, django_assert_max_num_queries):
    with django_assert_max_num_queries(10):
        answer = visitor.get("/api/v1/prompts?pool=chat")
    first, second = answer.json()["groups"]

    assert (first["pool"], first["group"], first["prompts"]) == ("chat", "coding", 12)
    (finding,) = first["findings"]
    assert (finding["kind"], finding["segment"], finding["at_tokens"]) == ("date", "system", 5)
    assert finding["effect"] == "identical tokens after it cannot be shared"
    assert finding["tokens_per_day"] == pytest.approx(
        finding["stable_tokens"] * finding["share_ratio"] * first["requests_per_s"] * 86_400
    )
    assert second["findings"] == []
    assert visitor.get("/api/v1/prompts?pool=nowhere").status_code == 422


def test_a_task_group_s_page_says_what_keeps_its_prompts_apart(visitor, prompts):
    text = visitor.get("/pools/chat/groups/coding/").text

    assert "Prompt differences" in text
    assert "computed again" in text
