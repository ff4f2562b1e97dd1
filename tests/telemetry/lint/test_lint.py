"""Prompt lint finds varying text before shared text, from hashes alone."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.lint.differences import Kind, compare
from telemetry.lint.findings import lint
from telemetry.lint.structure import PromptStructure
from tests.telemetry.lint.prompts import prompt_structure, rules

RULES = rules()
TOOLS = [
    {"type": "function", "function": {"name": name, "description": rules(n, 6), "parameters": {"b": 1, "a": 2}}}
    for n, name in enumerate(("weather", "search", "mail"))
]


def reordered(tools: list[Any]) -> list[Any]:
    """The same tools with the keys of each in another order."""
    return [{"function": dict(reversed(tool["function"].items())), "type": "function"} for tool in tools]


rng = random.Random(7)
VARYING_TEXT = {
    Kind.DATE: lambda n: f"Today is 2026-11-{n + 1:02d}, 10:{n:02d}.\n",
    Kind.EPOCH: lambda n: f"The time is {1_795_000_000 + 61 * n}.\n",
    Kind.UUID: lambda _: f"Request {uuid.UUID(int=rng.getrandbits(128))}.\n",
    Kind.HEX: lambda _: f"Trace {rng.getrandbits(128) | 15 << 124:032x}.\n",
    Kind.COUNTER: lambda n: f"You are asked for the {1000 + n}. time.\n",
    Kind.ID: lambda _: f"Session sess_{rng.getrandbits(40):013d}Qz.\n",
    Kind.OTHER: lambda n: f"You are talking to {['Ann', 'Bob', 'Cleo', 'Dan', 'Eve', 'Fay', 'Gus', 'Hal'][n % 8]}.\n",
}


@pytest.mark.parametrize("kind", VARYING_TEXT)
def test_varying_text_before_shared_text_is_found_with_its_position_and_cost(kind: Kind) -> None:
    before = rules(5, 4)
    prompts = [prompt_structure(before + VARYING_TEXT[kind](n) + RULES, f"Question {'x' * n}") for n in range(8)]

    (found,) = lint(prompts, requests_per_s=2.0)

    assert (found.kind, found.segment) == (kind, "system")
    tokens_before = len(before) / 4 - found.at_tokens
    # Without a volatile token, the position is that of the piece.
    assert 0 <= tokens_before <= 256 if kind is Kind.OTHER else abs(tokens_before) < 12
    assert 0.7 * len(RULES) / 4 < found.stable_tokens <= len(RULES) / 4 + 200
    assert found.share == 1.0
    assert found.tokens_per_day == pytest.approx(found.stable_tokens * 2.0 * 86_400)
    assert found.where.endswith("system prompt" if kind is Kind.OTHER else f"{found.at_tokens} tokens in")
    assert found.advice


def test_prompts_with_the_same_beginning_have_no_finding() -> None:
    prompts = [prompt_structure(RULES, f"Question {n}, asked on 2026-11-{n + 1:02d}") for n in range(8)]

    assert lint(prompts, 2.0) == []


def test_different_prompts_of_one_group_are_not_compared_with_each_other() -> None:
    others = [rules(seed) for seed in (11, 12, 13)]
    prompts = [prompt_structure(f"Now: 2026-11-21 10:{n:02d}\n{others[n % 3]}", "Hello") for n in range(18)]

    assert [finding.kind for finding in lint(prompts, 1.0)] == [Kind.DATE]
    assert lint([prompt_structure(others[n % 3], "Hello") for n in range(18)], 1.0) == []


def test_reordered_and_different_tools_are_found() -> None:
    orders = [TOOLS, reordered(TOOLS), TOOLS[::-1]]
    assert compare(*(prompt_structure(RULES, "Hi", tools=tools) for tools in orders[:2])).kind is Kind.REORDERED
    assert (
        compare(prompt_structure(RULES, "Hi", tools=TOOLS), prompt_structure(RULES, "Hi", tools=orders[2])).kind
        is Kind.REORDERED
    )
    changed = compare(prompt_structure(RULES, "Hi", tools=TOOLS), prompt_structure(RULES, "Hi", tools=TOOLS[:2]))
    assert (changed.kind, changed.stable_tokens > 500) == (Kind.TOOLS, True)
    assert compare(prompt_structure(RULES, "Hi", tools=TOOLS), prompt_structure(RULES, "Hi")).kind is Kind.TOOLS


def test_reordered_json_in_a_prompt_is_found() -> None:
    def facts(n: int) -> str:
        pairs = [f'"{word}": "{word[::-1]}"' for word in ("name", "town", "plan", "tier", "tone")]
        random.Random(n).shuffle(pairs)
        return f"Facts: {{{', '.join(pairs)}}}\n"

    prompts = [prompt_structure(facts(n) + RULES, "Hello") for n in range(8)]

    assert {finding.kind for finding in lint(prompts, 1.0)} == {Kind.REORDERED}


def test_a_truncated_history_is_found() -> None:
    turns = [rules(100 + n, 6) for n in range(12)]
    whole, later = prompt_structure(RULES, *turns[:7]), prompt_structure(RULES, *turns[2:9])

    found = compare(later, whole)

    assert found is not None
    assert (found.kind, found.segment) == (Kind.TRUNCATED, "history")
    assert found.stable_bytes > 0.9 * sum(map(len, turns[2:7]))
    assert compare(prompt_structure(RULES, *turns[:9]), whole) is None


def test_an_unknown_format_is_no_prompt_structure() -> None:
    for document in (None, 7, {}, {"bytes": 1}, {"segments": []}, [1]):
        assert PromptStructure.read(document) is None


texts = st.text("ab 1-:\n", max_size=30)


@given(prompt=st.lists(texts, min_size=1, max_size=4), other=st.lists(texts, min_size=1, max_size=4))
def test_any_two_prompts_can_be_compared(prompt: list[str], other: list[str]) -> None:
    found = compare(prompt_structure(*prompt), prompt_structure(*other))

    assert compare(prompt_structure(*prompt), prompt_structure(*prompt)) is None
    if found is not None:
        assert found.at >= 0
        assert 0 <= found.stable_bytes <= sum(len(text.encode()) + 16 for text in prompt)
