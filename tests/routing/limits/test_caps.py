"""Caps of a request's parameters."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.balancing.request import check_caps, length_to_add, may_exceed_defaults, reduce_body
from routing.paths import BODIES, ChatBody, Message, ParsedBody
from routing.prompt.parsing import parse_body
from routing.schema import Caps
from routing.types import BodyError

CHAT, COMPLETION, EMBEDDING, RESPONSE = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "responses")
)
CAPS = Caps(n=4, max_tokens=100, logprobs=5, prompts=2, media_hosts=("media.example", "10.0.0.1"))

NUMBERS = {"n": 4, "best_of": 4, "logprobs": 5, "top_logprobs": 5, "prompt_logprobs": 5} | dict.fromkeys(
    ("max_tokens", "max_completion_tokens", "max_output_tokens"), 100
)


def check(path: str, fields: Any, caps: Caps = CAPS) -> None:
    check_caps(parse_body(path, json.dumps(fields).encode()), caps)


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_by_default_only_the_number_of_choices_is_capped(field):
    check(COMPLETION, {field: 128, "max_tokens": 10**9, "logprobs": 10**6, "prompt": ["a"] * 1000}, Caps())
    with pytest.raises(BodyError, match="at most 128 here") as caught:
        check(COMPLETION, {field: 129}, Caps())

    assert caught.value.param == field


def test_bodies_without_capped_parameters_need_no_check():
    capped_by_default = {"n", "best_of"}  # the parameters that ``n`` caps
    assert {name for name in Caps.__struct_fields__ if getattr(Caps(), name) is not None} == {"n"}
    for field in NUMBERS:
        body = parse_body(COMPLETION, json.dumps({field: 10**6}).encode())
        assert may_exceed_defaults(body) is (field in capped_by_default)


@pytest.mark.parametrize(("field", "cap"), NUMBERS.items())
@pytest.mark.parametrize("path", [CHAT, COMPLETION, EMBEDDING, RESPONSE])
def test_numbers_are_capped_and_other_types_rejected(path, field, cap):
    for value in (None, 0, 1, cap, float(cap), True):
        check(path, {field: value})
    for value in (cap + 1, -1, cap + 1.0, float(10**30), 10**30, str(cap), str(cap + 1), [cap + 1], {}, "", 0.5):
        with pytest.raises(BodyError, match=f"at most {cap} here") as caught:
            check(path, {field: value})
        assert caught.value.param == field


@pytest.mark.parametrize("body", [b'{"n":1,"n":5}', b'{"n":1,"\\u006e":5}', b'{"model":"m","messages":5,"n":5}'])
def test_the_last_of_several_members_counts_as_for_the_engine(body):
    with pytest.raises(BodyError):
        check_caps(parse_body(CHAT, body), CAPS)
    assert json.loads(body)["n"] == 5


@pytest.mark.parametrize(("path", "field"), [(COMPLETION, "prompt"), (EMBEDDING, "input")])
def test_prompts_are_counted_and_token_ids_are_one_prompt(path, field):
    for value in ("a", ["a", "b"], [1, 2, 3, 4], [[1, 2], [3]], [], None):
        check(path, {field: value})
    for value in (["a"] * 3, [[1]] * 3):
        with pytest.raises(BodyError, match="3 prompts in one request, at most 2 here") as caught:
            check(path, {field: value})
        assert caught.value.param == field


def test_embedded_prompts_count_too():
    for fields in (
        {"prompt_embeds": "AAAA"},
        {"prompt_embeds": ["AAAA"], "prompt": "a"},
        {"prompt_embeds": ["A", "B"]},
    ):
        check(COMPLETION, fields)
    for fields in ({"prompt_embeds": ["A"] * 3}, {"prompt_embeds": ["A", "B"], "prompt": "a"}):
        with pytest.raises(BodyError, match="3 prompts in one request, at most 2 here"):
            check(COMPLETION, fields)


def image(url: Any, kind: str = "image_url") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, kind: url}]}]}


ALLOWED = ("data:image/png;base64,AAAA", "DATA:,", "https://media.example/a.png?b=@evil.example", "http://10.0.0.1:8/a")
DENIED = (
    *(
        "https://evil.example/a",
        "https://media.example.evil/a",
        "https://media.example@evil.example/a",
        "//media.example",
    ),
    *("https://evil.example\\@media.example/", "https://media.example:80@evil.example", " https://media.example/a", 5),
    *("file:///etc/passwd", "ftp://media.example/a", "https://media.example\\.evil.example", "https://[::1]/", ""),
    *("https://media.example/\n", "http://169.254.169.254/", "https:media.example", "http:///media.example/a"),
    *("https://not-media.example/a", "https://media.example..evil.example/"),
)


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_media_must_be_on_allowed_hosts(kind):
    for url in ALLOWED:
        check(CHAT, image({"url": url, "detail": "low"}, kind))
        check(CHAT, image(url, kind))
    for url in DENIED:
        for value in (url, {"url": url}, [url], [{"url": url}]):
            with pytest.raises(BodyError, match=r"media is loaded from data: or a host of media\.example"):
                check(CHAT, image(value, kind))


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *((CHAT, "messages"), (EMBEDDING, "messages"), (EMBEDDING, "input")),
        *((RESPONSE, "input"), (RESPONSE, "previous_input_messages")),
    ],
)
def test_media_is_found_in_every_field(path, field):
    part = {"type": "input_image", "image_url": "https://evil.example/a"}
    for items in ([{"role": "user", "content": [part]}], [{"role": 5, "content": part}], [{"content": [[part]]}]):
        with pytest.raises(BodyError):
            check(path, {field: items})


def test_media_is_found_at_any_depth():
    """JSON parsers allow deeper nesting than Python's stack, so the search must not recurse."""
    content: Any = {"image_url": "https://evil.example/a"}
    for _ in range(100_000):
        content = [content]
    with pytest.raises(BodyError, match="media is loaded from"):
        check_caps(ChatBody(messages=[Message(role="user", content=content)]), CAPS)


