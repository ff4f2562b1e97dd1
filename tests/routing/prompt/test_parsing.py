"""Bodies and multipart forms are read as an engine reads them, or rejected."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.paths import BODIES, ChatBody, CompletionBody
from routing.prompt.canonical import canonical_prompt
from routing.prompt.forms import MAX_FIELDS, read_form
from routing.prompt.parsing import parse_body, session_key
from routing.types import BodyError
from tests.routing.building import CHAT

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_a_chat_body_is_parsed_and_other_fields_are_skipped():
    body = parse_body(
        CHAT, b'{"model":"llama","messages":[{"role":"user","content":"Hi"}],"stream":true,"new":{"a":[1]}}'
    )

    assert isinstance(body, ChatBody)
    assert body.model == "llama"
    assert body.stream is True
    assert body.messages is not None
    assert [(message.role, message.content) for message in body.messages] == [("user", "Hi")]


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (b"", None, "not valid JSON"),
        (b'{"model":', None, "not valid JSON"),
        (b'{"model":"llama"} trailing', None, "not valid JSON"),
        (b'{"model":"llama","temperature":NaN}', None, "not valid JSON"),
        (b'{"model":"\\ud800"}', None, "not valid JSON"),
        (b'{"model":"\xff"}', None, "not valid UTF-8"),
        (b"[]", None, "must be a JSON object"),
        (b'"text"', None, "must be a JSON object"),
        (b'{"model":5}', "model", "expected a string"),
        (b'{"model":["llama"]}', "model", "expected a string"),
        (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "nested too deeply"),
        (b'{"unknown":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", None, "nested too deeply"),
    ],
)
def test_a_body_that_cannot_be_placed_is_rejected(body, param, reason):
    with pytest.raises(BodyError, match=reason) as caught:
        parse_body(CHAT, body)

    assert caught.value.param == param


def test_no_error_quotes_the_body():
    with pytest.raises(BodyError) as caught:
        parse_body(CHAT, b'{"model":{"secret":"hunter2"}}')

    assert "hunter2" not in str(caught.value)


def test_a_path_without_a_prompt_is_rejected():
    with pytest.raises(BodyError, match="/v1/models"):
        parse_body("/v1/models", b"{}")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "a text"},
        {"messages": {"role": "user"}},
        {"messages": ["a text", 5, None, {"role": "user", "content": "Hi"}]},
        {"messages": [{"role": 5, "content": {"a": 1}}]},
        {"messages": [{"role": "user", "content": [1, None, {"type": "text"}, {"type": "text", "text": 5}]}]},
        {"messages": [{}], "tools": "none", "metadata": [], "user": 5, "cache_salt": 7},
    ],
)
def test_a_body_with_unexpected_types_is_placed(body):
    prompt = canonical_prompt(parse_body(CHAT, json.dumps(body).encode()))

    assert prompt.data
    assert prompt.salt == ""


@given(
    path=st.sampled_from(sorted(BODIES)),
    field=st.sampled_from(["messages", "prompt", "input", "tools"]),
    value=ANY_JSON,
)
def test_any_field_value_has_a_canonical_prompt(path, field, value):
    prompt = canonical_prompt(parse_body(path, json.dumps({"model": "llama", field: value}).encode()))

    assert prompt.tools_end <= prompt.system_end <= len(prompt.data)
    assert prompt.message_ends == sorted(prompt.message_ends)
    assert prompt.estimate(64) >= 0


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"prompt_cache_key": "a", "user": "b", "metadata": {"session_id": "c"}}, "a"),
        ({"prompt_cache_key": "a", "session_id": "d", "user": "b"}, "a"),
        ({"session_id": "d", "user": "b", "metadata": {"session_id": "c"}}, "d"),
        ({"session_id": 7, "prompt_cache_key": "", "user": "b"}, "b"),
        ({"user": None, "metadata": {"session_id": "c"}}, "c"),
        ({"metadata": {"user_id": "user_1f_account_2b_session_0c9bd1a0-1fb2"}}, "0c9bd1a0-1fb2"),
        ({"metadata": {"user_id": '{"device_id":"d","session_id":"0c9bd1a0-1fb2"}'}}, "0c9bd1a0-1fb2"),
        ({"metadata": {"session_id": "c", "user_id": "user_1f_account_2b_session_0c9bd1a0-1fb2"}}, "c"),
        ({"user": "b", "metadata": {"user_id": "user_1f_account_2b_session_0c9bd1a0-1fb2"}}, "b"),
        ({"metadata": {"user_id": "user_1f_account_2b"}}, None),
        ({"metadata": {"user_id": 5}}, None),
        ({"metadata": {"session_id": 5}}, None),
        ({"user": 5, "metadata": "text"}, None),
        ({}, None),
    ],
)
def test_the_session_key_is_the_first_one_in_the_body(fields, key):
    assert session_key(parse_body(CHAT, json.dumps({"messages": [], **fields}).encode())) == key


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"conversation": "conv_1", "user": "b"}, "conv_1"),
        ({"conversation": {"id": "conv_1"}, "user": "b"}, "conv_1"),
        ({"conversation": {"id": 5}, "user": "b"}, "b"),
        ({"conversation": "conv_1", "session_id": "d"}, "d"),
    ],
)
def test_a_conversation_is_a_session(fields, key):
    assert session_key(parse_body("/v1/responses", json.dumps({"input": "a", **fields}).encode())) == key


def test_each_endpoint_reads_its_own_prompt():
    body = parse_body("/v1/completions", b'{"prompt":"Once","messages":[{"role":"user","content":"Hi"}]}')

    assert isinstance(body, CompletionBody)
    assert body.prompt == "Once"


# --- Multipart forms: the model and other fields are read as an engine reads them, or the form is rejected ---


TYPE = b"multipart/form-data; boundary=xyz"


def field(name: str, value: bytes, extra: bytes = b"") -> bytes:
    return b'--xyz\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), extra, value)


def form(*fields: bytes) -> bytes:
    return b"".join(fields) + b"--xyz--\r\n"


FILE = field("file", b"RIFF\r\n\r\n--xy\0", b'; filename="a; name=model.wav"\r\nContent-Type: audio/wav')
MODEL = field("model", b"whisper")


def test_the_fields_are_read():
    data = form(FILE, MODEL, field("stream", b"True"), field("n", b"3"), field("max_completion_tokens", b"1e9"))
    read = read_form(TYPE, data)

    assert (read.body.model, read.body.stream, read.body.n, read.body.max_completion_tokens) == (
        "whisper",
        True,
        3,
        "1e9",
    )
    assert read.model_span is not None
    assert data[slice(*read.model_span)] == b"whisper"


@pytest.mark.parametrize(
    "content_type", [TYPE, b'multipart/form-data;boundary="xyz"', b"Multipart/Form-Data; Boundary=xyz"]
)
def test_a_form_without_a_model_names_none(content_type):
    for data in (form(FILE), form(FILE, field("model", b""))):
        read = read_form(content_type, data)
        assert (read.body.model, read.body.stream, read.body.n) == (None, False, None)


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (form(FILE, MODEL, field("model", b"other")), "model"),
        (form(field("model", b"whisper", b'; filename="m"')), "model"),
        (form(field("model", b"\xff")), "model"),
        (form(field("model", b"w" * 2000)), "model"),
        (form(FILE)[:-4], None),
        (b"preamble\r\n" + form(FILE), None),
        (form(FILE).replace(b"--xyz\r\n", b"--xyz \r\n"), None),
        (form(b"--xyz\r\n\r\nwhisper\r\n"), None),
        (form(field("model", b"whisper", b'; name="other"')), None),
        (form(b"--xyz\r\nContent-Disposition: form-data; name=model\r\n\r\nwhisper\r\n"), None),
        (form(b'--xyz\r\nContent-Disposition: form-data; name="a"\n\r\n\r\nwhisper\r\n'), None),
        (form(*[field("temperature", b"0")] * (MAX_FIELDS + 1)), None),
        (b'{"model":"whisper"}', None),
        (b"", None),
    ],
)
def test_a_form_that_could_be_read_in_two_ways_is_rejected(data, param):
    with pytest.raises(BodyError) as error:
        read_form(TYPE, data)
    assert error.value.param == param


@pytest.mark.parametrize(
    "content_type",
    [b"", b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=a; boundary=xyz"],
)
def test_a_body_without_a_boundary_is_rejected(content_type):
    with pytest.raises(BodyError, match="boundary"):
        read_form(content_type, form(FILE, MODEL))


@given(st.lists(st.sampled_from([b"--xyz", b"--", b"\r\n", FILE, MODEL, b"\n", b"x"]), max_size=12))
def test_any_bytes_are_read_or_rejected(pieces):
    with contextlib.suppress(BodyError):
        assert (read_form(TYPE, b"".join(pieces)).body.model or "whisper").startswith("whisper")
