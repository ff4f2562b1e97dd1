"""An extracted body fills a cache with the prefix and contains nothing else of the client's request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.warm_up_prefixes import extract_prefix
from routing.prompt.canonical import RENDERING_FIELDS, CanonicalPrompt
from routing.prompt.hashing import boundary_end
from routing.schema import Boundary, Tier1
from tests.routing.building import CHAT, canonical

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
SYSTEM = {"role": "system", "content": "You are a clerk. " * 30}
QUESTION = {"role": "user", "content": "What did Ann Canary buy?"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def cut(path: str, body: dict[str, Any], end: int | None = None) -> dict[str, Any] | None:
    prompt = canonical(path, body)
    end = boundary_end(prompt, Tier1()) if end is None else end
    found = extract_prefix(path, json.dumps(body).encode(), prompt, end)
    return None if found is None else json.loads(found)


def reaches(path: str, body: dict[str, Any], kept: dict[str, Any], prompt: CanonicalPrompt, end: int) -> bool:
    """Whether the extracted body has the same canonical bytes up to the cut, except for a partial character."""
    sure = max(end - 3, 0)
    return canonical(path, kept).data[:sure] == prompt.data[:sure]


texts = st.text(max_size=60)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "developer"]), "content": texts}),
    min_size=1,
    max_size=5,
)


@given(messages, st.booleans(), st.integers(1, 400))
def test_an_extracted_chat_has_the_prefix_of_the_original(listed, has_tools, end):
    body = {"model": "m", "messages": listed} | ({"tools": TOOLS} if has_tools else {})
    prompt = canonical(CHAT, body)
    end = min(end, len(prompt.data))
    kept = cut(CHAT, body, end)

    if kept is not None and end >= prompt.tools_end:
        starts = [prompt.tools_end, *prompt.message_ends]
        start = max(it for it in starts if it <= end)
        role = next((m["role"] for m, at in zip(listed, prompt.message_ends, strict=True) if at > end), "")
        least = len(role) + 2 + 4  # the framing around the role, and a character: less may leave nothing of a message
        whole = end if end - start >= least else start
        assert reaches(CHAT, body, kept, prompt, whole)
        assert kept["messages"][-1]["role"] == "user"
        assert kept["max_tokens"] == 1


@given(st.text(min_size=1, max_size=100), st.integers(3, 200))
def test_an_extracted_text_has_the_prefix_of_the_original(text, end):
    body = {"model": "m", "prompt": text}
    prompt = canonical(COMPLETIONS, body)
    end = min(end, len(prompt.data))
    kept = cut(COMPLETIONS, body, end)

    assert kept is None or reaches(COMPLETIONS, body, kept, prompt, end)
    assert kept is not None or end < 6


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), st.integers(0, 40))
def test_token_ids_are_cut_at_a_token(ids, count):
    kept = cut(COMPLETIONS, {"prompt": ids}, 3 + 4 * count)

    assert (kept and kept["prompt"]) == (ids[:count] or None)


def test_only_rendered_members_are_retained():
    private = {
        "user": "ann",
        "metadata": {"session_id": "s"},
        "prompt_cache_key": "k",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 4,
        "logprobs": True,
        "max_completion_tokens": 500,
        "temperature": 0.3,
        "response_format": {"type": "json_object"},
    }
    rendered = {"model": "m", "tools": TOOLS, "cache_salt": "red", "chat_template_kwargs": {"thinking": False}}
    kept = cut(CHAT, {"messages": [SYSTEM, QUESTION], **private, **rendered})

    assert kept == {
        **rendered,
        "messages": [SYSTEM, {"role": "user", "content": "."}],
        "max_tokens": 1,
        "stream": False,
    }


@pytest.mark.parametrize("name", RENDERING_FIELDS)
def test_rendering_parameters_are_retained(name):
    said = {"add_special_tokens": False, "chat_template": "{{ messages }}", "reasoning_effort": "low"}
    value = said.get(name, {"effort": "low"})
    kept = cut(CHAT, {"messages": [SYSTEM, QUESTION], name: value})

    assert kept is not None
    assert kept[name] == value


def test_a_prompt_without_system_prompt_is_cut_within_its_text():
    kept = cut(CHAT, {"messages": [{"role": "user", "content": "é" * 2000, "name": "ann"}]})

    assert kept is not None
    [message] = kept["messages"]
    assert set(message) == {"role", "content"}
    assert message["content"] == "é" * len(message["content"])
    assert 1010 < len(message["content"].encode()) <= 1024


def test_instructions_are_a_prefix():
    body = {"instructions": SYSTEM["content"], "input": "What did Ann Canary buy?", "tools": TOOLS, "store": True}
    kept = cut(RESPONSES, body)

    assert kept == {
        "instructions": SYSTEM["content"],
        "tools": TOOLS,
        "input": ".",
        "max_output_tokens": 1,
        "store": False,
        "stream": False,
    }


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        (CHAT, {"messages": "odd"}, 5),
        (CHAT, {"messages": ["odd", SYSTEM]}, 300),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "in parts " * 300}]}]}, 1024),
        (CHAT, {"messages": [QUESTION]}, 3),
        (COMPLETIONS, {"prompt": ["two", "prompts"]}, 5),
        (COMPLETIONS, {"prompt": "before the gap " * 100, "suffix": "behind it"}, 1024),
        (COMPLETIONS, {"prompt": "cut at its front " * 100, "truncate_prompt_tokens": 20}, 1024),
        (RESPONSES, {"input": "no instructions " * 100}, 1024),
        ("/v1/embeddings", {"input": "text " * 300}, 1024),
    ],
)
def test_no_prefix_is_extracted_if_it_is_not_possible(path, body, end):
    assert cut(path, body, end) is None


def test_documents_are_kept_whole_or_left_out():
    documents = [{"title": "Receipts", "text": "Ann Canary: bread, milk."}]
    body = {"messages": [SYSTEM, QUESTION], "documents": documents}
    prompt = canonical(CHAT, body)
    of_opening, of_question = cut(CHAT, body), cut(CHAT, body, len(prompt.data) - 4)

    assert of_opening is not None
    assert of_question is not None
    assert of_opening["messages"] == [SYSTEM, {"role": "user", "content": "."}]
    assert "documents" not in of_opening
    assert of_question["documents"] == documents
    assert of_question["messages"] == [SYSTEM, {"role": "user", "content": QUESTION["content"][:-4]}]
    assert reaches(CHAT, body, of_question, prompt, len(prompt.data) - 4)


def test_a_system_prompt_is_cut_without_its_attribution_line():
    text = "You are a clerk. " * 200
    kept = cut(CHAT, {"messages": [{"role": "system", "content": f"x-anthropic-billing-header: a\n{text}"}]}, 1024)

    assert kept is not None
    assert kept["messages"][0] == {"role": "system", "content": text[: 1024 - len("system") - 2]}


def test_messages_in_parts_are_kept_whole_before_the_cut():
    parts = {"role": "system", "content": [{"type": "text", "text": "You are a clerk. " * 30}]}
    kept = cut(CHAT, {"messages": [parts, QUESTION]})

    assert kept is not None
    assert kept["messages"][0] == parts


def test_a_message_boundary_keeps_its_messages():
    body = {"messages": [SYSTEM, QUESTION, {"role": "assistant", "content": "Bread."}, QUESTION]}
    prompt = canonical(CHAT, body)
    kept = cut(CHAT, body, boundary_end(prompt, Tier1(boundary=Boundary.MESSAGES, boundary_messages=3)))

    assert kept is not None
    assert kept["messages"] == [*body["messages"][:3], {"role": "user", "content": "."}]


MESSAGES = "/v1/messages"
FUNCTION = {"name": "look", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
AGENT = {
    "model": "m",
    "max_tokens": 4000,
    "system": [{"type": "text", "text": "You are a clerk. " * 30, "cache_control": {"type": "ephemeral"}}],
    "tools": [FUNCTION],
    "messages": [QUESTION],
    "stream": True,
    "metadata": {"user_id": "user_1_account_2_session_3"},
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "You are a clerk. " * 30, "tools": None},
        {"thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {"effort": "low"}},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_an_agents_tools_and_system_prompt_are_its_prefix(fields):
    body = AGENT | fields
    kept = cut(MESSAGES, body)
    prompt = canonical(MESSAGES, body)

    assert kept is not None
    assert (kept["max_tokens"], kept["stream"], "metadata" in kept) == (1, False, False)
    assert "Canary" not in json.dumps(kept)
    assert "budget_tokens" not in json.dumps(kept)
    assert canonical(MESSAGES, kept).data[: prompt.system_end] == prompt.data[: prompt.system_end]
    assert canonical(MESSAGES, kept).rendering == prompt.rendering


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Ann Canary is a customer. " * 30}, QUESTION],
        [QUESTION, {"role": "system", "content": [{"type": "tool_removal", "tool": {"name": "look"}}]}],
    ],
)
def test_a_prefix_that_depends_on_messages_is_not_extracted(messages):
    assert cut(MESSAGES, AGENT | {"messages": messages}) is None
    assert cut(MESSAGES, AGENT, 100) is None
