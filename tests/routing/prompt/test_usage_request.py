"""The router requests usage for streams whose clients did not, and changes nothing else in the body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from routing.prompt.parsing import layout_of, omits_usage, parse_body, with_usage_requested

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STREAM: dict[str, Any] = {"model": "m", "messages": [], "stream": True}


def omits(body: dict[str, Any], path: str = CHAT) -> bool:
    return omits_usage(parse_body(path, json.dumps(body).encode()))


@pytest.mark.parametrize(
    "options",
    [None, {}, {"include_usage": False}, {"include_usage": None}, {"include_obfuscation": False}],
)
def test_usage_is_requested_for_a_stream_without_it(options: Any) -> None:
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
def test_other_requests_are_unchanged(body: dict[str, Any]) -> None:
    assert not omits(body)


def test_streams_of_the_responses_api_are_unchanged() -> None:
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
def test_other_members_are_unchanged(given: bytes, sent: bytes) -> None:
    assert with_usage_requested(given) == sent
    assert json.loads(with_usage_requested(given, layout_of(given))) == json.loads(sent)


def test_long_options_in_a_layout_are_unchanged() -> None:
    body = json.dumps({"stream_options": {"x": "y" * 5000}}).encode()
    assert with_usage_requested(body, layout_of(body)) is body


def test_a_body_with_names_that_are_not_utf8_is_unchanged() -> None:
    body = b'{"\xff":1,"x":"stream_options","stream":true}'
    assert with_usage_requested(body) is body
