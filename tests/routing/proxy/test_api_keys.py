"""API keys: authentication, scope, rates, and configuration checks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import msgspec
import pytest

from routing.http import auth as access_module
from routing.schema import ApiKey, ConcurrencyConfig, ConfigError, Limits, RouterConfig, dump_snapshot
from tests.fakes.replica import Call, answering, hanging
from tests.routing.proxy.harness import (
    BODY,
    CHAT,
    KEY,
    OTHER,
    Harness,
    Response,
    api_key,
    bearer,
    chat_body,
    config,
    get,
    post,
    routed,
    with_keys,
)


async def ask(harness: Harness, body: bytes = BODY, headers: Sequence[bytes] = (bearer(),)) -> Response:
    return await harness.chat(body, headers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of rates, set by the test."""
    now = [1000.0]
    monkeypatch.setattr(access_module, "monotonic", lambda: now[0])
    return now


# --- keys ---
WITHOUT_KEY: list[tuple[bytes, ...]] = [
    (),
    (bearer(OTHER),),
    (b"Authorization: " + KEY.encode(),),
    (b"Authorization: Basic " + KEY.encode(),),
    (bearer(), bearer()),
    (bearer(), bearer(OTHER)),
    (bearer(KEY + " " + KEY),),
    (bearer(KEY.upper()),),
    (bearer(""),),
    (b"X-Api-Key: " + OTHER.encode(),),
    (bearer(OTHER), b"X-Api-Key: " + KEY.encode()),
    (b"Api-Key: " + KEY.encode(),),
    (bearer(hashlib.sha256(KEY.encode()).hexdigest()),),
]


@pytest.mark.parametrize("path", [CHAT, b"/v1/models"])
async def test_requests_without_a_valid_key_get_401(path, replica):
    async with routed(with_keys([replica], api_key())) as harness, harness.connect() as client:
        for headers in sorted(2 * WITHOUT_KEY):  # the second head is cached
            response = await client.ask(get(path, headers) if path == b"/v1/models" else post(path, BODY, headers))
            assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
            assert response.error["type"] == "authentication_error"
            assert response.error["code"] == 401
            assert KEY not in response.error["message"]
    assert replica.calls == []


