"""A reduced body is small, and caps give the same result for it."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.request import check_caps, length_to_add, may_exceed_defaults, reduce_body
from routing.paths import BODIES, ParsedBody
from routing.prompt.parsing import parse_body
from routing.schema import Caps
from routing.types import BodyError

URLS = st.sampled_from(
    ["data:image/png;base64,AAAA", "https://img.example/a", "https://other.example/b", "", 5, "x" * 9000]
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": URLS})})
)
NUMBERS = st.sampled_from([None, 0, 1, 5, 10**30, -1, 0.5, 2.0, True, "3", [], [1], {}])
NAMES = ("n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "logprobs", "prompt_logprobs")
PROMPTS = st.sampled_from(["", "a", ["a", "b", "c"], [1, 2, 3], [[1], [2]], [], None, {"odd": 1}])
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.just("text") | PARTS}), max_size=3)
MEMBERS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(NAMES, NUMBERS)
    | {"messages": MESSAGES, "prompt": PROMPTS, "prompt_embeds": PROMPTS, "input": PROMPTS | MESSAGES}
    | {"data": URLS, "query": PROMPTS | MESSAGES, "documents": PROMPTS | MESSAGES, "text_2": PROMPTS},
)
CAPS = (Caps(), Caps(n=2, max_tokens=100, logprobs=1, prompts=2, media_hosts=("img.example",)), Caps(media_hosts=()))


def verdict(body: ParsedBody, caps: Caps) -> Any:
    """The rejected field, or the member that is added to the body."""
    try:
        check_caps(body, caps)
    except BodyError as error:
        return error.param
    return may_exceed_defaults(body), caps.max_tokens is not None and length_to_add(body, caps.max_tokens)


@given(path=st.sampled_from(sorted(BODIES)), members=MEMBERS, caps=st.sampled_from(CAPS))
def test_caps_give_the_same_result_for_a_reduced_body(path, members, caps):
    body = parse_body(path, json.dumps(members).encode())

    assert verdict(pickle.loads(pickle.dumps(reduce_body(body))), caps) == verdict(body, caps)


@pytest.mark.parametrize(
    ("path", "members"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"content": "a" * 10**6}], "metadata": {"a": "b" * 10**6}},
        ),
        ("/v1/completions", {"prompt": list(range(10**5)), "n": [1] * 10**5, "user": "u" * 10**6}),
        ("/v1/chat/completions", {"messages": [{"content": [{"image_url": {"url": "data:" + "A" * 10**6}}]}] * 3}),
    ],
)
def test_a_reduced_body_is_small(path, members):
    assert len(pickle.dumps(reduce_body(parse_body(path, json.dumps(members).encode())))) < 1000
