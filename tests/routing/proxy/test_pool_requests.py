"""What a pool sets about its requests: where they name their session, and which paths it serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import routing
from routing.paths import TokenizeBody
from routing.prompt.canonical import canonical_prompt
from routing.prompt.parsing import parse_body
from routing.proxy.resources import ResponseIds
from routing.schema import (
    DEFAULT_SESSION_KEYS,
    PER_REQUEST_HEADERS,
    ConfigError,
    DataPath,
    PoolConfig,
    RouterConfig,
    SessionAffinitySettings,
    dump_snapshot,
    load_snapshot,
)
from routing.types import TargetId
from tests.fakes.replica import answering
from tests.routing.proxy.harness import (
    Harness,
    Response,
    api_key,
    bearer,
    config,
    get,
    post,
    routed,
    with_keys,
)

CHAT, RESPONSES, MESSAGES = b"/v1/chat/completions", b"/v1/responses", b"/v1/messages"
CLAUDE_USER = "user_1f_account_5b1ad4ad-8f6c-4b3a-9f52-0f6f2f0d9d11_session_{}-1fb2-4b0f-9d37-5b7d3f2a8e10"


def with_pool(whole: RouterConfig, **fields: Any) -> RouterConfig:
    return replace(whole, pools=(replace(whole.pools[0], **fields),))


def checked(pool: PoolConfig) -> RouterConfig:
    """The configuration as a router reads it; ConfigError."""
    return load_snapshot(dump_snapshot(with_pool(RouterConfig("ab" * 16, (pool,))), 1).document).config


async def ask(harness: Harness, path: bytes, *headers: bytes, **fields: Any) -> Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}], "input": "Hello.", **fields}
    return await harness.send(post(path, json.dumps(body).encode(), headers))


def reasons(harness: Harness) -> list[str]:
    return [str(row["reason"]) for row in harness.decisions]


# --- sessions ---


# What clients send in two sessions of one user, and where a pool finds the session.
CLIENTS: list[tuple[str, bytes, list[tuple[list[bytes], dict[str, Any]]], tuple[str, ...]]] = [
    (
        "claude_code",
        MESSAGES,
        [
            ([f"X-Claude-Code-Session-Id: {n}".encode()], {"metadata": {"user_id": CLAUDE_USER.format(n * 8)}})
            for n in "12"
        ],
        ("body:metadata.user_id",),
    ),
    (
        "codex",
        RESPONSES,
        [([b"session_id: " + n, b"conversation_id: " + n], {"prompt_cache_key": n.decode()}) for n in (b"a", b"b")],
        ("header:conversation_id",),
    ),
    (
        "opencode",
        CHAT,
        [([b"X-Session-Affinity: " + n, b"User-Agent: opencode/1.0"], {"user": "me"}) for n in (b"a", b"b")],
        ("body:prompt_cache_key", "header:X-Session-Affinity"),
    ),
    ("gateway", CHAT, [([b"X-Conversation: " + n], {"user": "me"}) for n in (b"a", b"b")], ("header:X-Conversation",)),
    (
        "conversation",
        RESPONSES,
        [([], {"conversation": {"id": n}, "user": "me"}) for n in "ab"],
        ("body:conversation",),
    ),
]


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(("path", "sessions", "keys"), [row[1:] for row in CLIENTS], ids=[row[0] for row in CLIENTS])
async def test_a_session_stays_where_the_pool_says_that_clients_name_it(path, sessions, keys, large, three):
    whole = with_pool(config(three, settings=SessionAffinitySettings(slack_s=60)), session_keys=keys)
    padding = "x" * (300_000 if large else 10)
    async with routed(whole) as harness:
        chosen = [
            {(await ask(harness, path, *headers, **fields, padding=padding)).replica for _ in range(3)}
            for headers, fields in sessions
        ]
        named_otherwise = await ask(harness, path, b"X-Other: a", padding=padding)

    assert [len(replicas) for replicas in chosen] == [1, 1]
    assert reasons(harness) == ["affinity"] * 6 + ["no_key"]
    assert named_otherwise.status == 200


async def test_a_key_that_the_pool_does_not_list_is_none(three):
    whole = config(three, settings=SessionAffinitySettings(slack_s=60))
    for keys, expected in [
        (None, ["affinity", "affinity"]),
        (("header:X-Session-ID",), ["affinity", "no_key"]),
        ((), ["no_key", "no_key"]),
    ]:
        async with routed(with_pool(whole, session_keys=keys)) as harness:
            await ask(harness, CHAT, b"X-Session-ID: one")
            await ask(harness, CHAT, user="one")
            assert reasons(harness) == expected


async def test_the_first_listed_key_that_a_request_has_wins(three):
    whole = with_pool(
        config(three, settings=SessionAffinitySettings(slack_s=60)), session_keys=("body:user", "header:X-Session-ID")
    )
    async with routed(whole) as harness:
        by_user = {(await ask(harness, CHAT, b"X-Session-ID: %d" % n, user="one")).replica for n in range(6)}
        by_header = {(await ask(harness, CHAT, b"X-Session-ID: %d" % n, user="")).replica for n in range(6)}
        _, explained = await harness.admin(
            "POST",
            "/admin/explain",
            json={"path": CHAT.decode(), "body": {"messages": []}, "headers": {"X-Session-ID": "1"}},
        )

    assert len(by_user) == 1
    assert len(by_header) > 1
    assert explained["reason"] == "affinity"


async def test_the_default_order_is_that_of_the_documented_keys(three):
    whole = config(three, settings=SessionAffinitySettings(slack_s=60))
    headers = [
        b"X-Session-Affinity: e",
        b"session_id: d",
        b"session-id: c",
        b"X-Claude-Code-Session-Id: b",
        b"X-Session-ID: a",
    ]
    metadata: dict[str, Any] = {"session_id": "j", "user_id": CLAUDE_USER.format("k" * 8)}
    fields: list[tuple[str, Any]] = [
        ("metadata", {"user_id": metadata["user_id"]}),
        ("metadata", metadata),
        ("user", "i"),
    ]
    fields += [("conversation", "h"), ("session_id", "g"), ("prompt_cache_key", "f")]
    placed = []
    for keys in (None, DEFAULT_SESSION_KEYS):
        async with routed(with_pool(whole, session_keys=keys)) as harness:
            rows = [await ask(harness, RESPONSES, **dict(fields[:count])) for count in range(1, 7)]
            rows += [await ask(harness, RESPONSES, *headers[:count], **dict(fields)) for count in range(1, 6)]
            placed.append([row.replica for row in rows])
            assert set(reasons(harness)) == {"affinity"}
    assert placed[0] == placed[1]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        *(((f"header:{name}",), "differs in each request") for name in PER_REQUEST_HEADERS),
        (("header:X-Request-ID",), "differs in each request"),
        (("header:x_request_id",), "differs in each request"),
        (("header:Authorization",), "cannot name a session"),
        (("header:X-Forwarded-For",), "cannot name a session"),
        (("header:X-User-Id",), "cannot name a session"),
        (("header:a b",), "not the name of a header"),
        (("header:",), "not the name of a header"),
        (("body:messages",), "expected header:NAME or one of body:prompt_cache_key"),
        (("X-Session-ID",), "expected header:NAME"),
        (("header:X-Session-ID", "header:x-session-id"), "listed twice"),
    ],
)
def test_a_key_that_can_name_no_session_is_rejected(keys, reason):
    pool = config([]).pools[0]
    with pytest.raises(ConfigError, match=reason) as raised:
        checked(replace(pool, session_keys=keys))
    assert raised.value.path == f"$.pools[0].session_keys[{len(keys) - 1}]"
    assert checked(replace(pool, session_keys=DEFAULT_SESSION_KEYS)).pools[0].session_keys == DEFAULT_SESSION_KEYS


# --- paths ---


@pytest.mark.parametrize("path", DataPath)
def test_every_path_is_documented_and_a_prompt_is_read_where_there_is_one(path):
    readme = Path(routing.__file__).with_name("README.md").read_text("utf-8")
    table = readme.partition("## Paths of the data port")[2].partition("###")[0]
    assert f"`{path}`" in table.replace("POST ", ""), "a row of the table of paths in routing/README.md"

    if not path.endpoint.is_form:
        texts = dict.fromkeys(("prompt", "input", "query"), "Why?")
        members = texts | {"messages": [{"role": "user", "content": "Why?"}]}
        prompt = canonical_prompt(parse_body(path, json.dumps(members).encode()))
        assert bool(prompt.data) is (path.endpoint.body is not TokenizeBody)


async def test_a_path_that_the_pool_does_not_serve_is_not_found_in_the_form_of_its_api(replica):
    replica.script = answering(b'{"id": "resp_1", "object": "response"}')
    whole = with_pool(config([replica]), paths=(DataPath.RESPONSES, DataPath.COUNT_TOKENS))
    async with routed(whole) as harness:
        chat, messages = await ask(harness, CHAT), await ask(harness, MESSAGES)
        form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--b--\r\n'
        async with harness.connect() as client:
            headers = [b"Content-Type: multipart/form-data; boundary=b"]
            transcription = await client.ask(post(b"/v1/audio/transcriptions", form, headers))
        assert replica.calls == []
        assert (await ask(harness, RESPONSES)).status == 200
        assert (await ask(harness, b"/v1/messages/count_tokens")).status == 200
        _, explained = await harness.admin("POST", "/admin/explain", json={"path": CHAT.decode(), "body": {}})

    assert [chat.status, messages.status, transcription.status] == [404, 404, 404]
    assert "does not serve /v1/chat/completions" in chat.error["message"]
    assert (chat.error["code"], messages.error["type"]) == (404, "not_found_error")
    assert "does not serve" in json.dumps(explained)


async def test_stored_responses_belong_to_the_path_that_made_them(replica):
    replica.script = answering(b'{"id": "resp_1", "object": "response"}')
    for paths, status in (((DataPath.CHAT_COMPLETIONS,), 404), ((DataPath.RESPONSES,), 200), (None, 200)):
        whole = with_pool(config([replica]), paths=paths)
        response_id = ResponseIds(whole).new_id(TargetId(replica.name), None, None)
        async with routed(whole) as harness, harness.connect() as client:
            assert (await client.ask(get(b"/v1/responses/" + response_id.encode()))).status == status


async def test_a_key_without_the_model_does_not_learn_what_its_pool_serves(replica):
    whole = with_pool(with_keys([replica], api_key(models=("tiny",))), paths=(DataPath.COMPLETIONS,))
    async with routed(whole) as harness:
        assert (await ask(harness, CHAT, bearer(), model="large")).status == 403
        assert (await ask(harness, CHAT, bearer())).status == 404


def test_a_pool_without_paths_or_with_an_unknown_one_is_rejected():
    pool = config([]).pools[0]
    with pytest.raises(ConfigError, match="serves nothing"):
        checked(replace(pool, paths=()))
    with pytest.raises(ConfigError, match="Invalid enum value"):
        checked(replace(pool, paths=("/v1/models",)))
