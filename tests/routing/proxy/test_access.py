"""Who is let in, what their keys allow, and what becomes of the keys."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence

import msgspec
import pytest

from routing.http import auth as access_module
from routing.http.auth import AccessControl
from routing.http.request import RequestHead
from routing.http.response import RejectedRequestError
from routing.schema import (
    ApiKey,
    ConfigError,
    LeastLoadSettings,
    PolicyConfig,
    ReplicaConfig,
    RouterConfig,
    dump_snapshot,
    load_snapshot,
    without_secrets,
)
from tests.fakes.replica import Call, FakeReplica, answering
from tests.routing.proxy.api_keys import KEY, OTHER, api_key, asking, bearer, guarded
from tests.routing.proxy.harness import BODY, CHAT, Answer, Harness, config, get, post, routed
from tests.routing.proxy.records import told

COMPLETIONS = b"/v1/completions"


async def ask(harness: Harness, body: bytes = BODY, headers: Sequence[bytes] = (bearer(),)) -> Answer:
    return await harness.chat(body, headers)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass when a test says so, for what counts rates."""
    now = [1000.0]
    monkeypatch.setattr(access_module, "monotonic", lambda: now[0])
    return now


# --- keys ---


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (bearer(OTHER),),
        (b"Authorization: " + KEY.encode(),),
        (b"Authorization: Basic " + KEY.encode(),),
        (bearer(), bearer()),
        (bearer(), bearer(OTHER)),
        (bearer(KEY + " " + KEY),),
        (bearer(KEY.upper()),),
        (bearer(""),),
        (b"X-Api-Key: " + KEY.encode(),),
        (b"Api-Key: " + KEY.encode(),),
        (bearer(hashlib.sha256(KEY.encode()).hexdigest()),),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, b"/v1/models"])
async def test_without_a_key_that_is_known_nothing_is_answered(
    path: bytes, headers: Sequence[bytes], replica: FakeReplica
) -> None:
    async with routed(guarded([replica], api_key())) as harness, harness.connect() as client:
        for _ in range(2):  # the second time the head is known
            await client.send(get(path, headers) if path == b"/v1/models" else post(path, BODY, headers))
            answer = await client.answer()
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.error["type"] == "authentication_error"
            assert answer.error["code"] == 401
            assert KEY not in answer.error["message"]
    assert replica.calls == []


