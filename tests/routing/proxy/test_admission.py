"""What a request that was let in may ask for, and with which body it goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from routing.balancing.decision import RequestKeys
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.placement import Placement
from routing.balancing.rates import TokenRatio
from routing.http.auth import Grant
from routing.http.request import Request, RequestHead
from routing.prompt.hashing import PrefixHasher
from routing.proxy.admission import Admission, admit_request
from routing.schema import (
    ApiKey,
    Caps,
    GroupCaps,
    LowestCostSettings,
    PolicyConfig,
    ReplicaConfig,
    RouterConfig,
    TaskGroupConfig,
    Tier1,
)
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.api_keys import KEY, OTHER, api_key, asking, bearer, guarded
from tests.routing.proxy.harness import CHAT, SECRET, Answer, Harness, config, post, routed
from tests.routing.proxy.records import told
from tests.routing.standin.replica_process import ReplicaProcess, replica_process

LONG = "A passage that several tenants have in common. " * 200


def capped(replica: FakeReplica, caps: Caps, group_caps: GroupCaps | None = None) -> RouterConfig:
    snapshot = config([replica], groups=(TaskGroupConfig(name="coding", caps=group_caps),))
    pool = msgspec.structs.replace(snapshot.pools[0], caps=caps)
    return msgspec.structs.replace(snapshot, pools=(pool,))


# --- caps ---


@pytest.mark.parametrize(
    ("caps", "fields", "param"),
    [
        (Caps(), {"n": 129}, "n"),
        (Caps(), {"best_of": "129"}, "best_of"),
        (Caps(max_tokens=10), {"max_completion_tokens": 11}, "max_completion_tokens"),
        (Caps(logprobs=3), {"top_logprobs": 4}, "top_logprobs"),
    ],
)
async def test_what_asks_for_too_much_is_refused_here(
    caps: Caps, fields: dict[str, Any], param: str, replica: FakeReplica
) -> None:
    async with routed(capped(replica, caps)) as harness:
        answer = await harness.chat(asking(**fields))
        await harness.at_rest()
    assert (answer.status, answer.error["param"], answer.error["type"]) == (400, param, "invalid_request_error")
    assert f"at most {caps.n if caps == Caps() else caps.max_tokens or caps.logprobs} here" in answer.error["message"]
    assert replica.calls == []


async def test_a_task_group_has_its_own_caps_or_the_pools(replica: FakeReplica) -> None:
    coding = [b"X-Task-Group: coding"]
    async with routed(capped(replica, Caps(n=1))) as harness:
        assert (await harness.chat(asking(n=2), coding)).status == 400
        await harness.push(capped(replica, Caps(n=1), GroupCaps(n=2)), revision=2)
        assert [(await harness.chat(asking(n=2), headers)).status for headers in ((), coding)] == [400, 200]
        await harness.push(capped(replica, Caps(n=None)), revision=3)
        assert (await harness.chat(asking(n=16_384))).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3}, "n"),
        ({"top_logprobs": 6}, "top_logprobs"),
        ({"max_tokens": 51}, "max_tokens"),
        ({"n": 2, "top_logprobs": 5, "max_tokens": 50}, None),
    ],
)
async def test_a_group_that_caps_one_thing_keeps_the_pools_other_caps(
    fields: dict[str, Any], param: str | None, replica: FakeReplica
) -> None:
    snapshot = capped(replica, Caps(n=2, logprobs=5, max_tokens=10), GroupCaps(max_tokens=50))
    async with routed(snapshot) as harness:
        answer = await harness.chat(asking(**fields), [b"X-Task-Group: coding"])
    assert answer.status == (400 if param else 200)
    assert param is None or answer.error["param"] == param


async def test_a_groups_length_is_put_in_over_its_pools(replica: FakeReplica) -> None:
    async with routed(capped(replica, Caps(max_tokens=10), GroupCaps(max_tokens=50))) as harness:
        for headers in ([b"X-Task-Group: coding"], []):
            assert (await harness.chat(asking(), headers)).status == 200
    assert [json.loads(call.body)["max_tokens"] for call in replica.calls] == [50, 10]


async def test_a_body_within_its_caps_goes_on_byte_by_byte(replica: FakeReplica) -> None:
    bodies = [
        b' {"n" : 1.0e0, "n":2,  "model":"tiny","messages":[]}\r\n',
        asking(max_tokens=10, n=2),
        asking(top_logprobs=1, max_tokens=1),
    ]
    async with routed(capped(replica, Caps(logprobs=5))) as harness:
        for body in bodies:
            assert (await harness.chat(body)).status == 200
    assert [call.body for call in replica.calls] == bodies


async def test_a_length_that_the_engine_would_make_up_is_the_cap(replica: FakeReplica) -> None:
    async with routed(capped(replica, Caps(max_tokens=100))) as harness:
        for body in (b'{"messages": [ ]}', b'{"messages":[],"max_tokens":null}', b'{"messages":[],"max_tokens":7}'):
            assert (await harness.chat(body)).status == 200
    assert [call.body for call in replica.calls] == [
        b'{"messages": [ ],"max_tokens":100}',
        b'{"messages":[],"max_tokens":100}',
        b'{"messages":[],"max_tokens":7}',
    ]
    assert [int(call.header(b"content-length")[0]) for call in replica.calls] == [34, 32, 30]


@pytest.mark.parametrize(
    ("path", "others", "name"),
    [
        (CHAT, ("max_output_tokens",), "max_tokens"),
        (b"/v1/completions", ("max_completion_tokens", "max_output_tokens"), "max_tokens"),
        (b"/v1/responses", ("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    ],
)
async def test_a_length_under_a_name_of_another_endpoint_is_none(
    path: bytes, others: tuple[str, ...], name: str, replica: FakeReplica
) -> None:
    """The engine of an endpoint passes over the names that others read, and generates as if nothing was said."""
    async with routed(capped(replica, Caps(max_tokens=9))) as harness, harness.connect() as client:
        for other in others:
            for spelled in (other, other.upper(), other.replace("_", r"\u005f")):
                await client.send(post(path, b'{"%b":5}' % spelled.encode()))
                assert (await client.answer()).status == 200
    assert len(replica.calls) == 3 * len(others)
    assert {json.loads(call.body)[name] for call in replica.calls} == {9}


async def test_a_body_whose_names_are_no_text_is_refused_and_no_mistake_of_ours(replica: FakeReplica) -> None:
    async with routed(capped(replica, Caps(max_tokens=9))) as harness:
        answer = await harness.chat(b'{"\xff":1,"max_tokens":null}')
        await harness.at_rest()
    assert (answer.status, answer.error["message"]) == (400, "the JSON is not valid UTF-8")


# --- tenants ---


def tenants(*names: str | None) -> tuple[ApiKey, ...]:
    return tuple(
        api_key(f"key-{place}", secret, tenant=name)
        for place, (name, secret) in enumerate(zip(names, (KEY, OTHER), strict=False))
    )


async def salts_of(snapshot: RouterConfig, replica: FakeReplica, asked: Sequence[tuple[str, bytes]]) -> list[Any]:
    async with routed(snapshot) as harness:
        for secret, body in asked:
            assert (await harness.chat(body, [bearer(secret)])).status == 200
    sent = [json.loads(call.body) for call in replica.calls]
    assert [one | {"cache_salt": 0} for one in sent] == [json.loads(body) | {"cache_salt": 0} for _, body in asked]
    return [one["cache_salt"] for one in sent]


async def test_a_tenants_salt_stands_in_every_body_and_nobody_can_send_it(replica: FakeReplica) -> None:
    forged = (asking(), asking(cache_salt="mine"), asking(cache_salt=None), asking(cache_salt=["odd"]))
    asked = [*((KEY, body) for body in forged), (OTHER, asking()), (OTHER, asking(cache_salt="mine"))]
    mine, own, null, odd, other, other_own = await salts_of(guarded([replica], *tenants("a", "b")), replica, asked)

    assert mine == null == odd
    assert len({mine, own, other, other_own, "mine"}) == 5
    assert all(len(salt) == 32 for salt in (mine, own, other, other_own))


async def test_keys_of_one_tenant_share_its_salt(replica: FakeReplica) -> None:
    one, two = await salts_of(guarded([replica], *tenants("a", "a")), replica, [(KEY, asking()), (OTHER, asking())])
    assert one == two


async def test_a_tenant_cannot_name_the_salt_of_another(replica: FakeReplica) -> None:
    snapshot = guarded([replica], *tenants("a", "b"))
    (known,) = await salts_of(snapshot, replica, [(OTHER, asking())])
    replica.calls.clear()
    (salt,) = await salts_of(snapshot, replica, [(KEY, asking(cache_salt=known))])
    assert salt != known


async def test_a_key_without_tenant_leaves_bodies_as_they_are(replica: FakeReplica) -> None:
    bodies = [asking(), asking(cache_salt="mine")]
    async with routed(guarded([replica], *tenants(None))) as harness:
        for body in bodies:
            assert (await harness.chat(body, [bearer()])).status == 200
    assert [call.body for call in replica.calls] == bodies


async def test_tenants_have_no_placement_key_in_common(replica: FakeReplica) -> None:
    body = asking(text=LONG, user="alice")
    async with routed(guarded([replica], *tenants("a", "b"))) as harness:
        for secret in (KEY, OTHER, KEY):
            assert (await harness.chat(body, [bearer(secret), b"X-Session-ID: alice"])).status == 200
        await harness.at_rest()
        mine, other, again = told(harness.router.services.decisions, 0, 9)["decisions"]
    assert (mine["prefix"], mine["blocks"]) == (again["prefix"], again["blocks"])
    assert len(mine["blocks"]) > 20
    assert mine["prefix"] != other["prefix"]
    assert not set(mine["blocks"]) & set(other["blocks"])


def test_one_session_id_is_another_session_for_every_tenant() -> None:
    snapshot = guarded([], *tenants("a", "b"))
    placement = Placement(snapshot, LoadTracker())
    admission = Admission(snapshot, placement.models, placement.matcher)
    sessions = []
    for key in snapshot.access.keys if snapshot.access else ():
        request = Request(RequestHead(b"POST", CHAT, http11=True), asking(user="alice"), "id")
        request.grant = Grant(key, snapshot.hash_secret, shared=None)
        wanted = admit_request(request, admission)
        served = placement.models.resolve(wanted.model)
        sessions.append(RequestKeys(wanted, served, PrefixHasher(SECRET), Tier1(), TokenRatio()).session)
    assert None not in sessions
    assert len(set(sessions)) == 2


@pytest.fixture
def stand_in() -> Any:
    with replica_process() as process:
        yield process


async def cached(harness: Harness, secret: str, **fields: Any) -> int:
    answer: Answer = await harness.chat(
        asking(text=LONG, max_tokens=1, **fields), [bearer(secret), b"Content-Type: application/json"]
    )
    assert answer.status == 200, answer.body
    details = json.loads(answer.body)["usage"]["prompt_tokens_details"]
    return details["cached_tokens"] if details else 0


def on(stand_in: ReplicaProcess, *names: str) -> RouterConfig:
    snapshot = guarded([], *tenants(*names))
    member = ReplicaConfig(name="stand-in", url=f"http://127.0.0.1:{stand_in.port}")
    policy = PolicyConfig(name="everyday", revision=1, settings=LowestCostSettings())
    pool = msgspec.structs.replace(snapshot.pools[0], replicas=(member,), policy=policy)
    return msgspec.structs.replace(snapshot, pools=(pool,))


async def test_what_one_tenant_has_warmed_is_cold_for_another(stand_in: ReplicaProcess) -> None:
    """No hit across salts, neither in the replica's own count nor in what the router expects."""
    async with routed(on(stand_in, "a", "b")) as harness:
        hits = [await cached(harness, secret) for secret in (KEY, KEY, OTHER, OTHER, KEY)]
        forged = await cached(harness, OTHER, cache_salt="a")
        await harness.at_rest()
        reasons = [one["reason"] for one in told(harness.router.services.decisions, 0, 9)["decisions"]]
    assert [hit > 0 for hit in hits] == [False, True, False, True, True]
    assert forged == 0
    assert reasons == ["cold", "hit", "cold", "hit", "hit", "cold"]


async def test_what_one_key_of_a_tenant_has_warmed_is_warm_for_the_others(stand_in: ReplicaProcess) -> None:
    async with routed(on(stand_in, "a", "a")) as harness:
        assert [await cached(harness, secret) > 0 for secret in (KEY, OTHER)] == [False, True]


async def test_several_requests_on_one_connection_keep_their_keys_apart(replica: FakeReplica) -> None:
    async with routed(guarded([replica], *tenants("a", "b"))) as harness, harness.connect() as client:
        await client.send(b"".join(post(CHAT, asking(), [bearer(secret)]) for secret in (KEY, OTHER, "sk-none", KEY)))
        statuses = [(await client.answer()).status for _ in range(4)]
    assert statuses == [200, 200, 401, 200]
    mine, other, again = (json.loads(call.body)["cache_salt"] for call in replica.calls)
    assert mine == again != other
