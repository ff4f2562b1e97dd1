from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.prompt.canonical import MAX_IDS, MAX_PARTS
from routing.types import BodyError
from tests.routing.building import canonical, chat

COMPLETIONS, EMBEDDINGS, RESPONSES = "/v1/completions", "/v1/embeddings", "/v1/responses"

# Few letters and look-alikes of the framing, so that texts collide if framing is wrong.
texts = st.text('ab\x00\x1f\xff\u07ff{}":,', max_size=4)
messages = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", ""]), texts), max_size=4)
tool_lists = st.lists(st.fixed_dictionaries({"name": texts}), max_size=2)


@given(one=st.tuples(messages, tool_lists), other=st.tuples(messages, tool_lists))
def test_different_prompts_never_have_the_same_bytes(one, other):
    same_bytes = chat(*one[0], tools=one[1]).data == chat(*other[0], tools=other[1]).data

    assert same_bytes == (one == other)


@given(beginning=messages, first=messages, second=messages)
def test_prompts_that_begin_alike_have_a_common_prefix(beginning, first, second):
    shared = chat(*beginning).data

    assert chat(*beginning, *first).data.startswith(shared)
    assert chat(*beginning, *second).data.startswith(shared)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": [{"role": "user", "content": "é"}]}, {"messages": [{"content": "\u00e9", "role": "user"}]}),
        ({"messages": [{"role": "user", "content": "a"}]},
         {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "temperature": 0.3}),
        ({"messages": [{"role": "assistant", "content": None}]}, {"messages": [{"role": "assistant", "content": ""}]}),
        ({"messages": [], "tools": [{"a": 1, "b": {"c": 2, "d": 3}}]},
         {"messages": [], "tools": [{"b": {"d": 3, "c": 2}, "a": 1}]}),
        ({"messages": [], "tools": []}, {"messages": [], "tools": None}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"ttl": 1}}]}]},
         {"messages": [{"role": "user", "content": "a"}]}),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
         {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"},
                                                    "cache_control": {"ttl": 1}}]}]}),
        ({"messages": [{"role": "assistant", "reasoning_content": "a"}]},
         {"messages": [{"role": "assistant", "reasoning": "a"}]}),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "uuid": "a", "image_url": {"url": "u"}}]}]},
         {"messages": [{"role": "user", "content": [{"type": "image_url", "uuid": "a", "image_url": None}]}]}),
    ],
)  # fmt: skip
def test_prompts_that_engines_render_alike_have_the_same_bytes(one, other):
    assert canonical("/v1/chat/completions", one).data == canonical("/v1/chat/completions", other).data


def test_segment_ends_are_recorded():
    prompt = chat(
        ("system", "Be brief."), ("developer", "Use metric units."), ("user", "Hi"), ("system", "Go on."), tools=[{}]
    )

    segments = [prompt.data[start:end] for start, end in pairwise([0, prompt.tools_end, *prompt.message_ends])]
    assert [b"Be brief." in segment for segment in segments] == [False, True, False, False, False]
    assert prompt.tools_end < prompt.message_ends[0]
    assert prompt.system_end == prompt.message_ends[1]
    assert prompt.message_ends[-1] == len(prompt.data)


def test_tools_alone_are_a_prefix():
    prompt = chat(("user", "Hi"), tools=[{"name": "search"}])

    assert prompt.system_end == prompt.tools_end > 0


def test_a_prompt_without_tools_and_system_has_no_system_end():
    assert chat(("user", "Hi"), ("system", "late")).system_end == 0


def test_an_image_is_represented_by_its_digest():
    def image(url: str) -> Any:
        return ("user", [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}])

    one, same, other = (chat(image("data:image/png;base64," + data * 50_000)) for data in ("A", "A", "B"))

    assert one.data == same.data != other.data
    assert len(one.data) < 100


BILLED = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"


def in_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    "content",
    [
        BILLED % "a1" + "\nBe brief.",
        BILLED % "b2" + "\nBe brief.",
        in_parts(BILLED % "a1", "Be brief."),
        in_parts("Be brief.", BILLED % "b2"),
        in_parts(BILLED % "c3" + "\nBe brief."),
        [BILLED % "d4", "Be brief."],
    ],
)
def test_the_attribution_line_is_left_out(content):
    assert chat(("system", content), ("user", "Hi")).data == chat(("system", "Be brief."), ("user", "Hi")).data