@pytest.mark.parametrize("headers", [(), (bearer(OTHER),), (b"Expect: 100-continue",)])
@pytest.mark.parametrize("framing", [b"Content-Length: 99999", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize("path", [CHAT, b"/health"])
async def test_a_body_of_nobody_known_is_not_waited_for(
    path: bytes, framing: bytes, headers: Sequence[bytes], replica: FakeReplica
) -> None:
    """Else whoever has no key could fill what there is for bodies that are still coming."""
    async with routed(guarded([replica], api_key())) as harness, harness.connect() as client:
        await client.send(post(CHAT, BODY, [bearer()]))
        assert (await client.answer()).status == 200
        lines = b"\r\n".join([b"POST %b HTTP/1.1" % path, b"Host: router", framing, *headers])
        await client.send(lines + b"\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert await client.read_all() == b""
    assert len(replica.calls) == 1


async def test_a_body_of_somebody_known_is_waited_for(replica: FakeReplica) -> None:
    async with routed(guarded([replica], api_key())) as harness, harness.connect() as client:
        for _ in range(2):
            request = post(CHAT, BODY, [bearer(), b"Expect: 100-continue"])
            await client.send(request[: -len(BODY)])
            assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(BODY)
            assert (await client.answer()).status == 200


async def test_an_access_list_without_keys_lets_nobody_in(replica: FakeReplica) -> None:
    async with routed(guarded([replica])) as harness:
        assert (await ask(harness)).status == 401


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
async def test_a_known_key_is_let_in_and_stays_here(scheme: bytes, replica: FakeReplica) -> None:
    spellings = [b"%b: %b" % (name, KEY.encode()) for name in (b"api-key", b"X-Api-Key", b"x_api_key", b"api_key")]
    headers = [b"X-First: 1", b"authorization: %b %b" % (scheme, KEY.encode()), *spellings, b"X-Last: 2"]
    snapshot = guarded([replica], api_key(), api_key("second", OTHER))
    async with routed(snapshot) as harness, harness.connect() as client:
        for _ in range(2):
            await client.send(post(CHAT, BODY, headers))
            assert (await client.answer()).status == 200
    for call in replica.calls:
        assert KEY.encode() not in call.head
        assert (call.header(b"x-first"), call.header(b"x-last")) == ([b"1"], [b"2"])
        assert call.body == BODY


async def test_without_an_access_list_a_key_goes_on_as_it_came(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        assert (await ask(harness)).status == 200
    assert replica.calls[0].header(b"authorization") == [b"Bearer " + KEY.encode()]


@pytest.mark.parametrize("is_guarded", [True, False])
async def test_a_replica_gets_its_own_key_in_place_of_the_clients(is_guarded: bool, replica: FakeReplica) -> None:
    snapshot = guarded([replica], api_key()) if is_guarded else config([replica])
    snapshot = with_replica_key(snapshot, "replica-secret")
    async with routed(snapshot) as harness:
        assert (await ask(harness)).status == 200
        assert (await harness.push(with_replica_key(snapshot, "another-secret"), revision=2))[0] == 200
        assert (await ask(harness)).status == 200
    keys = [call.header(b"authorization") for call in replica.calls]
    assert keys == [[b"Bearer replica-secret"], [b"Bearer another-secret"]]


def with_replica_key(snapshot: RouterConfig, secret: str) -> RouterConfig:
    pool = snapshot.pools[0]
    replicas = tuple(msgspec.structs.replace(one, api_key=secret) for one in pool.replicas)
    return msgspec.structs.replace(snapshot, pools=(msgspec.structs.replace(pool, replicas=replicas),))


async def test_a_key_counts_from_one_configuration_to_the_next(replica: FakeReplica) -> None:
    async with routed(guarded([replica], api_key())) as harness, harness.connect() as client:
        statuses = []
        for keys in ((api_key(),), (api_key("second", OTHER),), (api_key(), api_key("second", OTHER)), ()):
            await harness.push(guarded([replica], *keys), revision=2 + len(statuses))
            await client.send(post(CHAT, BODY, [bearer()]))
            statuses.append((await client.answer()).status)
    assert statuses == [200, 401, 200, 401]


def test_what_was_found_of_a_head_holds_for_one_configuration() -> None:
    head = RequestHead(b"POST", CHAT, http11=True)
    head.authorization = b"Bearer " + KEY.encode()
    before, after = (AccessControl(guarded([], *keys)) for keys in ((api_key(),), (api_key("second", OTHER),)))

    assert before.admit(head) is before.admit(head)
    with pytest.raises(RejectedRequestError, match="the API key is not valid"):
        after.admit(head)
    assert before.admit(head).name == "team"


async def test_health_asks_for_no_key(replica: FakeReplica) -> None:
    async with routed(guarded([replica])) as harness, harness.connect() as client:
        await client.send(get(b"/health"))
        assert (await client.answer()).status == 200


# --- scope ---


@pytest.mark.parametrize(("model", "status"), [("tiny", 200), ("large", 403), ("nobody-has-it", 403), (None, 403)])
async def test_a_key_is_good_for_its_models(model: str | None, status: int, replica: FakeReplica) -> None:
    async with routed(guarded([replica], api_key(models=("tiny",)))) as harness:
        answer = await ask(harness, asking(model) if model else b"{}")
        assert answer.status == status
        if status == 403:
            assert answer.error["param"] == "model"
        await harness.at_rest()
    assert len(replica.calls) == (status == 200)


async def test_a_key_sees_the_models_that_it_is_good_for(replica: FakeReplica) -> None:
    keys = (api_key(models=("tiny",)), api_key("second", OTHER))
    async with routed(guarded([replica], *keys)) as harness, harness.connect() as client:
        seen = []
        for secret in (KEY, OTHER):
            await client.send(get(b"/v1/models", [bearer(secret)]))
            seen.append([model["id"] for model in json.loads((await client.answer()).body)["data"]])
    assert seen == [["tiny"], ["tiny", "large"]]


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
async def test_a_key_names_the_task_group_and_bounds_it(
    groups: tuple[str, ...] | None, named: str | None, expected: str | None, replica: FakeReplica
) -> None:
    headers = [bearer()] + ([b"X-Task-Group: " + named.encode()] if named else [])
    async with routed(guarded([replica], api_key(groups=groups))) as harness:
        answer = await ask(harness, asking(), headers)
        await harness.at_rest()
        placed = [one["group"] for one in told(harness.router.services.decisions, 0, 9)["decisions"]]
    assert (answer.status, placed) == ((403, []) if expected is None else (200, [expected]))


# --- rates ---


async def test_requests_over_the_rate_are_told_when_to_come_back(clock: list[float], replica: FakeReplica) -> None:
    async with routed(guarded([replica], api_key(requests_per_s=0.5, burst=2), api_key("second", OTHER))) as harness:
        statuses = [(await ask(harness)).status for _ in range(3)]
        refused = await ask(harness)
        other = await ask(harness, headers=[bearer(OTHER)])
        clock[0] += 2.0
        later = [(await ask(harness)).status for _ in range(2)]
    assert (statuses, other.status, later) == ([200, 200, 429], 200, [200, 429])
    assert refused.headers["retry-after"] == "2"
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] == "4.000s"
    assert refused.error["type"] == "rate_limit_error"


async def test_tokens_are_counted_as_the_replica_says(clock: list[float], replica: FakeReplica) -> None:
    replica.script = answering(b'{"usage":{"prompt_tokens":50,"completion_tokens":100}}')
    async with routed(guarded([replica], api_key(tokens_per_min=120))) as harness:
        statuses = [(await ask(harness)).status for _ in range(2)]
        refused = await ask(harness)
        clock[0] += 15.4  # 30 overdrawn, at 2 a second
        early = (await ask(harness)).status
        clock[0] += 0.2
        later = (await ask(harness)).status
    assert (statuses, refused.status, early, later) == ([200, 429], 429, 429, 200)
    assert refused.headers["retry-after"] == "16"
    assert refused.headers["x-ratelimit-limit-tokens"] == "120"


async def test_a_prompt_counts_as_soon_as_it_is_sent(clock: list[float], replica: FakeReplica) -> None:
    replica.script = answering(b'{"error":{}}', status=400)
    async with routed(guarded([replica], api_key(tokens_per_min=100))) as harness:
        statuses = [(await ask(harness, asking(text="x" * 4000))).status for _ in range(2)]
    assert statuses == [400, 429]


async def test_what_runs_as_the_configuration_changes_is_counted_under_the_new_one(
    clock: list[float], replica: FakeReplica
) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await answering(b'{"usage":{"prompt_tokens":500,"completion_tokens":500}}')(call)

    replica.script = script
    async with routed(guarded([replica], api_key(tokens_per_min=600))) as harness:
        first = asyncio.create_task(ask(harness))
        await replica.wait_calls(1)
        await harness.push(guarded([replica], api_key(tokens_per_min=660)), 2)
        go.set()
        assert (await first).status == 200
        assert (await ask(harness)).status == 429


async def test_a_new_configuration_is_no_new_allowance(clock: list[float], replica: FakeReplica) -> None:
    limited = guarded([replica], api_key(requests_per_s=1, burst=1))
    async with routed(limited) as harness:
        statuses = [(await ask(harness)).status]
        await harness.push(limited, revision=2)
        statuses.append((await ask(harness)).status)
    assert statuses == [200, 429]


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
def test_a_key_that_makes_no_sense_is_refused(keys: Sequence[ApiKey], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dump_snapshot(guarded([], *keys), 1)
    assert caught.value.path == path
    assert KEY not in caught.value.reason


def test_what_is_secret_in_a_configuration_is_not_shown() -> None:
    policy = PolicyConfig(name="p", revision=1, settings=LeastLoadSettings())
    member = ReplicaConfig(name="a", url="http://a", api_key="replica-secret")
    pool = msgspec.structs.replace(guarded([]).pools[0], replicas=(member,), policy=policy)
    snapshot = load_snapshot(dump_snapshot(msgspec.structs.replace(guarded([], api_key()), pools=(pool,)), 1).document)
    secrets = (snapshot.config.hash_secret, "replica-secret", api_key().digest)

    assert all(secret in snapshot.document.decode() for secret in secrets)
    for shown in (repr(snapshot), repr(snapshot.config), str(pool), json.dumps(without_secrets(snapshot.config))):
        assert "***" in shown
        assert not [secret for secret in secrets if secret in shown]


async def test_many_clients_with_bad_keys_cost_little_memory(replica: FakeReplica) -> None:
    async with routed(guarded([replica], api_key())) as harness:
        async with harness.connect() as client:
            for number in range(1500):
                await client.send(post(CHAT, BODY, [bearer(f"guess-{number}")]))
                assert (await client.answer()).status == 401
        assert len(harness.router.request_head_cache) <= 1024
    assert replica.calls == []


async def test_a_key_ends_by_itself_without_a_push(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_900_000_000.0]
    monkeypatch.setattr(access_module, "time", lambda: now[0])
    async with routed(guarded([replica], api_key(expires_at=1_900_000_060))) as harness:
        assert (await ask(harness)).status == 200
        now[0] += 60
        late = await ask(harness)
        assert (late.status, late.headers["www-authenticate"]) == (401, "Bearer")
        assert "has expired" in late.error["message"]
