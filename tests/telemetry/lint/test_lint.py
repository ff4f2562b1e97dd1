"""What keeps prompts from sharing more is found by its place and kind, from hashes alone."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.lint import Finding, Kind, PromptStructure, compare, lint
from tests.telemetry.lint.prompts import opening, rules

RULES = rules()
TOOLS = [
    {"type": "function", "function": {"name": name, "description": rules(n, 6), "parameters": {"b": 1, "a": 2}}}
    for n, name in enumerate(("weather", "search", "mail"))
]


def reordered(tools: list[Any]) -> list[Any]:
    """The same tools with the keys of each in another order."""
    return [{"function": dict(reversed(tool["function"].items())), "type": "function"} for tool in tools]


rng = random.Random(7)
HEADS = {
    Kind.DATE: lambda n: f"Today is 2026-11-{n + 1:02d}, 10:{n:02d}.\n",
    Kind.EPOCH: lambda n: f"The time is {1_795_000_000 + 61 * n}.\n",
    Kind.UUID: lambda _: f"Request {uuid.UUID(int=rng.getrandbits(128))}.\n",
    Kind.HEX: lambda _: f"Trace {rng.getrandbits(128) | 15 << 124:032x}.\n",
    Kind.COUNTER: lambda n: f"You are asked for the {1000 + n}. time.\n",
    Kind.ID: lambda _: f"Session sess_{rng.getrandbits(40):013d}Qz.\n",
    Kind.OTHER: lambda n: f"You are talking to {['Ann', 'Bob', 'Cleo', 'Dan', 'Eve', 'Fay', 'Gus', 'Hal'][n % 8]}.\n",
}


@pytest.mark.parametrize("kind", HEADS)
def test_what_changes_in_front_of_a_stable_prompt_is_found_with_its_place_and_price(kind: Kind) -> None:
    before = rules(5, 4)
    openings = [opening(before + HEADS[kind](n) + RULES, f"Question {'x' * n}") for n in range(8)]

    (found,) = lint(openings, requests_per_s=2.0)

    assert (found.kind, found.segment) == (kind, "system")
    ahead = len(before) / 4 - found.at_tokens
    assert 0 <= ahead <= 256 if kind is Kind.OTHER else abs(ahead) < 12  # what has no class is placed by its piece
    assert 0.7 * len(RULES) / 4 < found.stable_tokens <= len(RULES) / 4 + 200
    assert found.share == 1.0
    assert found.tokens_per_day == pytest.approx(found.stable_tokens * 2.0 * 86_400)
    assert found.where.endswith("system prompt" if kind is Kind.OTHER else f"{found.at_tokens} tokens in")
    assert found.advice


def test_a_prompt_that_begins_alike_has_no_finding() -> None:
    openings = [opening(RULES, f"Question {n}, asked on 2026-11-{n + 1:02d}") for n in range(8)]

    assert lint(openings, 2.0) == []


def test_several_prompts_in_one_group_are_told_apart() -> None:
    others = [rules(seed) for seed in (11, 12, 13)]
    openings = [opening(f"Now: 2026-11-21 10:{n:02d}\n{others[n % 3]}", "Hello") for n in range(18)]

    assert [it.kind for it in lint(openings, 1.0)] == [Kind.DATE]
    assert lint([opening(others[n % 3], "Hello") for n in range(18)], 1.0) == []


def test_tools_in_another_order_or_other_tools_are_found() -> None:
    orders = [TOOLS, reordered(TOOLS), TOOLS[::-1]]
    assert compare(*(opening(RULES, "Hi", tools=it) for it in orders[:2])).kind is Kind.REORDERED
    assert compare(opening(RULES, "Hi", tools=TOOLS), opening(RULES, "Hi", tools=orders[2])).kind is Kind.REORDERED
    changed = compare(opening(RULES, "Hi", tools=TOOLS), opening(RULES, "Hi", tools=TOOLS[:2]))
    assert (changed.kind, changed.stable_tokens > 500) == (Kind.TOOLS, True)
    assert compare(opening(RULES, "Hi", tools=TOOLS), opening(RULES, "Hi")).kind is Kind.TOOLS


def test_json_in_another_order_is_found_in_a_prompt() -> None:
    def facts(n: int) -> str:
        pairs = [f'"{word}": "{word[::-1]}"' for word in ("name", "town", "plan", "tier", "tone")]
        random.Random(n).shuffle(pairs)
        return f"Facts: {{{', '.join(pairs)}}}\n"

    openings = [opening(facts(n) + RULES, "Hello") for n in range(8)]

    assert {it.kind for it in lint(openings, 1.0)} == {Kind.REORDERED}


def test_a_history_that_loses_its_beginning_is_found() -> None:
    turns = [rules(100 + n, 6) for n in range(12)]
    whole, later = opening(RULES, *turns[:7]), opening(RULES, *turns[2:9])

    found = compare(later, whole)

    assert found is not None
    assert (found.kind, found.segment) == (Kind.TRUNCATED, "history")
    assert found.stable > 0.9 * sum(map(len, turns[2:7]))
    assert compare(opening(RULES, *turns[:9]), whole) is None


def test_what_no_router_says_is_no_opening() -> None:
    for document in (None, 7, {}, {"bytes": 1}, {"segments": []}, [1]):
        assert PromptStructure.read(document) is None


texts = st.text("ab 1-:\n", max_size=30)


@given(one=st.lists(texts, min_size=1, max_size=4), other=st.lists(texts, min_size=1, max_size=4))
def test_any_two_openings_can_be_compared(one: list[str], other: list[str]) -> None:
    found = compare(opening(*one), opening(*other))

    assert compare(opening(*one), opening(*one)) is None
    if found is not None:
        assert found.at >= 0
        assert 0 <= found.stable <= sum(len(text.encode()) + 16 for text in one)


def test_places_are_told_in_words() -> None:
    def where(kind: Kind, segment: str, at_tokens: int) -> str:
        return Finding(kind, segment, at_tokens, 1, 1.0, 1, None).where

    assert where(Kind.DATE, "system", 41) == "in the system prompt, about 41 tokens in"
    assert where(Kind.DATE, "user", 0) == "at the beginning of the user message"
    assert where(Kind.TOOLS, "tools", 0) == "in the tool list"
    assert where(Kind.TRUNCATED, "history", 0) == "at the beginning of the history"
