"""Names of entries: any change that may change a response changes the name, and no two callers share one."""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.http.request import Request, RequestHead
from routing.response_cache.keys import IRRELEVANT, MAX_SECONDS, CacheKeys, Scope, read_options
from routing.schema import ResponseCache
from tests.routing.building import SECRET

KEYS = CacheKeys(SECRET)
SCOPE = Scope("chat", "faq", "tiny", "", "key-1", b"")
BODY = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 12,
    "seed": 2**70,
    "messages": [
        {"role": "system", "content": "Answer briefly."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "a"}}],
        },
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["a"]}}}],
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 1.5, None, True]}}},
    "logit_bias": {"17": -100},
    "stop": ["x", ""],
}
LEAVES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    LEAVES | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def name_of(body: Any, scope: Scope = SCOPE, path: bytes = b"/v1/chat/completions") -> str | None:
    """The name of a request's entry; None if it may not be answered from the cache."""
    text = json.dumps(body).encode()
    key = KEYS.key_of(Request(RequestHead(b"POST", path, http11=True), text, "1"), scope, ResponseCache())
    return None if key is None else key.name


def places_in(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value inside another one."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for at, inner in members for place in ((*before, at), *places_in(inner, (*before, at)))]


PLACES = places_in(BODY)


@given(st.sampled_from(PLACES), VALUES)
def test_another_value_anywhere_in_the_body_is_another_entry(place, value):
    changed = copy.deepcopy(BODY)
    inner: Any = changed
    for at in place[:-1]:
        inner = inner[at]
    before, inner[place[-1]] = inner[place[-1]], value

    if json.dumps(before) == json.dumps(value):
        assert name_of(changed) == name_of(BODY)
    else:
        assert name_of(changed) != name_of(BODY)


@given(st.text(max_size=20), VALUES)
def test_an_additional_member_is_another_entry_unless_the_model_does_not_see_it(name, value):
    found = name_of({**BODY, name: value})

    if name in IRRELEVANT:
        assert found in {name_of(BODY), None}
    elif name not in BODY:
        assert found != name_of(BODY)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_missing_member_is_another_entry(place):
    changed = copy.deepcopy(BODY)
    inner: Any = changed
    for at in place[:-1]:
        inner = inner[at]
    del inner[place[-1]]

    assert name_of(changed) != name_of(BODY)


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same value with the members of all objects in another order."""
    if isinstance(value, list):
        return [shuffled(inner, rng) for inner in value]
    if not isinstance(value, dict):
        return value
    names = rng.sample(list(value), len(value))
    return {name: shuffled(value[name], rng) for name in names}


@given(st.integers(0, 2**32))
def test_the_order_of_members_does_not_matter(seed):
    assert name_of(shuffled(BODY, random.Random(seed))) == name_of(BODY) is not None


@pytest.mark.parametrize(("one", "other"), [("1e400", "null"), ("1e400", "1e500"), ('"\\ud800"', '"\\ud801"')])
def test_values_that_json_cannot_carry_share_no_entry(one, other):
    head = RequestHead(b"POST", b"/v1/chat/completions", http11=True)
    text = json.dumps(BODY | {"top_p": "VALUE"})
    keys = [
        KEYS.key_of(Request(head, text.replace('"VALUE"', value).encode(), "1"), SCOPE, ResponseCache())
        for value in (one, other)
    ]
    assert keys[0] is None or keys[1] is None or keys[0].name != keys[1].name


def test_no_two_callers_pools_groups_or_models_share_an_entry():
    texts = ("", "a", "b", "ab")
    scopes = [
        Scope(pool, group, model, tenant, key, credentials)
        for pool, group, model in itertools.product(texts[1:], texts, texts[1:])
        for tenant, key, credentials in itertools.product(texts, texts, (b"", b"a", b"b"))
    ]
    assert len({name_of(BODY, scope) for scope in scopes}) == len(scopes)


@given(st.tuples(*[st.text("a\0", max_size=3)] * 5), st.tuples(*[st.text("a\0", max_size=3)] * 5))
def test_no_separator_in_a_name_makes_two_scopes_one(one, other):
    names = [name_of(BODY, Scope(*texts, b"")) for texts in (one, other)]

    assert (names[0] == names[1]) is (one == other)


def test_paths_and_versions_have_entries_of_their_own():
    completion = {"model": "tiny", "temperature": 0, "messages": BODY["messages"], "prompt": "x"}
    names = {name_of(completion, path=path) for path in (b"/v1/chat/completions", b"/v1/completions", b"/v1/messages")}

    assert None not in names
    assert len(names) == 3


@pytest.mark.parametrize(
    ("header", "seconds"), [("max-age=1, max-age=60", 1), ("max-age=x", 0), ("max-age=" + "9" * 20, MAX_SECONDS)]
)
def test_a_repeated_or_malformed_max_age_is_the_stricter_one(header, seconds):
    options = read_options(None, header, 100)
    assert options is not None
    assert options.max_age_s == seconds
