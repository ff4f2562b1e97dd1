"""The stand-in reads any body as a request or rejects it as vLLM does; tokens, ids and text of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.simulation.engine import Engine, EngineConfig, Sequence
from routing.simulation.statistics import request_token_edges
from routing.standin.errors import ApiError
from routing.standin.metrics import page
from routing.standin.requests import (
    GenerationRequest,
    PseudoWords,
    block_keys,
    count_tokens,
    encode,
    prompt_of_ids,
    read_chat,
    read_completion,
    render_chat,
    token_ids,
)

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
NAMES = st.sampled_from(["role", "content", "type", "text", "include_usage"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=5)
FIELDS = ["max_tokens", "stream", "stream_options", "n", "temperature", "stop", "cache_salt", "min_tokens", "logprobs",
          "tools", "tool_choice", "model"]  # fmt: skip
MESSAGES = st.lists(st.fixed_dictionaries({"role": VALUES}, optional={"content": VALUES}), max_size=2)
OTHERS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2)


def read(reader: Callable[..., GenerationRequest], body: dict[str, Any], *more: Any) -> GenerationRequest | ApiError:
    try:
        return reader(body, "tiny", 1000, *more)
    except ApiError as error:
        return error


@given(messages=MESSAGES | VALUES, others=OTHERS)
def test_any_chat_body_is_read_or_rejected(messages, others):
    outcome = read(read_chat, {"messages": messages, **others}, True)
    assert outcome.status in {400, 404} if isinstance(outcome, ApiError) else len(outcome.prompts) == 1


@given(prompt=st.just("x") | VALUES, others=OTHERS)
def test_any_completion_body_is_read_or_rejected(prompt, others):
    outcome = read(read_completion, {"prompt": prompt, **others})
    assert outcome.status in {400, 404} if isinstance(outcome, ApiError) else outcome.prompts


@pytest.mark.parametrize(
    "body", [{"stop": 5}, {"stop": ["a", 5]}, {"stream": True, "stream_options": ["include_usage"]}]
)
def test_an_error_names_the_field_of_a_wrong_type(body):
    with pytest.raises(ApiError, match=list(body)[-1]):
        read_completion({"prompt": "x", **body}, "tiny", 1000)


ENGLISH = "A replica that has lost a prefix computes it again, which takes as long as the first time. "
CODE = "def _of(self, at: int) -> list[int]:\n    return [self._rows[at][0] for _ in range(8)]\n"
GREEK = "Ένα αντίγραφο που έχασε ένα πρόθεμα το υπολογίζει ξανά. "


@pytest.mark.parametrize(("text", "minimum", "maximum"), [(ENGLISH, 2.6, 3.2), (CODE, 1.5, 2.3), (GREEK, 1.6, 2.0)])
def test_bytes_per_token_depend_on_the_text(text, minimum, maximum):
    data = (20 * text).encode()

    assert minimum <= len(data) / count_tokens(encode(data)) <= maximum


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_the_ids_of_a_prompts_tokens_are_the_same_prompt(text):
    prompt = encode(text.encode())

    assert prompt_of_ids(token_ids(prompt)) == prompt
    assert len(token_ids(prompt)) == count_tokens(prompt)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(1, 60))
def test_the_next_turn_starts_with_the_tokens_of_the_previous_prompt_and_output(text, tokens):
    messages = [{"role": "user", "content": text}]
    prompt = encode(render_chat(messages))
    response = "".join(PseudoWords(1).tokens(prompt, tokens))
    following = [*messages, {"role": "assistant", "content": response}, {"role": "user", "content": "go on"}]

    whole = prompt + response.encode()
    assert count_tokens(whole) == count_tokens(prompt) + tokens
    assert encode(render_chat(following)).startswith(whole)
    assert block_keys(encode(render_chat(following)), 8)[: count_tokens(whole) // 8] == block_keys(whole, 8)


# --- The metrics page of a modelled engine ---


def test_histograms_are_cumulative_labels_are_escaped_and_counters_have_their_creation_time():
    engine = Engine(EngineConfig(blocks=10))
    engine.statistics.time_to_first_token.observe(0.002)
    engine.statistics.time_to_first_token.observe(9000.0)
    engine.submit(Sequence([], 20, 1, 0.0))
    engine.plan_step(0.0)

    lines = page(engine, 'say "hi"\n\\', 1795195532.5).decode().splitlines()

    labels = 'engine="0",model_name="say \\"hi\\"\\n\\\\"'
    ttft = "vllm:time_to_first_token_seconds"
    assert f'{ttft}_bucket{{{labels},le="0.001"}} 0.0' in lines
    assert f'{ttft}_bucket{{{labels},le="0.005"}} 1.0' in lines
    assert f'{ttft}_bucket{{{labels},le="+Inf"}} 2.0' in lines
    assert f"{ttft}_sum{{{labels}}} 9000.002" in lines
    assert f"vllm:prefix_cache_queries_total{{{labels}}} 20.0" in lines
    assert f"vllm:prefix_cache_queries_created{{{labels}}} 1795195532.5" in lines


def test_request_buckets_go_up_to_the_longest_request():
    assert request_token_edges(16_384) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000]
    assert request_token_edges(5) == [1, 2, 5]
