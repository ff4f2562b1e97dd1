"""What the stand-in makes of a body: a request, or a refusal in vLLM's shape, whatever the body says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.standin.errors import ApiError
from routing.standin.requests import GenerationRequest, read_chat, read_completion

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
NAMES = st.sampled_from(["role", "content", "type", "text", "include_usage"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=5)
FIELDS = ["max_tokens", "stream", "stream_options", "n", "temperature", "stop", "cache_salt", "min_tokens", "logprobs",
          "tools", "tool_choice", "model"]  # fmt: skip
MESSAGES = st.lists(st.fixed_dictionaries({"role": VALUES}, optional={"content": VALUES}), max_size=2)
OTHERS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2)


def read(how: Callable[..., GenerationRequest], body: dict[str, Any], *more: Any) -> GenerationRequest | ApiError:
    try:
        return how(body, "tiny", 1000, *more)
    except ApiError as refusal:
        return refusal


@given(messages=MESSAGES | VALUES, others=OTHERS)
def test_any_chat_is_read_or_refused(messages: Any, others: dict[str, Any]) -> None:
    ask = read(read_chat, {"messages": messages, **others}, True)
    assert ask.status in {400, 404} if isinstance(ask, ApiError) else len(ask.prompts) == 1


@given(prompt=st.just("x") | VALUES, others=OTHERS)
def test_any_completion_is_read_or_refused(prompt: Any, others: dict[str, Any]) -> None:
    ask = read(read_completion, {"prompt": prompt, **others})
    assert ask.status in {400, 404} if isinstance(ask, ApiError) else ask.prompts


@pytest.mark.parametrize(
    "body", [{"stop": 5}, {"stop": ["a", 5]}, {"stream": True, "stream_options": ["include_usage"]}]
)
def test_a_field_of_another_type_is_named(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=list(body)[-1]):
        read_completion({"prompt": "x", **body}, "tiny", 1000)