def test_the_attribution_line_counts_where_engines_keep_it():
    one, other = (chat(("user", BILLED % value + "\nHi")).data for value in ("a", "b"))

    assert one != other
    assert chat(
        ("system", [5, None, {"type": "text", "text": 5}])
    ).data  # parts of unknown types are placed by their JSON


@pytest.mark.parametrize(
    "field", ["name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "task", "tools"]
)
def test_rendered_fields_count(field):
    def message(value: str) -> bytes:
        body = {"messages": [{"role": "assistant", "content": None, field: value}]}
        return canonical("/v1/chat/completions", body).data

    assert message("a") != message("b") != message("")


def test_token_ids_count_and_not_their_number():
    one, other = (canonical(COMPLETIONS, {"prompt": ids}) for ids in ([1, 2, 3], [4, 5, 6]))

    assert one.data != other.data
    assert one.estimate(64) == 3 + 2  # the ids, and 7 bytes of framing


@given(
    one=st.lists(
        st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([255, 65535]), max_size=3), min_size=1, max_size=3
    ),
    other=st.lists(st.lists(st.sampled_from([0, 255, 2**32 - 1]), max_size=3), min_size=1, max_size=3),
)
def test_different_lists_of_ids_never_have_the_same_bytes(one, other):
    same_bytes = canonical(COMPLETIONS, {"prompt": one}).data == canonical(COMPLETIONS, {"prompt": other}).data

    assert same_bytes == (one == other)


@pytest.mark.parametrize("prompt", [[-1], [2**40], [1.5], [1, "a"], [True, None], 7, {"a": 1}, [[1], "a"], [[[1]]]])
def test_values_of_unknown_types_are_placed_by_their_json(prompt):
    assert canonical(COMPLETIONS, {"prompt": prompt}).data


def test_a_text_and_a_list_of_that_one_text_are_the_same_prompt():
    assert canonical(COMPLETIONS, {"prompt": "a"}).data == canonical(COMPLETIONS, {"prompt": ["a"]}).data
    assert canonical(COMPLETIONS, {"prompt": "ab"}).data != canonical(COMPLETIONS, {"prompt": ["a", "b"]}).data


def test_embeddings_read_inputs_or_messages():
    assert canonical(EMBEDDINGS, {"input": ["a", "b"]}).data == canonical(COMPLETIONS, {"prompt": ["a", "b"]}).data
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert canonical(EMBEDDINGS, body).data == chat(("user", "a")).data


def test_the_responses_api_gives_the_prompt_of_the_same_chat():
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    as_chat = chat(("system", "Be brief."), ("user", "Hi"))

    for input_ in (items, "Hi"):
        prompt = canonical(RESPONSES, {"instructions": "Be brief.", "input": input_})
        assert (prompt.data, prompt.system_end) == (as_chat.data, as_chat.system_end)


def test_documents_follow_the_system_messages():
    turns = [("system", "Be brief."), ("user", "Hi")]
    plain, informed = chat(*turns), chat(*turns, documents=[{"title": "a", "text": "What is known."}])

    assert informed.system_end == plain.system_end
    assert informed.data[: plain.system_end] == plain.data[: plain.system_end]
    assert informed.data[informed.system_end :].startswith(b'\xf7[{"text":"What is known.","title":"a"}]\xffuser')
    assert len(informed.message_ends) == 2
    assert informed.estimate(64) > plain.estimate(64)


@given(
    one=st.tuples(messages, st.lists(st.fixed_dictionaries({"text": texts}), max_size=2)),
    other=st.tuples(messages, st.lists(st.fixed_dictionaries({"text": texts}), max_size=2)),
)
def test_other_documents_give_another_prompt(one, other):
    same_bytes = chat(*one[0], documents=one[1]).data == chat(*other[0], documents=other[1]).data

    assert same_bytes == (one == other)


@pytest.mark.parametrize("messages", [None, "a text", [5, {"role": ["odd"]}], []])
def test_documents_count_with_messages_of_any_type(messages):
    one, other = (canonical("/v1/chat/completions", {"messages": messages, "documents": [it]}).data for it in "ab")

    assert one != other


def test_a_suffix_counts_after_the_prompt():
    one, other = (canonical(COMPLETIONS, {"prompt": "def f", "suffix": suffix}).data for suffix in ("a", "b"))

    assert one != other
    assert one.startswith(canonical(COMPLETIONS, {"prompt": "def f"}).data)


