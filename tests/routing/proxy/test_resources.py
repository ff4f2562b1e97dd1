"""Paths that name a model or a stored response, and forms: where they go, and what is rejected."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from routing.schema import Access, Alias, ApiKey, Caps, LowestCostSettings
from tests.fakes.replica import Call, FakeReplica, answering, plain_answer, streaming
from tests.routing.proxy.harness import (
    KEY,
    OTHER,
    Harness,
    api_key,
    bearer,
    config,
    get,
    post,
    routed,
)

RESPONSES = b"/v1/responses"
REQUEST = b'{"model":"tiny","input":"Hi"}'
NOT_FOUND = b'{"error":{"message":"not found","type":"invalid_request_error","param":"response_id","code":404}}'


def storing(replica: FakeReplica, *, is_streamed: bool = False) -> None:
    """A replica that stores its responses under the ``request_id`` of their requests, as vLLM does."""
    stored: set[str] = set()
    usage = {"input_tokens": 5, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 0}}

    async def script(call: Call) -> None:
        if call.line.startswith(b"POST /v1/responses HTTP"):
            body = json.loads(call.body)
            name, is_known = body["request_id"], body.get("previous_response_id", None) in {None, *stored}
            stored.add(name)
        else:
            name = call.line.split()[1].decode().split("/")[3].partition("?")[0]
            is_known = name in stored
        response = {"id": name, "object": "response", "usage": usage}
        if is_known and is_streamed:
            event = json.dumps({"type": "response.created", "response": response}).encode()
            await streaming(b"event: response.created\ndata: %b\n\n" % event)(call)
        else:
            answer = json.dumps(response).encode() if is_known else NOT_FOUND
            await call.send(plain_answer(answer, status=200 if is_known else 404))

    replica.script = script


def request_to(method: str, path: bytes, headers: Sequence[bytes] = ()) -> bytes:
    return get(path, [*headers, *([b"Content-Length: 0"] if method == "POST" else [])], method.encode())


@pytest.mark.parametrize(("method", "suffix"), [("GET", b""), ("DELETE", b""), ("POST", b"/cancel")])
async def test_a_stored_response_is_at_the_replica_that_made_it(method, suffix, three):
    for replica in three:
        storing(replica)
    async with routed(config(three)) as harness:
        for _ in range(6):
            made = await harness.send(post(RESPONSES, REQUEST))
            path = b"/v1/responses/%b" % json.loads(made.body)["id"].encode()
            found = await harness.send(request_to(method, path + suffix))
            assert (found.status, found.replica) == (200, made.replica)
            replica = next(replica for replica in three if replica.name == made.replica)
            assert replica.calls[-1].line == b"%b %b%b HTTP/1.1" % (method.encode(), path, suffix)
        decisions = harness.decisions

    assert sum(decision["retries"] for decision in decisions) == 0
    assert [decision["prompt_tokens"] for decision in decisions[:2]] == [5, None]


async def made_by(harness: Harness, headers: Sequence[bytes] = (), **members: object) -> tuple[bytes, str]:
    """The path of a new response, and its replica."""
    made = await harness.send(post(RESPONSES, json.dumps({**json.loads(REQUEST), **members}).encode(), headers))
    assert made.status == 200
    return b"/v1/responses/%b" % json.loads(made.body)["id"].encode(), made.replica


async def test_a_streamed_response_is_found_too(two):
    for replica in two:
        storing(replica, is_streamed=True)
    async with routed(config(two)) as harness:
        made = await harness.send(post(RESPONSES, REQUEST[:-1] + b',"stream":true}'))
        path = b"/v1/responses/" + made.body.partition(b'"id": "')[2].partition(b'"')[0]
        for _ in range(3):
            found = await harness.send(get(path + b"?stream=true"))
            assert (found.status, found.replica) == (200, made.replica)


async def test_the_next_turn_goes_to_the_replica_that_stores_the_previous_one(three):
    for replica in three:
        storing(replica)
    async with routed(config(three, settings=LowestCostSettings())) as harness:
        made = await harness.send(post(RESPONSES, REQUEST))
        previous = json.loads(made.body)["id"]
        for number in range(4):
            turn = {"model": "tiny", "input": f"Another {number}. " * 100, "previous_response_id": previous}
            assert (await harness.send(post(RESPONSES, json.dumps(turn).encode()))).replica == made.replica
        turn = {"model": "tiny", "input": "x" * 300_000, "previous_response_id": previous}
        assert (await harness.send(post(RESPONSES, json.dumps(turn).encode()))).replica == made.replica


@pytest.mark.parametrize("models", [(), ("tiny", "large")])
async def test_every_router_finds_a_response_also_after_a_restart(models, three):
    for replica in three:
        storing(replica)
    async with routed(config(three, models=models)) as harness:
        made = [await made_by(harness) for _ in range(3)]
    async with routed(config(three[::-1], models=models)) as harness:
        for path, replica_name in made:
            found = await harness.send(get(path))
            turn = json.dumps({"model": "tiny", "input": "On.", "previous_response_id": path[14:].decode()}).encode()
            continued = await harness.send(post(RESPONSES, turn))
            assert [found.status, continued.status] == [200, 200]
            assert found.replica == continued.replica == replica_name
    async with routed(config(three[:1], models=models)) as harness:
        assert [(await harness.send(get(path))).status for path, _ in made].count(404) == 2


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/responses/../models",
        b"/v1/responses/a%2Fb",
        b"/v1/responses/a/b",
        b"/v1/responses/" + b"a" * 129,
        b"/v1/responses/a.b",
        b"/v1/models/../responses",
        b"/v1/models/a/../b",
        b"/v1/models/a//b",
        b"/v1/models/a%00",
        b"/v1/models/%2e%2e/b",
        b"/v1/models/" + b"a" * 513,
        b"/v1/audio/speech",
        b"/v1//messages",
        b"/",
        b"*",
        b"/v1/",
        b"/v1/chat/completions//",
        b"//v1/chat/completions",
        b"/V1/chat/completions",
        b"/v1/chat/completions;a",
        b"/v1/chat/%63ompletions",
        b"/v1/chat/completions%2e",
        b"/v1/../v1/chat/completions",
        b"/v1/./chat/completions",
        b"/v1/x/%2e%2e/chat/completions",
    ],
)
async def test_odd_paths_are_not_found_and_reach_no_replica(path, replica):
    async with routed(config([replica])) as harness:
        for method in ("GET", "POST", "DELETE"):
            response = await harness.send(request_to(method, path))
            assert (response.status, response.error["type"]) == (404, "not_found_error")
    assert replica.calls == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", b"/v1/responses/resp_1", "GET, DELETE"),
        ("GET", b"/v1/responses/resp_1/cancel", "POST"),
        ("DELETE", b"/v1/models/tiny", "GET, HEAD"),
        ("GET", b"/v1/audio/translations", "POST"),
        ("GET", b"/v1/messages", "POST"),
        ("OPTIONS", b"/v1/embeddings", "POST"),
        ("POST", b"/health", "GET, HEAD"),
    ],
)
async def test_other_methods_are_rejected(method, path, allowed, replica):
    async with routed(config([replica])) as harness:
        response = await harness.send(request_to(method, path))
    assert (response.status, response.headers["allow"], replica.calls) == (405, allowed, [])


@pytest.mark.parametrize(
    ("maker", "other"),
    [
        ({"tenant": "red"}, {"tenant": "blue"}),
        ({"tenant": "red"}, {}),
        ({}, {"tenant": "red"}),
        ({}, {}),
        ({}, {"models": ("tiny",)}),
    ],
)
async def test_a_caller_reaches_no_response_of_another(maker, other, replica):
    storing(replica)
    keys = Access(keys=(api_key("red", **maker), api_key("blue", OTHER, **other)))
    routers = replace(config([replica], models=("tiny",)), access=keys)
    async with routed(routers) as harness:
        path, _ = await made_by(harness, [bearer()])
        assert (await harness.send(get(path, [bearer()]))).status == 200
    async with routed(routers) as harness:
        name = path[14:].decode()
        calls = len(replica.calls)
        turn = json.dumps({"model": "tiny", "input": "a", "previous_response_id": name}).encode()
        for refused in (
            get(path, [bearer(OTHER)]),
            request_to("DELETE", path, [bearer(OTHER)]),
            request_to("POST", path + b"/cancel", [bearer(OTHER)]),
            post(RESPONSES, turn, [bearer(OTHER)]),
            get(b"/v1/responses/resp_unknown", [bearer()]),
            get(path[:-1] + (b"0" if path[-1:] != b"0" else b"1"), [bearer()]),
        ):
            response = await harness.send(refused)
            assert (response.status, response.error["param"]) == (404, "response_id")
        assert (await harness.send(get(path))).status == 401
        assert len(replica.calls) == calls
        stolen, _ = await made_by(harness, [bearer(OTHER)], request_id=name, store=False)
        assert stolen != path
        assert [(await harness.send(get(path, [bearer(key)]))).status for key in (KEY, OTHER)] == [200, 404]


async def test_keys_of_a_tenant_share_responses_of_the_models_that_they_may_use(replica):
    storing(replica)
    keys = api_key("one", tenant="red"), api_key("two", OTHER, tenant="red", models=("large",))
    async with routed(replace(config([replica], models=("tiny", "large")), access=Access(keys=keys))) as harness:
        statuses = []
        for model in ("large", "tiny"):
            path, _ = await made_by(harness, [bearer()], model=model)
            statuses.append((await harness.send(get(path, [bearer(OTHER)]))).status)
    assert statuses == [200, 403]


@pytest.mark.parametrize(
    "member",
    [
        b'"request_id":"resp_chosen"',
        b'"\\u0072equest_id":"resp_chosen"',
        b'"request_id":"a","request_id":"resp_chosen"',
        b'"request_id":null',
        b'"input":"%b","request_id":"resp_chosen"' % (b"x" * 300_000),
    ],
)
async def test_clients_do_not_choose_the_ids_of_responses(member, replica):
    storing(replica)
    async with routed(config([replica])) as harness:
        response = await harness.send(post(RESPONSES, b'{"model":"tiny",' + member + b"}"))
        found = await harness.send(get(b"/v1/responses/" + json.loads(response.body)["id"].encode()))
    assert (response.status, found.status) == (200, 200)
    assert b"chosen" not in replica.calls[0].body


async def test_a_body_in_which_an_id_may_hide_is_rejected(replica):
    async with routed(config([replica])) as harness:
        response = await harness.send(post(RESPONSES, b'{"model":"tiny","request_id":"a","\xff":1}'))
    assert (response.status, replica.calls) == (400, [])


# --- models ---


async def test_one_model_is_shown_as_in_the_list(replica):
    named = config([replica], models=("org/tiny", "large"))
    pool = replace(named.pools[0], aliases=(Alias(name="gpt", model="large"),))
    async with routed(replace(named, pools=(pool,))) as harness:
        listed = json.loads((await harness.send(get(b"/v1/models"))).body)["data"]
        for path in (b"org/tiny", b"org%2Ftiny"):
            assert json.loads((await harness.send(get(b"/v1/models/" + path))).body) == listed[0]
        assert json.loads((await harness.send(get(b"/v1/models/gpt"))).body)["root"] == "large"
        missing = await harness.send(get(b"/v1/models/other"))

    assert (missing.status, missing.error["type"], missing.error["param"]) == (404, "NotFoundError", "model")
    assert replica.calls == []


async def test_a_pool_of_any_model_asks_a_replica(replica):
    replica.script = answering(b'{"id":"other"}')
    async with routed(config([replica])) as harness:
        assert (await harness.send(get(b"/v1/models/org/other"))).body == b'{"id":"other"}'
    assert replica.calls[0].line == b"GET /v1/models/org/other HTTP/1.1"


async def test_a_key_sees_only_its_models(replica):
    named = config([replica], models=("tiny", "large"))
    async with routed(replace(named, access=Access(keys=(api_key(models=("tiny",)),)))) as harness:
        statuses = [(await harness.send(get(b"/v1/models/" + name, [bearer()]))).status for name in (b"tiny", b"large")]
    assert statuses == [200, 404]


# --- forms ---

FORM_TYPE = b"Content-Type: multipart/form-data; boundary=xyz"


def audio(model: bytes = b"tiny", extra: bytes = b"") -> bytes:
    start = b"--xyz\r\nContent-Disposition: form-data; name="
    file = start + b'"file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\nRIFF\0\xff\r\n'
    return file + start + b'"model"\r\n\r\n' + model + b"\r\n" + extra + b"--xyz--\r\n"


@pytest.mark.parametrize("path", [b"/v1/audio/transcriptions", b"/v1/audio/translations"])
async def test_audio_goes_to_the_pool_of_its_model_unchanged(path, two):
    first, second = config(two[:1], models=("tiny",)), config(two[1:], models=("whisper",))
    pools = (first.pools[0], replace(second.pools[0], name="audio"))
    async with routed(replace(first, pools=pools)) as harness:
        sent = audio(b"whisper")
        assert (await harness.send(post(path, sent, [FORM_TYPE]))).status == 200
        unknown = await harness.send(post(path, audio(b"other"), [FORM_TYPE]))
        malformed = await harness.send(post(path, sent[:-5], [FORM_TYPE]))
        untyped = await harness.send(post(path, sent))
        (decision,) = harness.decisions

    assert (two[0].calls, [call.body for call in two[1].calls]) == ([], [sent])
    assert (decision["pool"], decision["prefix"]) == ("audio", None)
    assert [unknown.status, malformed.status, untyped.status] == [404, 400, 400]


async def test_a_form_with_an_alias_gets_the_models_own_name(replica):
    named = config([replica], models=("tiny",))
    pool = replace(named.pools[0], aliases=(Alias(name="whisper-1", model="tiny"),), caps=Caps(n=2))
    keys: tuple[ApiKey, ...] = (api_key(models=("tiny",), tenant="red"),)
    async with routed(replace(named, pools=(pool,), access=Access(keys=keys))) as harness:
        path, headers = b"/v1/audio/transcriptions", [FORM_TYPE, bearer(KEY)]
        n = b'--xyz\r\nContent-Disposition: form-data; name="n"\r\n\r\n%b\r\n'
        assert (await harness.send(post(path, audio(b"whisper-1"), headers))).status == 200
        assert (await harness.send(post(path, audio(b"tiny", n % b"2"), headers))).status == 200
        statuses = [
            (await harness.send(post(path, audio(*fields), headers))).status
            for fields in ((b"tiny", n % b"3"), (b"tiny", n % b"1e3"), (b"large",), (b"",))
        ]

    assert [call.body for call in replica.calls] == [audio(b"tiny"), audio(b"tiny", n % b"2")]
    assert statuses == [400, 400, 403, 403]
