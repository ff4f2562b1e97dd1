"""Prompts in Anthropic's form: what an engine renders alike has the same hashes, and successive turns share them."""

from __future__ import annotations

from typing import Any

import pytest

from routing.prompt.canonical import MAX_PARTS
from routing.prompt.hashing import PrefixHasher
from routing.types import BodyError
from tests.routing.building import CHAT, SECRET, block_hashes, canonical

MESSAGES = "/v1/messages"
HASHER = PrefixHasher(SECRET)
LONG = "Instructions that every request of this agent begins with. " * 40
MARK = {"type": "ephemeral"}
TOOL = {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}
QUESTION = {"role": "user", "content": "What is in a.txt?"}
CALL = {"type": "tool_use", "id": "call_1", "name": "read", "input": {"path": "a.txt", "limit": 5}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Hello."}]}
TURN = [
    QUESTION,
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, CALL]},
    {"role": "user", "content": [RESULT, {"type": "text", "text": "Go on."}]},
]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def data(**fields: Any) -> bytes:
    return canonical(MESSAGES, {"model": "llama", "messages": [QUESTION], **fields}).data


def chain(**fields: Any) -> list[int]:
    body = {"model": "llama", "system": LONG, "messages": [QUESTION], **fields}
    return block_hashes(HASHER, canonical(MESSAGES, body)).tolist()


def test_a_conversation_has_the_prompt_of_the_chat_that_vllm_makes_of_it():
    function = {"name": "read", "arguments": '{"path":"a.txt","limit":5}'}
    chat = canonical(
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                QUESTION,
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning": "Hm.",
                    "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "Hello."},
                {"role": "user", "content": "Go on."},
            ]
        },
    )

    assert data(system="Be brief.", messages=TURN) == chat.data


def test_the_prefix_is_tools_and_system_prompt():
    prompt = canonical(MESSAGES, {"system": LONG, "tools": [TOOL], "messages": TURN})

    assert 0 < prompt.tools_end < prompt.system_end < prompt.message_ends[1]
    assert prompt.data[: prompt.system_end].endswith(LONG.encode())


def test_a_later_turn_begins_with_the_blocks_of_the_earlier_one():
    first = chain(tools=[TOOL], messages=TURN)
    later = chain(tools=[TOOL], messages=[*TURN, {"role": "assistant", "content": "Done. " * 200}, QUESTION])

    assert len(first) > 4
    assert later[: len(first)] == first
    assert len(later) > len(first)


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"system": [{"type": "text", "text": "Be brief."}]}, {"system": "Be brief."}),
        ({"system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}, {"system": "Be brief."}),
        (
            {"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "A"}]},
            {"system": "A"},
        ),
        ({"system": [{"type": "text", "text": "A", "cache_control": MARK}]}, {"system": "A"}),
        ({"tools": [{**TOOL, "cache_control": MARK}]}, {"tools": [TOOL]}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "A", "cache_control": MARK}]}]},
         {"messages": [{"role": "user", "content": "A"}]}),
        ({"messages": [{"role": "user", "content": [{**IMAGE, "cache_control": MARK}]}]},
         {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ({"messages": [QUESTION, {"role": "user", "content": [{**RESULT, "cache_control": MARK}]}]},
         {"messages": [QUESTION, {"role": "user", "content": [{**RESULT, "content": "Hello."}]}]}),
        ({"messages": [QUESTION, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "A"}, CALL]}]},
         {"messages": [QUESTION, {"role": "assistant", "content": [CALL]}]}),
        ({"messages": [QUESTION, {"role": "system", "content": [{"type": "text", "text": "B"}]}]},
         {"messages": [QUESTION, {"role": "system", "content": "B"}]}),
        ({"messages": [QUESTION, {"role": "system", "content": "x-anthropic-billing-header: cch=1;"}]}, {}),
        ({"tools": None, "system": None, "metadata": {"user_id": "u"}, "max_tokens": 5, "temperature": 0}, {}),
    ],
)  # fmt: skip
def test_what_an_engine_renders_alike_has_the_same_prompt(fields, same):
    assert data(**fields) == data(**same)


@pytest.mark.parametrize(
    ("fields", "other"),
    [
        ({"system": "A"}, {"system": "B"}),
        ({"tools": [TOOL]}, {}),
        ({"tools": [TOOL]}, {"tools": [{**TOOL, "name": "write"}]}),
        (
            {"tools": [TOOL]},
            {
                "tools": [TOOL],
                "messages": [
                    QUESTION,
                    {"role": "system", "content": [{"type": "tool_removal", "tool": {"name": "read"}}]},
                ],
            },
        ),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, {"messages": [{"role": "user", "content": []}]}),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, {"messages": [{"role": "user", "content": "Hello."}]}),
        (
            {"messages": [{"role": "assistant", "content": [CALL]}]},
            {"messages": [{"role": "assistant", "content": [{**CALL, "input": {}}]}]},
        ),
    ],
)
def test_what_an_engine_renders_differently_has_another_prompt(fields, other):
    assert data(**fields) != data(**other)


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({"thinking": {"type": "disabled"}}, False),
        ({"output_config": {"effort": "high"}}, False),
        ({"chat_template_kwargs": {"date_string": "1 May"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, True),
        ({"thinking": {"type": "adaptive"}, "output_config": {}, "reasoning_effort": "high"}, True),
    ],
)
def test_only_parameters_that_change_the_rendering_separate_the_blocks(fields, shares):
    assert bool(set(chain(**fields)) & set(chain())) == shares


def test_a_body_with_too_many_blocks_is_rejected():
    blocks = [{"type": "text", "text": "a"}] * (MAX_PARTS + 1)
    with pytest.raises(BodyError, match="message parts"):
        data(messages=[{"role": "user", "content": blocks}])
    assert data(messages=[{"role": "user", "content": blocks[: MAX_PARTS // 4]}])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"])
def test_pairs_begin_with_what_they_share(path):
    names = ("query", "documents") if "rerank" in path else ("text_1", "text_2")
    one, other = (canonical(path, dict(zip(names, (LONG, texts), strict=True))) for texts in (["A"], ["B", "C"]))

    assert one.data != other.data
    assert block_hashes(HASHER, one).tolist() == block_hashes(HASHER, other).tolist()
    assert canonical(path, {"instruction": "Rank.", names[0]: LONG}).data.find(b"Rank.") < 20