def test_embedded_prompts_are_represented_by_their_digests():
    def embedded(*prompts: str) -> bytes:
        return canonical(COMPLETIONS, {"prompt_embeds": list(prompts)}).data

    assert len({embedded("AAAA"), embedded("BBBB"), embedded("AAAA", "BBBB"), embedded("BBBB", "AAAA")}) == 4
    assert embedded("AAAA") == canonical(COMPLETIONS, {"prompt_embeds": "AAAA"}).data
    assert len(embedded("A" * 50_000)) < 100


@pytest.mark.parametrize("member", ["previous_response_id", "previous_input_messages"])
def test_earlier_turns_are_between_instructions_and_input(member):
    def response(**fields: Any) -> Any:
        return canonical(RESPONSES, {"instructions": "Be brief.", "input": "Go on", **fields})

    first, one, other = response(), response(**{member: "a"}), response(**{member: "b"})

    assert len({first.data, one.data, other.data}) == 3
    assert one.data[: one.system_end] == first.data[: first.system_end]
    assert len(one.message_ends) == 3


def test_function_calls_of_responses_count():
    def calling(arguments: str) -> bytes:
        call = {"type": "function_call", "name": "search", "arguments": arguments}
        return canonical(RESPONSES, {"input": [{"role": "user", "content": "Hi"}, call]}).data

    assert calling("{}") != calling('{"q":1}')


def test_a_prompt_is_estimated_at_four_bytes_a_token():
    assert chat(("user", "x" * 4000)).estimate(64) == 1002  # 6 bytes of framing and role
    assert chat().estimate(64) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{}]}),
        ("/v1/chat/completions", {"messages": [0]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [""]}]}),
        (COMPLETIONS, {"prompt": [""]}),
        (COMPLETIONS, {"prompt": [[1]]}),
        (EMBEDDINGS, {"input": [""]}),
        (RESPONSES, {"input": [{}]}),
    ],
)
def test_a_body_with_too_many_parts_is_rejected_before_they_are_read(path, body):
    """Millions of them fit into a body, and would block all other requests for seconds."""
    parts = next(iter(body.values()))
    parts = parts[0]["content"] if parts[0] and "content" in parts[0] else parts
    parts *= MAX_PARTS - 1  # with the message around them, the maximum
    canonical(path, body)
    parts += parts[:2]
    with pytest.raises(BodyError, match="more than 65,536"):
        canonical(path, body)


def test_a_body_with_too_many_token_ids_is_rejected():
    ids = [1] * (MAX_IDS // 2)
    assert canonical(COMPLETIONS, {"prompt": [ids, ids]}).ids == MAX_IDS
    with pytest.raises(BodyError, match="more than 2,097,152 token ids"):
        canonical(COMPLETIONS, {"prompt": [ids, ids, [1]]})


def test_the_salt_is_kept_apart_from_the_text():
    assert chat(("user", "Hi"), cache_salt="team-a").salt == "team-a"
    assert chat(("user", "Hi"), cache_salt="team-a").data == chat(("user", "Hi")).data


def test_canonical_bytes_never_change():
    prompt = chat(
        ("system", "Be brief."),
        (
            "user",
            [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "http://a/b.png"}}],
        ),
        tools=[{"b": 1, "a": "é"}],
    )

    assert prompt.data == (
        b'\xfa[{"a":"\xc3\xa9","b":1}]\xffsystem\xfeBe brief.'
        b"\xffuser\xfeWhat is it?\xfd\xfc3432828a7d7c4474aedc147e0f6406ec"
    )


@pytest.mark.parametrize(
    ("path", "fields", "reads_cache"),
    [
        ("/v1/completions", {}, True),
        ("/v1/completions", {"echo": True}, True),
        ("/v1/completions", {"logprobs": 1}, True),
        ("/v1/completions", {"echo": True, "logprobs": 0}, False),
        ("/v1/completions", {"prompt_logprobs": 0}, False),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}, True),
        ("/v1/chat/completions", {"echo": False}, True),
        ("/v1/chat/completions", {"echo": True}, False),
        ("/v1/chat/completions", {"prompt_logprobs": 1}, False),
    ],
)
def test_prompts_with_log_probabilities_read_no_cached_blocks(path, fields, reads_cache):
    """As measured with vLLM 0.32, whose chats have ``top_logprobs`` 0 by default."""
    prompt = canonical(path, {"prompt": "text", "messages": [{"role": "user", "content": "text"}], **fields})

    assert prompt.reads_cache == prompt.with_salt("tenant").reads_cache == reads_cache
