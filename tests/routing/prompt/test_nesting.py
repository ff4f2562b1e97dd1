"""Bodies with more than 64 nested levels are rejected, and no others."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.prompt.parsing import MAX_CONTAINERS, MAX_DEPTH, MAX_TEXTS, has_few_values, is_shallow, parse_body
from routing.types import BodyError

CHAT = "/v1/chat/completions"
SIBLINGS = [{"a": [1, {}]}] * MAX_DEPTH
words = st.text(alphabet="ab \\\"'\n", max_size=6)
bracketed = st.text(alphabet='ab[]{}\\"', max_size=6)


def json_with(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    leaves = st.none() | st.integers() | texts
    return st.recursive(leaves, lambda it: st.lists(it, max_size=4) | st.dictionaries(texts, it, max_size=4))


def depth(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0


@given(json_with(words), st.integers(0, 6), st.booleans())
def test_depth_is_exact_if_no_text_has_brackets(value, max_levels, spaced):
    body = json.dumps(value, indent=1 if spaced else None).encode()

    assert is_shallow(body, max_levels) == (depth(value) <= max_levels)


@given(json_with(bracketed), st.integers(0, 6))
def test_brackets_in_texts_never_add_depth(value, max_levels):
    if depth(value) <= max_levels:
        assert is_shallow(json.dumps(value).encode(), max_levels)


def nested(levels: int) -> Any:
    """Alternating nested lists and objects."""
    value: Any = "the innermost"
    for level in range(levels):
        value = [1, value, "]"] if level % 2 else {"a": "x", "b": value, "c": 2}
    return value


@pytest.mark.parametrize("member", ["messages", "tools", "metadata", "unheard_of"])
def test_a_body_may_have_64_levels_and_no_more(member):
    for siblings in ([], SIBLINGS):
        body = {"model": "m", "siblings": siblings, member: nested(MAX_DEPTH - 1)}
        parse_body(CHAT, json.dumps(body).encode())
        with pytest.raises(BodyError, match="nested in more than 64 levels"):
            parse_body(CHAT, json.dumps(body | {member: nested(MAX_DEPTH)}).encode())


@pytest.mark.parametrize("text", ["[" * 500, "]" * 500, "{[" * 300 + '"\\' * 9, "]}" * 300])
def test_texts_may_contain_brackets(text):
    messages = [{"role": "user", "content": text, "name": "\\"}, *SIBLINGS]

    parse_body(CHAT, json.dumps({"messages": messages}).encode())


def text_with(piece: str, mebibytes: int) -> bytes:
    """A chat body whose message consists of one piece of a JSON text, repeated."""
    text = piece * ((mebibytes << 20) // len(piece))
    return b'{"model":"m","messages":[{"role":"user","content":"' + text.encode() + b'"}]}'


def values_with(piece: str, mebibytes: int) -> bytes:
    """A chat body with a list of one JSON value, repeated."""
    return b'{"x":[' + (piece + ",").encode() * ((mebibytes << 20) // (len(piece) + 1)) + b'1],"model":"m"}'


NARROW = "[" * 60 + "]" * 60
HOSTILE = {
    "brackets in a text": text_with("[", 8),
    "pairs in a text": text_with("[]", 8),
    "unpaired halves in a text": text_with("[" * 64 + "]" * 63, 8),
    "escaped quotes": text_with('[\\"', 8),
    "backslashes": text_with("[\\\\", 8),
    "empty lists": values_with("[]", 8),
    "empty objects": values_with("{}", 8),
    "bracketed texts": values_with('"["', 8),
    "deep and narrow": values_with(NARROW, 8),
    "deep and narrow beside a text": values_with(NARROW, 4) + text_with("[", 4),
    "one deep value beside a text": values_with(NARROW, 0) + values_with(NARROW, 0) + text_with("[", 8),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_checking_time_is_linear_in_the_length(kind):
    """64 rounds over a text of brackets once took 1.3 s, in which the event loop served no other connection."""
    body = HOSTILE[kind]
    assert cpu_s(lambda: is_shallow(body)) < MAX_PASSES * cpu_s(lambda: body.translate(None, b"[]"))


MAX_PASSES = 150  # 5 ms each for 8 MiB on an idle machine; measured are 2 to 60


def cpu_s(work: Any) -> float:
    """Least CPU seconds of three calls."""
    durations_s = []
    for _ in range(3):
        started_s = time.thread_time()
        work()
        durations_s.append(time.thread_time() - started_s)
    return min(durations_s)


@given(json_with(bracketed), st.integers(0, 6))
def test_levels_outside_texts_are_exact_if_texts_hide_none(value, max_levels):
    body = json.dumps(value).encode()
    structure = json.dumps(without_texts(value)).encode()
    if is_shallow(body, max_levels) != is_shallow(structure, max_levels):
        assert is_shallow(body, max_levels)  # brackets in texts paired with those around them
    assert is_shallow(structure, max_levels) == (depth(value) <= max_levels)


def without_texts(value: Any) -> Any:
    """The same lists and objects, with empty texts and numbered keys."""
    if isinstance(value, dict):
        return {str(number): without_texts(it) for number, it in enumerate(value.values())}
    return [without_texts(it) for it in value] if isinstance(value, list) else 0


MANY = {
    "empty lists": b'{"x":[[]' + b",[]" * MAX_CONTAINERS + b"]}",
    "objects with a key": b'{"x":[{}' + b',{"a":0}' * MAX_CONTAINERS + b"]}",
    "messages": b'{"messages":[{}' + b",{}" * MAX_CONTAINERS + b"]}",
    "deep and narrow": b'{"x":[0' + (b"," + b"[" * 32 + b"]" * 32) * (MAX_CONTAINERS // 32) + b"]}",
    "texts": b'{"x":[""' + b',""' * MAX_TEXTS + b"]}",
    "texts that end in a backslash": b'{"x":[""' + rb',"\\"' * 2 * MAX_TEXTS + b"]}",
    "texts of brackets": b'{"x":[""' + b',"["' * MAX_TEXTS + b"]}",
    "keys": b'{"x":1' + b',"a":1' * MAX_TEXTS + b"}",
}


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.plain_python(reason="It replaces what would read them.")
def test_bodies_with_too_many_values_are_rejected_unparsed(kind, monkeypatch):
    monkeypatch.setattr("routing.prompt.parsing._decode_body", lambda *_: pytest.fail("it was read"))
    with pytest.raises(BodyError, match="more than 524,288 texts and keys, or 262,144 lists and objects"):
        parse_body(CHAT, MANY[kind])


@pytest.mark.parametrize(
    "text", ["[" * (MAX_CONTAINERS + 9), '"' * 2 * (MAX_TEXTS + 9), '["{' * MAX_CONTAINERS, "\\" * 9_999_999]
)
def test_a_text_is_one_value_whatever_its_content(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()

    assert has_few_values(body)


def test_a_million_token_ids_are_accepted():
    body = json.dumps({"prompt": [7] * 1_000_000}).encode()

    assert parse_body("/v1/completions", body)
