"""Prompts that an engine renders differently share no blocks; those rendered alike share all."""

from __future__ import annotations

from typing import Any

import pytest

from routing.prompt.hashing import PrefixHasher
from tests.routing.building import CHAT, SECRET, block_hashes, canonical

COMPLETIONS, EMBEDDINGS, RESPONSES = "/v1/completions", "/v1/embeddings", "/v1/responses"
HASHER = PrefixHasher(SECRET)
LONG = "What is asked, at some length. " * 40  # four blocks and more
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": LONG},
    EMBEDDINGS: {"input": LONG},
    RESPONSES: {"instructions": LONG, "input": "Hi"},
}


def chain(path: str, **fields: Any) -> list[int]:
    return block_hashes(HASHER, canonical(path, BODIES[path] | fields)).tolist()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"chat_template": "{{ messages }}"}),
        (CHAT, {"chat_template_kwargs": {"date_string": "1 May"}}),
        (CHAT, {"chat_template_kwargs": {"date_string": "1 May", "thinking": True}}),
        (CHAT, {"reasoning_effort": "high"}),
        (CHAT, {"add_special_tokens": True}),
        (CHAT, {"mm_processor_kwargs": {"num_crops": 4}}),
        (CHAT, {"media_io_kwargs": {"video": {"num_frames": 4}}}),
        (CHAT, {"truncate_prompt_tokens": 20}),
        (CHAT, {"truncate_prompt_tokens": 20, "truncation_side": "left"}),
        (COMPLETIONS, {"add_special_tokens": False}),
        (COMPLETIONS, {"suffix": ""}),
        (COMPLETIONS, {"truncate_prompt_tokens": 20}),
        (EMBEDDINGS, {"add_special_tokens": False}),
        (EMBEDDINGS, {"truncate_prompt_tokens": 20, "truncation_side": "left"}),
        (RESPONSES, {"chat_template_kwargs": {"date_string": "1 May"}}),
        (RESPONSES, {"reasoning": {"effort": "high"}}),
        (RESPONSES, {"mm_processor_kwargs": {"num_crops": 4}}),
    ],
)
def test_other_rendering_parameters_share_no_block(path, fields):
    assert set(chain(path, **fields)).isdisjoint(chain(path))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"chat_template_kwargs": {"thinking": True, "date_string": None}}),
        (CHAT, {"chat_template_kwargs": {}, "mm_processor_kwargs": {}, "documents": []}),
        (CHAT, {"add_generation_prompt": False, "continue_final_message": True}),
        (CHAT, {"add_special_tokens": False}),
        (CHAT, {"tool_choice": "required", "response_format": {"type": "json_object"}}),
        (CHAT, {"truncate_prompt_tokens": 20, "truncation_side": "right"}),
        (CHAT, {"truncate_prompt_tokens": 100_000}),
        (CHAT, {"truncate_prompt_tokens": -1}),
        (CHAT, {"reasoning": {"effort": "high"}, "suffix": "end"}),  # not read at this endpoint
        (COMPLETIONS, {"add_special_tokens": True, "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}),
        (EMBEDDINGS, {"truncate_prompt_tokens": 20}),
        (RESPONSES, {"reasoning": {"summary": "auto"}, "reasoning_effort": "low", "truncation": "auto"}),
    ],
)
def test_parameters_that_change_only_the_end_share_every_block(path, fields):
    assert chain(path, **fields) == chain(path)


def test_an_effort_is_the_same_in_both_apis():
    as_response = canonical(RESPONSES, {"input": "Hi", "reasoning": {"effort": "low"}})
    as_chat = canonical(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "low"})

    assert as_response.rendering == as_chat.rendering != 0


def test_left_truncated_prompts_share_no_block():
    one = canonical(COMPLETIONS, {"prompt": LONG + "one", "truncate_prompt_tokens": 20})
    other = canonical(COMPLETIONS, {"prompt": LONG + "two", "truncate_prompt_tokens": 20})

    assert one.rendering != other.rendering


def test_the_tier1_key_does_not_depend_on_the_rendering():
    plain, rendered = (canonical(CHAT, BODIES[CHAT] | fields) for fields in ({}, {"reasoning_effort": "high"}))

    assert HASHER.tier1(plain, "llama") == HASHER.tier1(rendered, "llama")
    assert HASHER.tier2(plain, "llama") == HASHER.tier2(rendered, "llama")


def test_a_tenants_salt_does_not_change_the_rendering():
    rendered = canonical(CHAT, BODIES[CHAT] | {"reasoning_effort": "high"})

    assert rendered.with_salt("red").rendering == rendered.rendering


@pytest.mark.parametrize("value", [5, "text", [1], True, {"a": [{}]}])
@pytest.mark.parametrize(
    "member", ["chat_template_kwargs", "reasoning", "truncate_prompt_tokens", "documents", "suffix", "prompt_embeds"]
)
def test_a_rendering_parameter_of_any_type_is_placed(member, value):
    for path, body in BODIES.items():
        assert canonical(path, body | {member: value}).data


def test_rendering_hashes_never_change():
    fields = {"reasoning_effort": "high", "chat_template_kwargs": {"b": 1, "a": "é"}}

    assert canonical(CHAT, BODIES[CHAT] | fields).rendering == 1497514143276042049
