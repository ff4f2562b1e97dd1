"""Caps and tenants: what an admitted request may ask for, and the body that is forwarded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from routing.balancing.load_tracker import LoadTracker, TokenRatio
from routing.balancing.placement import Placement, RequestKeys
from routing.http.auth import Grant
from routing.http.request import Request, RequestHead
from routing.prompt.hashing import PrefixHasher
from routing.proxy.admission import Admission, admit_request
from routing.schema import (
    ApiKey,
    Caps,
    GroupCaps,
    RouterConfig,
    TaskGroupConfig,
    Tier1,
)
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import (
    CHAT,
    KEY,
    OTHER,
    SECRET,
    api_key,
    bearer,
    chat_body,
    config,
    post,
    routed,
    with_keys,
)

LONG = "A passage that several tenants have in common. " * 200


def capped(replica: FakeReplica, caps: Caps, group_caps: GroupCaps | None = None) -> RouterConfig:
    snapshot = config([replica], groups=(TaskGroupConfig(name="coding", caps=group_caps),))
    pool = msgspec.structs.replace(snapshot.pools[0], caps=caps)
    return msgspec.structs.replace(snapshot, pools=(pool,))


async def test_a_task_group_has_its_own_caps_or_the_pools(replica):
    coding = [b"X-Task-Group: coding"]
    async with routed(capped(replica, Caps(n=1))) as harness:
        assert (await harness.chat(chat_body(n=2), coding)).status == 400
        await harness.push(capped(replica, Caps(n=1), GroupCaps(n=2)), revision=2)
        assert [(await harness.chat(chat_body(n=2), headers)).status for headers in ((), coding)] == [400, 200]
        await harness.push(capped(replica, Caps(n=None)), revision=3)
        assert (await harness.chat(chat_body(n=16_384))).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3}, "n"),
        ({"top_logprobs": 6}, "top_logprobs"),
        ({"max_tokens": 51}, "max_tokens"),
        ({"n": 2, "top_logprobs": 5, "max_tokens": 50}, None),
    ],
)
async def test_a_group_with_one_cap_keeps_the_pools_other_caps(fields, param, replica):
    snapshot = capped(replica, Caps(n=2, logprobs=5, max_tokens=10), GroupCaps(max_tokens=50))
    async with routed(snapshot) as harness:
        response = await harness.chat(chat_body(**fields), [b"X-Task-Group: coding"])
    assert response.status == (400 if param else 200)
    assert param is None or response.error["param"] == param


async def test_a_body_within_its_caps_is_forwarded_byte_by_byte(replica):
    bodies = [
        b' {"n" : 1.0e0, "n":2,  "model":"tiny","messages":[]}\r\n',
        chat_body(max_tokens=10, n=2),
        chat_body(top_logprobs=1, max_tokens=1),
    ]
    async with routed(capped(replica, Caps(logprobs=5))) as harness:
        for body in bodies:
            assert (await harness.chat(body)).status == 200
    assert [call.body for call in replica.calls] == bodies


async def test_a_missing_length_is_set_to_the_cap(replica):
    async with routed(capped(replica, Caps(max_tokens=100))) as harness:
        for body in (b'{"messages": [ ]}', b'{"messages":[],"max_tokens":null}', b'{"messages":[],"max_tokens":7}'):
            assert (await harness.chat(body)).status == 200
    assert [call.body for call in replica.calls] == [
        b'{"messages": [ ],"max_tokens":100}',
        b'{"messages":[],"max_tokens":100}',
        b'{"messages":[],"max_tokens":7}',
    ]
    assert [int(call.header(b"content-length")[0]) for call in replica.calls] == [34, 32, 30]


# --- tenants ---
def tenants(*names: str | None) -> tuple[ApiKey, ...]:
    return tuple(
        api_key(f"key-{index}", secret, tenant=name)
        for index, (name, secret) in enumerate(zip(names, (KEY, OTHER), strict=False))
    )


async def salts_of(snapshot: RouterConfig, replica: FakeReplica, requests: Sequence[tuple[str, bytes]]) -> list[Any]:
    async with routed(snapshot) as harness:
        for secret, body in requests:
            assert (await harness.chat(body, [bearer(secret)])).status == 200
    sent = [json.loads(call.body) for call in replica.calls]
    assert [item | {"cache_salt": 0} for item in sent] == [json.loads(body) | {"cache_salt": 0} for _, body in requests]
    return [item["cache_salt"] for item in sent]


async def test_a_tenants_salt_is_in_every_body_and_cannot_be_forged(replica):
    forged = (chat_body(), chat_body(cache_salt="mine"), chat_body(cache_salt=None), chat_body(cache_salt=["odd"]))
    requests = [*((KEY, body) for body in forged), (OTHER, chat_body()), (OTHER, chat_body(cache_salt="mine"))]
    first_salt, own_salt, null, odd, other_name, other_own = await salts_of(
        with_keys([replica], *tenants("a", "b")), replica, requests
    )

    assert first_salt == null == odd
    assert len({first_salt, own_salt, other_name, other_own, "mine"}) == 5
    assert all(len(salt) == 32 for salt in (first_salt, own_salt, other_name, other_own))


async def test_keys_of_one_tenant_share_its_salt(replica):
    item, two = await salts_of(
        with_keys([replica], *tenants("a", "a")), replica, [(KEY, chat_body()), (OTHER, chat_body())]
    )
    assert item == two


async def test_a_key_without_tenant_leaves_bodies_unchanged(replica):
    bodies = [chat_body(), chat_body(cache_salt="mine")]
    async with routed(with_keys([replica], *tenants(None))) as harness:
        for body in bodies:
            assert (await harness.chat(body, [bearer()])).status == 200
    assert [call.body for call in replica.calls] == bodies


async def test_tenants_share_no_placement_key(replica):
    body = chat_body(text=LONG, user="alice")
    async with routed(with_keys([replica], *tenants("a", "b"))) as harness:
        for secret in (KEY, OTHER, KEY):
            assert (await harness.chat(body, [bearer(secret), b"X-Session-ID: alice"])).status == 200
        await harness.at_rest()
        first_salt, other_name, again = harness.decisions
    assert (first_salt["prefix"], first_salt["blocks"]) == (again["prefix"], again["blocks"])
    assert len(first_salt["blocks"]) > 20
    assert first_salt["prefix"] != other_name["prefix"]
    assert not set(first_salt["blocks"]) & set(other_name["blocks"])


def keys_of(key: ApiKey, snapshot: RouterConfig, header: str | None = None, **fields: Any) -> RequestKeys:
    """What a request of an API key is placed by."""
    placement = Placement(snapshot, LoadTracker())
    head = RequestHead(b"POST", CHAT, http11=True)
    head.session_id = header
    request = Request(head, chat_body(**fields), "id")
    request.grant = Grant(key, snapshot.hash_secret, shared=None)
    admitted = admit_request(request, Admission(snapshot, placement.models, placement.matcher))
    return RequestKeys(admitted, placement.models.resolve(admitted.model), PrefixHasher(SECRET), Tier1(), TokenRatio())


def test_a_session_id_is_a_different_session_for_each_tenant():
    keys = tenants("a", "b")
    sessions = {keys_of(key, with_keys([], *keys), user="alice").session for key in keys}

    assert None not in sessions
    assert len(sessions) == 2


@pytest.mark.parametrize(
    ("header", "fields", "is_conversation"),
    [
        ("one", {}, True),
        ("one", {"user": "alice"}, True),
        (None, {"user": "alice"}, False),
        (None, {"prompt_cache_key": "agents"}, False),
        (None, {}, False),
    ],
)
def test_only_a_header_names_a_conversation_because_users_have_many(header, fields, is_conversation):
    (key,) = tenants("a")
    keys = keys_of(key, with_keys([], key), header, **fields)

    assert keys.conversation == (keys.session if is_conversation else None)
    assert (keys.session is not None) is bool(header or fields)


async def test_pipelined_requests_keep_their_keys_apart(replica):
    async with routed(with_keys([replica], *tenants("a", "b"))) as harness, harness.connect() as client:
        await client.send(
            b"".join(post(CHAT, chat_body(), [bearer(secret)]) for secret in (KEY, OTHER, "sk-none", KEY))
        )
        statuses = [(await client.read_response()).status for _ in range(4)]
    assert statuses == [200, 200, 401, 200]
    first_salt, other_name, again = (json.loads(call.body)["cache_salt"] for call in replica.calls)
    assert first_salt == again != other_name