@pytest.mark.parametrize("headers", [(), (bearer(OTHER),), (b"Expect: 100-continue",)])
@pytest.mark.parametrize("framing", [b"Content-Length: 99999", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("path", [CHAT, b"/health"])
async def test_a_body_without_a_valid_key_is_not_received(path, framing, headers, replica):
    """Otherwise clients without a key could use up the memory for incomplete bodies."""
    async with routed(with_keys([replica], api_key())) as harness, harness.connect() as client:
        assert (await client.ask(post(CHAT, BODY, [bearer()]))).status == 200
        lines = b"\r\n".join([b"POST %b HTTP/1.1" % path, b"Host: router", framing, *headers])
        response = await client.ask(lines + b"\r\n\r\n")
        assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
        assert await client.read_all() == b""
    assert len(replica.calls) == 1


async def test_a_body_with_a_valid_key_is_received(replica):
    async with routed(with_keys([replica], api_key())) as harness, harness.connect() as client:
        for _ in range(2):
            request = post(CHAT, BODY, [bearer(), b"Expect: 100-continue"])
            await client.send(request[: -len(BODY)])
            assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            assert (await client.ask(BODY)).status == 200


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
async def test_a_valid_key_is_accepted_and_not_forwarded(scheme, replica):
    spellings = [b"%b: %b" % (name, KEY.encode()) for name in (b"api-key", b"X-Api-Key", b"x_api_key", b"api_key")]
    headers = [b"X-First: 1", b"authorization: %b %b" % (scheme, KEY.encode()), *spellings, b"X-Last: 2"]
    snapshot = with_keys([replica], api_key(), api_key("second", OTHER))
    async with routed(snapshot) as harness, harness.connect() as client:
        for _ in range(2):
            assert (await client.ask(post(CHAT, BODY, headers))).status == 200
    for call in replica.calls:
        assert KEY.encode() not in call.head
        assert (call.header(b"x-first"), call.header(b"x-last")) == ([b"1"], [b"2"])
        assert call.body == BODY


@pytest.mark.parametrize("is_guarded", [True, False])
async def test_a_replica_gets_its_own_key_instead_of_the_clients(is_guarded, replica):
    snapshot = with_keys([replica], api_key()) if is_guarded else config([replica])
    snapshot = with_replica_key(snapshot, "replica-secret")
    async with routed(snapshot) as harness:
        assert (await ask(harness)).status == 200
        assert (await harness.push(with_replica_key(snapshot, "another-secret"), revision=2))[0] == 200
        assert (await ask(harness)).status == 200
    keys = [call.header(b"authorization") for call in replica.calls]
    assert keys == [[b"Bearer replica-secret"], [b"Bearer another-secret"]]


def with_replica_key(snapshot: RouterConfig, secret: str) -> RouterConfig:
    pool = snapshot.pools[0]
    replicas = tuple(msgspec.structs.replace(item, api_key=secret) for item in pool.replicas)
    return msgspec.structs.replace(snapshot, pools=(msgspec.structs.replace(pool, replicas=replicas),))


async def test_each_configuration_decides_which_keys_are_valid(replica):
    async with routed(with_keys([replica], api_key())) as harness, harness.connect() as client:
        statuses = []
        for keys in ((api_key(),), (api_key("second", OTHER),), (api_key(), api_key("second", OTHER)), ()):
            await harness.push(with_keys([replica], *keys), revision=2 + len(statuses))
            statuses.append((await client.ask(post(CHAT, BODY, [bearer()]))).status)
    assert statuses == [200, 401, 200, 401]


async def test_health_requires_no_key(replica):
    async with routed(with_keys([replica])) as harness, harness.connect() as client:
        assert (await client.ask(get(b"/health"))).status == 200


# --- scope ---
@pytest.mark.parametrize(("model", "status"), [("tiny", 200), ("large", 403), ("nobody-has-it", 403), (None, 403)])
async def test_a_key_is_valid_for_its_models(model, status, replica):
    async with routed(with_keys([replica], api_key(models=("tiny",)))) as harness:
        response = await ask(harness, chat_body(model) if model else b"{}")
        assert response.status == status
        if status == 403:
            assert response.error["param"] == "model"
        await harness.at_rest()
    assert len(replica.calls) == (status == 200)


@pytest.mark.parametrize(
    ("groups", "named", "expected"),
    [
        (None, None, ""),
        (None, "coding", "coding"),
        (("coding", "chatting"), None, "coding"),
        (("chatting", "coding"), None, "chatting"),
        (("coding", "chatting"), "chatting", "chatting"),
        (("coding",), "chatting", None),
        (("coding",), "unheard-of", None),
    ],
)
async def test_a_key_selects_and_limits_the_task_group(groups, named, expected, replica):
    headers = [bearer()] + ([b"X-Task-Group: " + named.encode()] if named else [])
    async with routed(with_keys([replica], api_key(groups=groups))) as harness:
        response = await ask(harness, chat_body(), headers)
        await harness.at_rest()
        placed = [item["group"] for item in harness.decisions]
    assert (response.status, placed) == ((403, []) if expected is None else (200, [expected]))


# --- rates ---
async def test_requests_over_the_rate_get_429_with_rate_limit_headers(clock, replica):
    async with routed(with_keys([replica], api_key(requests_per_s=0.5, burst=2), api_key("second", OTHER))) as harness:
        statuses = [(await ask(harness)).status for _ in range(3)]
        rejected = await ask(harness)
        other_response = await ask(harness, headers=[bearer(OTHER)])
        clock[0] += 2.0
        later = [(await ask(harness)).status for _ in range(2)]
    assert (statuses, other_response.status, later) == ([200, 200, 429], 200, [200, 429])
    assert rejected.headers["retry-after"] == "2"
    assert rejected.headers["x-ratelimit-limit-requests"] == "2"
    assert rejected.headers["x-ratelimit-remaining-requests"] == "0"
    assert rejected.headers["x-ratelimit-reset-requests"] == "4.000s"
    assert rejected.error["type"] == "rate_limit_error"


async def test_requests_that_a_busy_router_refuses_are_not_counted(clock, replica):
    replica.script = hanging
    keys = api_key(requests_per_s=0.5, burst=2), api_key("second", OTHER)
    queue = ConcurrencyConfig(max_running=1, max_waiting=0)
    at_limit = with_keys([replica], *keys, limits=Limits(max_in_flight=1))
    async with routed(with_keys([replica], *keys, concurrency=queue)) as harness:
        running = asyncio.create_task(ask(harness, headers=[bearer(OTHER)]))
        await replica.wait_calls(1)
        queue_is_full = [await ask(harness) for _ in range(4)]
        await harness.push(at_limit, revision=2)
        router_is_full = [await ask(harness) for _ in range(4)]
        running.cancel()
        await harness.at_rest()
        replica.script = answering()
        served = [(await ask(harness)).status for _ in range(3)]
    assert {response.error["message"] for response in queue_is_full} == {"too many requests are waiting already"}
    assert [response.status for response in router_is_full] == [503] * 4
    assert served == [200, 200, 429]


async def test_tokens_are_counted_as_reported(clock, replica):
    replica.script = answering(b'{"usage":{"prompt_tokens":50,"completion_tokens":100}}')
    async with routed(with_keys([replica], api_key(tokens_per_min=120))) as harness:
        statuses = [(await ask(harness)).status for _ in range(2)]
        rejected = await ask(harness)
        clock[0] += 15.4  # 30 tokens overdrawn, 2 a second
        early = (await ask(harness)).status
        clock[0] += 0.2
        later = (await ask(harness)).status
    assert (statuses, rejected.status, early, later) == ([200, 429], 429, 429, 200)
    assert rejected.headers["retry-after"] == "16"
    assert rejected.headers["x-ratelimit-limit-tokens"] == "120"


async def test_a_prompt_is_counted_when_it_is_sent(clock, replica):
    replica.script = answering(b'{"error":{}}', status=400)
    async with routed(with_keys([replica], api_key(tokens_per_min=100))) as harness:
        statuses = [(await ask(harness, chat_body(text="x" * 4000))).status for _ in range(2)]
    assert statuses == [400, 429]


async def test_running_requests_are_counted_in_the_new_configuration(clock, replica):
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await answering(b'{"usage":{"prompt_tokens":500,"completion_tokens":500}}')(call)

    replica.script = script
    async with routed(with_keys([replica], api_key(tokens_per_min=600))) as harness:
        first = asyncio.create_task(ask(harness))
        await replica.wait_calls(1)
        await harness.push(with_keys([replica], api_key(tokens_per_min=660)), 2)
        go.set()
        assert (await first).status == 200
        assert (await ask(harness)).status == 429


# --- in a snapshot ---
@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ((api_key(), api_key("team", OTHER)), "$.access.keys[1].name"),
        ((api_key(), api_key("second")), "$.access.keys[1].digest"),
        ((api_key(models=()),), "$.access.keys[0].models"),
        ((api_key(models=("tiny", "unheard-of")),), "$.access.keys[0].models[1]"),
        ((api_key(groups=("unheard-of",)),), "$.access.keys[0].groups[0]"),
        ((api_key(burst=5),), "$.access.keys[0].burst"),
        ((ApiKey(name="plain", digest=KEY),), "$.access.keys[0].digest"),
    ],
)
def test_invalid_keys_are_rejected_with_their_path(keys, path):
    with pytest.raises(ConfigError) as caught:
        dump_snapshot(with_keys([], *keys), 1)
    assert caught.value.path == path
    assert KEY not in caught.value.reason


async def test_a_key_expires_without_a_push(replica, monkeypatch):
    now = [1_900_000_000.0]
    monkeypatch.setattr(access_module, "time", lambda: now[0])
    async with routed(with_keys([replica], api_key(expires_at=1_900_000_060))) as harness:
        assert (await ask(harness)).status == 200
        now[0] += 60
        late = await ask(harness)
        assert (late.status, late.headers["www-authenticate"]) == (401, "Bearer")
        assert "has expired" in late.error["message"]
