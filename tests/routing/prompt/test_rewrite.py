"""A member set in any JSON object is found by a parser, and everything else is unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.prompt.parsing import (
    REPLACEABLE,
    layout_of,
    omits_usage,
    parse_body,
    with_member,
    with_members,
    with_usage_requested,
)
from routing.types import BodyError

SALT = "cache_salt"
blanks = st.text(" \t\r\n", max_size=3)
texts = st.text(max_size=8) | st.sampled_from(["{", "}", '"}', ",", "\\", "\\u0063ache_salt", SALT, f'"{SALT}":', "é"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
names = texts | st.sampled_from([SALT, "model", "max_tokens"])


def spelled(name: str, *, escaped: bool) -> str:
    return '"' + "".join(f"\\u{ord(char):04x}" for char in name) + '"' if escaped else json.dumps(name)


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """JSON objects in all spellings: blanks, escaped names, repeated names."""
    members = []
    for name in draw(st.lists(names, max_size=5)):
        is_short = all(ord(char) < 0x10000 for char in name)
        written = spelled(name, escaped=is_short and draw(st.booleans()))
        value = json.dumps(draw(values), ensure_ascii=draw(st.booleans()))
        members.append(draw(blanks) + written + draw(blanks) + ":" + draw(blanks) + value + draw(blanks))
    text = draw(blanks) + "{" + (",".join(members) or draw(blanks)) + "}" + draw(blanks)
    return text.encode("utf-8", "surrogatepass")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert [name for name, _ in pairs].count(SALT) <= 1
    return dict(pairs)


@given(objects(), st.text("0123456789abcdef", min_size=1, max_size=32))
def test_a_parser_finds_the_member_and_all_others(body, value):
    try:
        parse_body("/v1/completions", body)
    except Exception:  # noqa: BLE001 - such a body is refused before anything is put in
        return
    assert json.loads(with_member(body, SALT, value)) == json.loads(body) | {SALT: value}


@given(objects())
def test_a_missing_member_is_appended_before_the_last_brace(body):
    try:
        parse_body("/v1/completions", body)
    except Exception:  # noqa: BLE001 - as above
        return
    if SALT not in json.loads(body):
        rest = body.rstrip()[:-1].rstrip()
        assert with_member(body, SALT, "s")[: len(rest)] == rest


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"cache_salt":"s"}'),
        (b" { \n } ", b' {"cache_salt":"s"}'),
        (b'{"a":{}}', b'{"a":{},"cache_salt":"s"}'),
        (b'{"a":"{"}', b'{"a":"{","cache_salt":"s"}'),
        (b'{"a": 1.50 , "a":2}\n', b'{"a": 1.50 , "a":2,"cache_salt":"s"}'),
        (b'{"cache_salt":"x","a": [ 1 ],"cache_salt":null}', b'{"cache_salt":"s","a":[ 1 ]}'),
        (b'{"cach\\u0065_salt":"x"}', b'{"cache_salt":"s"}'),
        (b'{"a":{"cache_salt":"x"}}', b'{"a":{"cache_salt":"x"},"cache_salt":"s"}'),
    ],
)
def test_the_member_occurs_once(body, expected):
    found = with_member(body, SALT, "s")

    assert found == expected
    json.loads(found, object_pairs_hook=unique)


def test_names_that_are_not_utf8_are_rejected():
    """An unknown name is skipped, until all names have to be decoded."""
    body = b'{"\xff":1,"cache_salt":"x"}'
    parse_body("/v1/completions", body)
    with pytest.raises(BodyError, match="not valid UTF-8"):
        with_member(body, SALT, "s")


def test_numbers_are_set_as_numbers():
    assert with_member(b'{"max_tokens":null}', "max_tokens", 16) == b'{"max_tokens":16}'


@given(objects(), st.dictionaries(st.sampled_from(sorted(REPLACEABLE)), st.integers() | st.text(max_size=8)))
def test_members_set_by_a_layout_are_found_and_all_others_unchanged(body, new):
    try:
        parse_body("/v1/completions", body)
    except Exception:  # noqa: BLE001 - as above
        return
    pairs = json.loads(body, object_pairs_hook=list)
    if len({name for name, _ in pairs}) < len(pairs):
        with pytest.raises(BodyError, match="the same name"):
            layout_of(body)
        return
    changed, layout = with_members(body, new, layout_of(body))

    assert json.loads(changed) == json.loads(body) | new
    assert layout.spans == layout_of(changed).spans
    assert layout.end == layout_of(changed).end


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b" { } ", b' {"model":"new","max_tokens":7 } '),
        (b'{"a":1 }\n', b'{"a":1,"model":"new","max_tokens":7 }\n'),
        (b'{ "max_tokens" : null , "a":"\\"" ,"model":"m"}', b'{ "max_tokens" : 7 , "a":"\\"" ,"model":"new"}'),
        (b'{"\\u006dodel":{"model":"m"},"a":[ ]}', b'{"\\u006dodel":"new","a":[ ],"max_tokens":7}'),
    ],
)
def test_a_layout_keeps_all_other_bytes(body, expected):
    assert with_members(body, {"model": "new", "max_tokens": 7}, layout_of(body))[0] == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"b":2,"a":{"x":3,"b":2}}',
        b'{"a":1,"a":12,"b":1}',
        b'{"a":1,"a":1,"b":1}',
        b'{"model":"m","mod\\u0065l":"m"}',
    ],
)
def test_a_repeated_name_has_no_layout(body):
    with pytest.raises(BodyError, match="the same name"):
        layout_of(body)


# --- The router requests usage for streams whose clients did not, and changes nothing else in the body ---


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STREAM: dict[str, Any] = {"model": "m", "messages": [], "stream": True}


def omits(body: dict[str, Any], path: str = CHAT) -> bool:
    return omits_usage(parse_body(path, json.dumps(body).encode()))


@pytest.mark.parametrize(
    "options",
    [None, {}, {"include_usage": False}, {"include_usage": None}, {"include_obfuscation": False}],
)
def test_usage_is_requested_for_a_stream_without_it(options):
    assert omits({**STREAM, "stream_options": options})
    assert omits(STREAM)
    assert omits({"prompt": "x", "stream": True}, COMPLETIONS)


@pytest.mark.parametrize(
    "body",
    [
        {**STREAM, "stream_options": {"include_usage": True}},
        {**STREAM, "stream_options": {"include_usage": "yes"}},  # for the engine to reject
        {**STREAM, "stream_options": {"continuous_usage_stats": True}},
        {**STREAM, "stream_options": ["include_usage"]},
        {**STREAM, "stream": False},
        {**STREAM, "stream": 1},
        {"model": "m", "messages": []},
    ],
)
def test_other_requests_are_unchanged(body):
    assert not omits(body)


def test_streams_of_the_responses_api_are_unchanged():
    assert not omits({"input": "x", "stream": True}, "/v1/responses")


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (b'{"a":1e0,"stream":true}', b'{"a":1e0,"stream":true,"stream_options":{"include_usage":true}}'),
        (b'{"stream":true } \n', b'{"stream":true,"stream_options":{"include_usage":true}}'),
        (b'{"stream_options":null,"a":1.50}', b'{"stream_options":{"include_usage":true},"a":1.50}'),
        (
            b'{"stream_options":{"x":1.50,"y":[ ]},"a":"\xc3\xa9"}',
            b'{"stream_options":{"x":1.50,"y":[ ],"include_usage":true},"a":"\xc3\xa9"}',
        ),
        (b'{"stream_options":{"include_usage":false,"z":2}}', b'{"stream_options":{"include_usage":true,"z":2}}'),
        (b'{"stream_options":{}}', b'{"stream_options":{"include_usage":true}}'),
        (
            b'{"stream_\\u006fptions":{"include_\\u0075sage":false}}',
            b'{"stream_options":{"include_usage":true}}',
        ),
    ],
)
def test_other_members_are_unchanged(given, sent):
    assert with_usage_requested(given) == sent
    assert json.loads(with_usage_requested(given, layout_of(given))) == json.loads(sent)


def test_long_options_in_a_layout_are_unchanged():
    body = json.dumps({"stream_options": {"x": "y" * 5000}}).encode()
    assert with_usage_requested(body, layout_of(body)) is body


def test_a_body_with_names_that_are_not_utf8_is_unchanged():
    body = b'{"\xff":1,"x":"stream_options","stream":true}'
    assert with_usage_requested(body) is body