def test_without_hosts_only_data_urls_are_allowed():
    inline = Caps(media_hosts=())
    check(CHAT, image(ALLOWED[0]), inline)
    check(CHAT, {"messages": [{"role": "user", "content": "https://evil.example/a"}]}, inline)
    with pytest.raises(BodyError, match="media is loaded from data: only"):
        check(CHAT, image(ALLOWED[2]), inline)


@pytest.mark.parametrize(
    ("path", "fields", "added"),
    [
        (CHAT, {}, ("max_tokens", 100)),
        (CHAT, {"max_tokens": None}, ("max_tokens", 100)),
        (CHAT, {"max_completion_tokens": 0}, ("max_tokens", 100)),  # vLLM treats 0 as missing, which means no limit
        (CHAT, {"max_completion_tokens": 1}, None),
        (CHAT, {"max_tokens": 1}, None),
        (RESPONSE, {}, ("max_output_tokens", 100)),
        (RESPONSE, {"max_output_tokens": 1}, None),
        (COMPLETION, {"max_tokens": None}, ("max_tokens", 16)),
        (COMPLETION, {}, ("max_tokens", 16)),
        (COMPLETION, {"max_tokens": 0}, None),
        (EMBEDDING, {}, None),
        (
            CHAT,
            {"max_output_tokens": 5},
            ("max_tokens", 100),
        ),  # from here on: names that engines ignore at this endpoint
        (CHAT, {"max_output_tokens": 5, "max_completion_tokens": 1}, None),
        (COMPLETION, {"max_completion_tokens": 5}, ("max_tokens", 16)),
        (COMPLETION, {"max_output_tokens": 5}, ("max_tokens", 16)),
        (RESPONSE, {"max_tokens": 5}, ("max_output_tokens", 100)),
        (RESPONSE, {"max_completion_tokens": 5}, ("max_output_tokens", 100)),
    ],
)
def test_a_missing_length_is_added(path, fields, added):
    assert length_to_add(parse_body(path, json.dumps(fields).encode()), 100) == added


# --- A reduced body is small, and caps give the same result for it ---


URLS = st.sampled_from(
    ["data:image/png;base64,AAAA", "https://img.example/a", "https://other.example/b", "", 5, "x" * 9000]
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": URLS})})
)
ODD_NUMBERS = st.sampled_from([None, 0, 1, 5, 10**30, -1, 0.5, 2.0, True, "3", [], [1], {}])
NAMES = ("n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "logprobs", "prompt_logprobs")
PROMPTS = st.sampled_from(["", "a", ["a", "b", "c"], [1, 2, 3], [[1], [2]], [], None, {"odd": 1}])
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.just("text") | PARTS}), max_size=3)
MEMBERS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(NAMES, ODD_NUMBERS)
    | {"messages": MESSAGES, "prompt": PROMPTS, "prompt_embeds": PROMPTS, "input": PROMPTS | MESSAGES}
    | {"data": URLS, "query": PROMPTS | MESSAGES, "documents": PROMPTS | MESSAGES, "text_2": PROMPTS},
)
SEVERAL_CAPS = (
    Caps(),
    Caps(n=2, max_tokens=100, logprobs=1, prompts=2, media_hosts=("img.example",)),
    Caps(media_hosts=()),
)


def verdict(body: ParsedBody, caps: Caps) -> Any:
    """The rejected field, or the member that is added to the body."""
    try:
        check_caps(body, caps)
    except BodyError as error:
        return error.param
    return may_exceed_defaults(body), caps.max_tokens is not None and length_to_add(body, caps.max_tokens)


@given(path=st.sampled_from(sorted(BODIES)), members=MEMBERS, caps=st.sampled_from(SEVERAL_CAPS))
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
