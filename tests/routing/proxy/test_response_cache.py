"""Exact response caches, through a router: stand-in replicas, a real Valkey, and stores that fail."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from routing.response_cache import store as store_module
from routing.response_cache.memory import ENTRY_OVERHEAD, Entry, MemoryLevel
from routing.schema import (
    Access,
    CacheWhen,
    GroupMatch,
    Limits,
    LowestCostSettings,
    PolicyConfig,
    PoolConfig,
    ReplicaConfig,
    ResponseCache,
    RouterConfig,
    TaskGroupConfig,
    ToolCalls,
    entry_prefix,
)
from tests.fakes.replica import answering, plain_answer
from tests.pace import is_within
from tests.routing.building import SECRET
from tests.routing.proxy.harness import DEADLINE_S, Harness, api_key, routed, samples
from tests.routing.standin.replica_process import ReplicaProcess, replica_process

CHAT = "/v1/chat/completions"
USERS = [{"role": "user", "content": "What is a prefix cache?"}]
GREEDY = {"model": "tiny", "messages": USERS, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def stand_in() -> Iterator[ReplicaProcess]:
    with replica_process("--prefill-rate", "200000", "--step-s", "0.002") as replica:
        yield replica


def cached(url: str, cache: ResponseCache | None, **fields: Any) -> RouterConfig:
    """A pool with one replica and the task group ``faq``, which all requests may name."""
    policy = PolicyConfig(name="everyday", revision=1, settings=LowestCostSettings())
    groups = (TaskGroupConfig(name="faq", response_cache=cache), TaskGroupConfig(name="other", response_cache=cache))
    member = ReplicaConfig(name="one", url=url, block_tokens=16)
    pool = PoolConfig(name="chat", policy=policy, replicas=(member,), groups=groups)
    return RouterConfig(hash_secret=SECRET, pools=(pool,), **fields)


@asynccontextmanager
async def router_before(stand_in: ReplicaProcess, cache: ResponseCache | None = None) -> AsyncIterator[Harness]:
    async with routed(cached(f"http://127.0.0.1:{stand_in.port}", cache or ResponseCache())) as harness:
        yield harness


class Received(msgspec.Struct):
    """A response: status, headers and body."""

    status: int
    cache: str | None
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        pieces = [piece.removeprefix("data: ") for piece in self.body.decode().split("\n\n") if piece]
        assert pieces.pop() == "[DONE]"
        return [json.loads(piece) for piece in pieces]


async def send(harness: Harness, body: dict[str, Any], *, path: str = CHAT, **headers: str) -> Received:
    named = {"X-Task-Group": "faq"} | {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{harness.port}{path}"
    async with harness.http.post(url, json=body, headers=named) as response:
        data = await response.read()
        lower = {name.lower(): value for name, value in response.headers.items()}
        return Received(response.status, lower.get("x-warmpath-cache"), lower, data)


async def metric(harness: Harness, name: str, **labels: str) -> float:
    """The value of the only sample with these labels."""
    rows = samples((await harness.admin("GET", "/metrics"))[1])[f"warmpath_router_response_cache_{name}"]
    (value,) = [value for found, value in rows if labels.items() <= found.items()]
    return value


async def test_a_repeated_greedy_request_is_answered_without_a_replica(stand_in, stored):
    async with router_before(stand_in) as harness:
        first = await send(harness, GREEDY)
        second = await send(harness, GREEDY)
        hits = await metric(harness, "requests_total", group="faq", result="hit")
        rows = samples((await harness.admin("GET", "/metrics"))[1])["warmpath_router_requests_total"]
        tokens = await metric(harness, "saved_tokens_total", group="faq", kind="generated")

    assert (first.status, first.cache, second.cache) == (200, "miss", "hit")
    assert second.body == first.body
    assert second.headers["age"] == "0"
    assert "x-warmpath-replica" not in second.headers
    assert (hits, tokens) == (1, 12)
    assert [(labels["replica"], value) for labels, value in rows] == [("one", 1)]  # figures of engines


@pytest.mark.parametrize("member", [b'"x":1e999', b'"x":' + b"1" * 5000, b'"x":"\xff"', b'"\xff":1'])
async def test_what_the_cache_cannot_read_is_forwarded(replica, member):
    body = json.dumps(GREEDY | {"cache": True}).encode()[:-1] + b"," + member + b"}"
    replica.script = answering(body=completion("stop"))
    async with routed(cached(replica.url, ResponseCache())) as harness:
        response = await harness.chat(body, [b"X-Task-Group: faq"])

    assert (response.status, response.headers["x-warmpath-cache"]) == (200, "bypass")
    assert member in replica.calls[0].body


async def test_another_router_finds_the_entry_in_the_store_which_holds_no_text(stand_in, stored):
    async with router_before(stand_in) as harness:
        first = await send(harness, GREEDY)
        await harness.until(lambda: stored.dbsize() == 1, "the entry to be written")
    (name,) = stored.keys("*")
    text = first.json["choices"][0]["message"]["content"].encode()
    async with router_before(stand_in) as harness:
        second = await send(harness, GREEDY)

    assert name.decode().startswith(entry_prefix(SECRET, "chat", "faq", model="tiny", namespace=""))
    assert text not in stored.get(name)
    assert 3500 < stored.ttl(name) <= 3600
    assert (second.cache, second.body) == ("hit", first.body)


async def test_an_entry_that_was_moved_or_changed_in_the_store_is_a_miss(stand_in, stored):
    async with router_before(stand_in) as harness:
        await send(harness, GREEDY)
        await harness.until(lambda: stored.dbsize() == 1, "the entry to be written")
    (name,) = stored.keys("*")
    data = bytearray(stored.get(name))
    data[-1] ^= 1
    stored.set(name, bytes(data))
    async with router_before(stand_in) as harness:
        changed = await send(harness, GREEDY)
        errors = await metric(harness, "store_errors_total", kind="invalid_entry")

    assert (changed.cache, errors) == ("miss", 1)


async def test_a_stream_and_a_whole_response_answer_each_other(stand_in):
    async with router_before(stand_in) as harness:
        for number, is_stream in enumerate((False, True)):
            body = GREEDY | {"messages": [{"role": "user", "content": f"Question {number}"}]}
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            stream = await send(harness, body | usage) if is_stream else None
            whole = await send(harness, body)
            stream = stream or await send(harness, body | usage)
            silent = await send(harness, body | {"stream": True})

            assert [whole.cache, stream.cache].count("hit") == 1
            assert silent.cache == "hit"
            texts = [part["delta"].get("content") or "" for event in stream.events for part in event["choices"]]
            assert "".join(texts) == whole.json["choices"][0]["message"]["content"]
            assert stream.events[-1]["usage"]["completion_tokens"] == whole.json["usage"]["completion_tokens"] == 12
            assert all("usage" not in event or event["usage"] is None for event in silent.events)
            assert stream.headers["content-type"].startswith("text/event-stream")


async def test_identical_requests_at_the_same_time_cost_one_prefill(stand_in, stored):
    body = GREEDY | {"messages": [{"role": "user", "content": "All at once"}]}
    async with router_before(stand_in) as harness:
        received = await asyncio.gather(*(send(harness, body) for _ in range(32)))
        records = (await harness.admin("GET", "/admin/decisions"))[1]["decisions"]

    assert sorted(response.cache for response in received) == ["hit"] * 31 + ["miss"]
    assert len({response.body for response in received}) == 1
    assert len(records) == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "hit"),
        ({"user": "somebody", "metadata": {"a": "b"}}, "hit"),
        ({"seed": 3}, "miss"),
        ({"cache": {"namespace": "blue"}}, "miss"),
        ({"temperature": 0.1}, "bypass"),
        ({"n": 2}, "bypass"),
        ({"cache": False}, "bypass"),
    ],
)
async def test_a_change_that_matters_misses(stand_in, change, expected):
    async with router_before(stand_in) as harness:
        await send(harness, GREEDY)
        changed = await send(harness, GREEDY | change)

    assert (changed.status, changed.cache) == (200, expected)


async def test_other_groups_versions_and_callers_have_other_entries(stand_in):
    async with router_before(stand_in) as harness:
        await send(harness, GREEDY)
        assert (await send(harness, GREEDY, X_Task_Group="other")).cache == "miss"
        assert (await send(harness, GREEDY, Authorization="Bearer somebody")).cache == "miss"
        assert (await send(harness, GREEDY, Authorization="Bearer somebody")).cache == "hit"
        assert (await send(harness, GREEDY, X_Task_Group="")).cache is None
        url = f"http://127.0.0.1:{stand_in.port}"
        await harness.push(cached(url, ResponseCache(version="2")), 2)
        assert (await send(harness, GREEDY)).cache == "miss"


async def test_a_group_that_requests_do_not_name_has_a_cache_too(stand_in):
    found = cached(f"http://127.0.0.1:{stand_in.port}", ResponseCache())
    group = TaskGroupConfig(name="by-model", match=GroupMatch(models=("tiny",)), response_cache=ResponseCache())
    pool = msgspec.structs.replace(found.pools[0], groups=(group,))
    async with routed(msgspec.structs.replace(found, pools=(pool,))) as harness:
        assert [(await send(harness, GREEDY, X_Task_Group="")).cache for _ in range(2)] == ["miss", "hit"]


async def test_two_credentials_are_another_caller_than_one_of_them(replica):
    replica.script = answering(body=completion("stop"))
    one, two = b"Authorization: Bearer one", b"Authorization: Bearer two"
    async with routed(cached(replica.url, ResponseCache())) as harness:
        received = [
            await harness.chat(json.dumps(GREEDY).encode(), [b"X-Task-Group: faq", *lines])
            for lines in ((one,), (one, two), (two, one), (one,))
        ]

    assert [response.headers["x-warmpath-cache"] for response in received] == ["miss", "miss", "miss", "hit"]


def test_memory_holds_the_entries_used_last_within_its_bytes():
    memory = MemoryLevel(lifetime_s=5.0, max_bytes=3 * (1000 + ENTRY_OVERHEAD))
    entry = Entry(0.0, 1.0, False, False, bytes(1000), None, None)
    for name in "abc":
        memory.put(name, entry, 0.0)
    memory.get("a", 1.0)
    memory.put("d", entry, 1.0)
    memory.put("d", entry, 1.0)

    assert [name for name in "abcd" if memory.get(name, 4.9)] == ["a", "c", "d"]
    assert memory.bytes == 3 * (1000 + ENTRY_OVERHEAD)
    assert [name for name in "abcd" if memory.get(name, 5.0)] == ["d"]
    assert (len(memory), memory.bytes) == (1, 1000 + ENTRY_OVERHEAD)


async def test_writes_to_a_store_that_does_not_respond_are_bounded():
    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    store = store_module.Store(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
    entry = Entry(0.0, 1.0, False, False, b"{}", None, None)
    for number in range(store_module.MAX_PENDING_WRITES + 10):
        store.put(f"entry-{number}", entry, AESGCM(bytes(32)), 60)
    dropped = store.errors["write_dropped"]
    await store.close()
    server.close()

    assert dropped == 10


async def test_keys_of_one_tenant_share_entries_and_no_other_key_does(stand_in):
    keys = {name: f"{name}-secret" for name in ("red-1", "red-2", "blue", "loner")}
    tenants = {"red-1": "red", "red-2": "red", "blue": "blue", "loner": None}
    access = Access(keys=tuple(api_key(name, secret, tenant=tenants[name]) for name, secret in keys.items()))
    found = {}
    async with routed(cached(f"http://127.0.0.1:{stand_in.port}", ResponseCache(), access=access)) as harness:
        for name, secret in keys.items():
            found[name] = (await send(harness, GREEDY, Authorization=f"Bearer {secret}")).cache

    assert found == {"red-1": "miss", "red-2": "hit", "blue": "miss", "loner": "miss"}


async def test_callers_control_the_cache_within_the_groups_limits(stand_in, stored):
    async with router_before(stand_in, ResponseCache(when=CacheWhen.REQUESTED, ttl_s=60)) as harness:
        assert (await send(harness, GREEDY)).cache == "bypass"
        asked = GREEDY | {"temperature": 0.7, "cache": {"ttl_s": 3600, "namespace": "mine"}}
        assert [(await send(harness, asked)).cache for _ in range(2)] == ["miss", "hit"]
        assert (await send(harness, asked, Cache_Control="no-cache")).cache == "bypass"
        assert (await send(harness, asked, Cache_Control="max-age=0, no-store")).cache == "bypass"
        lines = b"Cache-Control: max-age=60", b"X-Task-Group: faq", b"Cache-Control: no-store"
        assert (await harness.chat(json.dumps(asked).encode(), lines)).headers["x-warmpath-cache"] == "bypass"
        assert (await send(harness, asked, Cache_Control="max-age=" + "9" * 5000)).cache == "hit"
        wrong = await send(harness, GREEDY | {"cache": {"ttl": 5}})
        await harness.until(lambda: stored.dbsize() == 1, "the entry to be written")

    assert stored.ttl(stored.keys("*")[0]) <= 60
    assert wrong.status == 400
    assert "expected true, false, or an object with ttl_s, namespace and semantic" in wrong.json["error"]["message"]


def completion(finish_reason: str, **message: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"} | message, "finish_reason": finish_reason}
    return json.dumps(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
    ).encode()


CALL = [{"id": "1", "type": "function", "function": {"name": "pay", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("status", "answer", "request_fields", "cache", "expected"),
    [
        (200, completion("stop"), {}, ResponseCache(), "hit"),
        (200, completion("length"), {"max_tokens": 1}, ResponseCache(), "hit"),
        (200, completion("length"), {"max_tokens": None}, ResponseCache(), "miss"),
        (200, completion("content_filter"), {}, ResponseCache(), "miss"),
        (200, completion("stop", refusal="I cannot"), {}, ResponseCache(), "miss"),
        (200, completion("tool_calls", tool_calls=CALL), {}, ResponseCache(), "miss"),
        (200, completion("tool_calls", tool_calls=CALL), {}, ResponseCache(tool_calls=ToolCalls.STORE), "hit"),
        (200, b'{"error": {"message": "x"}}', {}, ResponseCache(), "miss"),
        (200, completion("stop", content="y" * 2000), {}, ResponseCache(max_entry_bytes=1024), "miss"),
        (400, b'{"error": {"message": "x"}}', {}, ResponseCache(), "miss"),
    ],
)
async def test_errors_and_incomplete_or_filtered_responses_are_not_stored(
    replica, status, answer, request_fields, cache, expected
):
    replica.script = answering(status=status, body=answer)
    async with routed(cached(replica.url, cache)) as harness:
        await send(harness, GREEDY | request_fields)
        second = await send(harness, GREEDY | request_fields)

    assert second.cache == expected


async def test_after_a_leader_that_fails_all_followers_are_sent_at_once(replica):
    async def fail(call: Any) -> None:
        await (may_fail.wait() if len(replica.calls) == 1 else replica.wait_calls(8))
        await call.send(plain_answer(b"{}", status=500))

    may_fail = asyncio.Event()
    replica.script = fail
    async with routed(cached(replica.url, ResponseCache())) as harness:
        tasks = [asyncio.create_task(send(harness, GREEDY)) for _ in range(8)]
        flights = harness.caches.flights
        await harness.until(lambda: [len(flight.followers) for flight in flights.values()] == [7], "followers")
        may_fail.set()
        received = await asyncio.gather(*tasks)
        assert flights == {}

    assert [response.status for response in received] == [500] * 8


async def test_followers_do_not_wait_for_the_end_of_a_response_that_is_too_long_to_store(replica):
    async def send_most(call: Any) -> None:
        await call.send(plain_answer(completion("stop", content="y" * 2000))[:-1])
        await call.wait_gone()

    replica.script = send_most
    async with routed(cached(replica.url, ResponseCache(max_entry_bytes=1024))) as harness:
        leader, follower = [asyncio.create_task(send(harness, GREEDY)) for _ in range(2)]
        await replica.wait_calls(2)
        for task in (leader, follower):
            task.cancel()


async def test_a_follower_waits_no_longer_than_for_a_replica(replica):
    whole = plain_answer(completion("stop"))

    async def stall_first(call: Any) -> None:
        is_leader = len(replica.calls) == 1
        await call.send(whole[:-1] if is_leader else whole)
        if is_leader:
            await may_end.wait()
            await call.send(whole[-1:])

    may_end = asyncio.Event()
    replica.script = stall_first
    async with routed(cached(replica.url, ResponseCache(), limits=Limits(response_timeout_s=1.0))) as harness:
        leader = asyncio.create_task(send(harness, GREEDY))
        await replica.wait_calls(1)
        follower = await asyncio.wait_for(send(harness, GREEDY), DEADLINE_S)
        may_end.set()
        assert [follower.status, follower.cache, (await leader).status] == [200, "miss", 200]
        assert harness.caches.flights == {}


async def test_explain_says_whether_the_cache_would_answer(stand_in):
    async def explained(body: dict[str, Any], group: str = "faq") -> Any:
        request = {"path": CHAT, "body": body, "headers": {"X-Task-Group": group}}
        status, explanation = await harness.admin("POST", "/admin/explain", json=request)
        assert status == 200, explanation
        return explanation["response_cache"]

    async with router_before(stand_in) as harness:
        before = await explained(GREEDY)
        first = await send(harness, GREEDY)
        after = await explained(GREEDY | {"stream": True})
        sampled = await explained(GREEDY | {"temperature": 1})
        elsewhere = await explained(GREEDY, group="")
        requests = harness.caches.lines()
        assert sum(line.endswith('result="miss"} 1') for line in requests) == 1  # explanations count nothing

    key = first.headers["x-warmpath-cache-key"]
    assert before == {"is_cacheable": True, "is_in_memory": False, "key": key}
    assert after == {"is_cacheable": True, "is_in_memory": True, "key": key}
    assert sampled == {"is_cacheable": False, "is_in_memory": False, "key": None}
    assert elsewhere is None


# --- stores that fail ---

Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        pass
    writer.close()


async def talk_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        writer.write(os.urandom(200))
    writer.close()


async def refuse_writes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65536):
        writer.write(b"-OOM command not allowed when used memory > 'maxmemory'.\r\n")
    writer.close()


@pytest.mark.parametrize("behaviour", [hang, talk_nonsense, refuse_writes, None])
async def test_a_store_that_fails_costs_a_few_milliseconds_and_no_error(replica, monkeypatch, behaviour):
    server = await asyncio.start_server(behaviour or hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if behaviour is None:
        server.close()  # nothing listens there
    monkeypatch.setenv("WARMPATH_ROUTER_CACHE_URL", f"redis://127.0.0.1:{port}/0")
    replica.script = answering(body=completion("stop"))
    async with routed(cached(replica.url, ResponseCache())) as harness:
        received, durations = [], []
        for number in range(30):
            body = GREEDY | {"messages": [{"role": "user", "content": f"Question {number}"}]}
            started = perf_counter()
            received.append(await send(harness, body))
            durations.append(perf_counter() - started)
        repeated = await send(harness, body)
        is_up = await metric(harness, "store_up")
    server.close()

    assert {response.status for response in received} == {200}
    assert {response.cache for response in received} == {"miss"}
    assert repeated.cache == "hit"  # from memory
    assert is_up == 0
    assert is_within(sorted(durations)[len(durations) // 2], 0.1)


async def test_an_entry_that_is_too_old_for_a_request_is_replaced(stand_in):
    async with router_before(stand_in) as harness:
        first = await send(harness, GREEDY)
        memory = harness.caches.memory
        (name,) = memory.matching(re.compile(""))
        entry = memory.get(name, 0.0)
        assert entry is not None
        memory.put(name, entry._replace(created_s=entry.created_s - 90), 0.0)
        found = [await send(harness, GREEDY, Cache_Control=f"max-age={age}") for age in (100, 80, 80)]
        results = {
            result: await metric(harness, "requests_total", group="faq", result=result) for result in ("hit", "miss")
        }

    assert [received.cache for received in (first, *found)] == ["miss", "hit", "stale", "hit"]
    assert 90 <= int(found[0].headers["age"]) <= 95
    assert "x-warmpath-replica" in found[1].headers
    assert int(found[2].headers["age"]) < 5
    assert results == {"hit": 2, "miss": 2}
    assert len({received.headers["x-warmpath-cache-key"] for received in (first, *found)}) == 1


# --- purges ---

PURGE = "/admin/response-cache/purge"


async def purge(harness: Harness, **scope: Any) -> tuple[int, Any]:
    return await harness.admin("POST", PURGE, json={"pool": "chat", "group": "faq"} | scope)


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_purge_of_one_key_removes_that_response_alone(stand_in, request, is_shared):
    store = request.getfixturevalue("stored") if is_shared else None
    requests = [GREEDY | {"seed": at, "cache": {"namespace": "docs"}} for at in range(3)]
    async with router_before(stand_in) as harness:
        keys = [(await send(harness, body)).headers["x-warmpath-cache-key"] for body in requests]
        await harness.until(lambda: store is None or store.dbsize() == 3, "the entries to be written")
        hit = await send(harness, requests[1])
        elsewhere = await purge(harness, group="other", key=keys[1])
        status, purged = await purge(harness, key=hit.headers["x-warmpath-cache-key"])
        wrong = [await purge(harness, key=key) for key in ("*", "", keys[1][:15], keys[1].upper() + "X")]
        found = [(await send(harness, body)).cache for body in requests]

    assert (hit.cache, hit.headers["x-warmpath-cache-key"]) == ("hit", keys[1])
    assert elsewhere[1]["memory_entries"] == 0
    assert (status, purged["memory_entries"], purged["store_entries"]) == (200, 1, 1 if is_shared else None)
    assert [status for status, _ in wrong] == [422] * 4
    assert found == ["hit", "miss", "hit"]


@pytest.mark.parametrize(
    ("scope", "kept"),
    [
        ({}, {"other"}),
        ({"model": "tiny"}, {"other"}),
        ({"model": "large"}, {"none", "blue", "other"}),
        ({"namespace": "blue"}, {"none", "other"}),
        ({"namespace": ""}, {"blue", "other"}),
        ({"model": "tiny", "namespace": "blue"}, {"none", "other"}),
        ({"pool": "elsewhere"}, {"none", "blue", "other"}),
    ],
)
@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_purge_removes_what_it_names_and_nothing_else(stand_in, request, scope, kept, is_shared):
    store = request.getfixturevalue("stored") if is_shared else None
    requests = {
        "none": (GREEDY, "faq"),
        "blue": (GREEDY | {"cache": {"namespace": "blue"}}, "faq"),
        "other": (GREEDY, "other"),
    }
    async with router_before(stand_in) as harness:
        for body, group in requests.values():
            await send(harness, body, X_Task_Group=group)
        await harness.until(lambda: store is None or store.dbsize() == 3, "the entries to be written")
        counted = await purge(harness, **scope, dry_run=True)
        status, purged = await purge(harness, **scope)
        again = await purge(harness, **scope)
        found = {
            name: (await send(harness, body, X_Task_Group=group)).cache for name, (body, group) in requests.items()
        }

    removed = 3 - len(kept)
    expected = {"memory_entries": removed, "store_entries": removed if is_shared else None, "problem": None}
    assert status == 200
    assert purged == expected | {"remaining_entries": 0 if is_shared else None}
    assert counted == (200, expected | {"remaining_entries": None})
    assert (again[1]["memory_entries"], again[1]["store_entries"] or 0) == (0, 0)
    assert {name for name, cache in found.items() if cache == "hit"} == kept


async def test_a_purge_removes_many_entries_in_batches(stand_in, stored, monkeypatch):
    monkeypatch.setattr(store_module, "PURGE_BATCH", 10)
    prefix = entry_prefix(SECRET, "chat", "faq", model="tiny", namespace="")
    stored.mset({f"{prefix}{number:064x}": b"x" for number in range(500)})
    stored.mset({f"another:{number}": b"x" for number in range(500)})
    async with router_before(stand_in) as harness:
        status, purged = await purge(harness)

    assert (status, purged["store_entries"], purged["remaining_entries"]) == (200, 500, 0)
    assert stored.dbsize() == 500


async def test_requests_that_began_before_a_purge_store_nothing_and_are_followed_by_none_that_begin_after_it(replica):
    may_respond, answer = asyncio.Event(), answering(body=completion("stop"))

    async def wait(call: Any) -> None:
        await may_respond.wait()
        await answer(call)

    replica.script = wait
    async with routed(cached(replica.url, ResponseCache())) as harness:
        early = [asyncio.create_task(send(harness, GREEDY)) for _ in range(3)]
        flights = harness.caches.flights
        await harness.until(lambda: [len(flight.followers) for flight in flights.values()] == [2], "followers")
        assert (await purge(harness))[0] == 200
        late = asyncio.create_task(send(harness, GREEDY))
        await replica.wait_calls(2)
        may_respond.set()
        received = [response.cache for response in await asyncio.gather(*early, late)]
        after = await send(harness, GREEDY)
        assert harness.caches.flights == {}

    assert sorted(received) == ["hit", "hit", "miss", "miss"]
    assert received[3] == "miss"
    assert after.cache == "hit"  # of the late request
    assert len(replica.calls) == 2


async def test_a_request_from_before_a_purge_does_not_end_the_flight_of_a_later_one(replica):
    may_respond, answer = [asyncio.Event(), asyncio.Event()], answering(body=completion("stop"))

    async def wait(call: Any) -> None:
        await may_respond[len(replica.calls) - 1].wait()
        await answer(call)

    replica.script = wait
    async with routed(cached(replica.url, ResponseCache())) as harness:
        early = asyncio.create_task(send(harness, GREEDY))
        await replica.wait_calls(1)
        assert (await purge(harness))[0] == 200
        late = asyncio.create_task(send(harness, GREEDY))
        await replica.wait_calls(2)
        may_respond[0].set()
        await early
        flights = harness.caches.flights
        follower = asyncio.create_task(send(harness, GREEDY))
        await harness.until(lambda: [len(flight.followers) for flight in flights.values()] == [1], "a follower")
        may_respond[1].set()
        received = [response.cache for response in await asyncio.gather(late, follower)]

    assert received == ["miss", "hit"]
    assert len(replica.calls) == 2


async def test_an_entry_that_was_read_from_the_store_during_a_purge_does_not_stay_in_memory(stand_in, stored):
    async with router_before(stand_in) as harness:
        await send(harness, GREEDY)
        await harness.until(lambda: stored.dbsize() == 1, "the entry to be written")
        caches = harness.caches
        caches.memory.clear()
        store, may_return, is_read = caches.store, asyncio.Event(), asyncio.Event()
        assert store is not None
        look_up = store.ask

        async def return_later(on_entry: Callable[[Entry | None], None], entry: Entry | None) -> None:
            is_read.set()
            await may_return.wait()
            on_entry(entry)

        def slow_look_up(name: str, cipher: AESGCM, on_entry: Callable[[Entry | None], None]) -> bool:
            tasks = []
            return look_up(name, cipher, lambda entry: tasks.append(asyncio.create_task(return_later(on_entry, entry))))

        store.ask = slow_look_up  # type: ignore[method-assign]
        early = asyncio.create_task(send(harness, GREEDY))
        await is_read.wait()
        await purge(harness)
        may_return.set()
        assert (await early).cache == "hit"  # it began before the purge
        assert (await send(harness, GREEDY)).cache == "miss"


@pytest.mark.parametrize("behaviour", [talk_nonsense, refuse_writes, hang, None])
async def test_a_purge_without_its_store_is_not_complete(stand_in, monkeypatch, behaviour):
    monkeypatch.setattr(store_module, "PURGE_CALL_S", 0.2)
    server = await asyncio.start_server(behaviour or hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if behaviour is None:
        server.close()
    monkeypatch.setenv("WARMPATH_ROUTER_CACHE_URL", f"redis://:hidden@127.0.0.1:{port}/0")
    async with router_before(stand_in) as harness:
        await send(harness, GREEDY)
        status, purged = await purge(harness)
        assert (await send(harness, GREEDY)).cache == "miss"  # memory is purged nevertheless
    server.close()

    assert status == 503
    assert (purged["memory_entries"], purged["remaining_entries"]) == (1, None)
    assert purged["problem"].startswith("the store of response caches failed")
    assert "hidden" not in str(purged)


@pytest.mark.parametrize(
    ("document", "status"), [({"pool": "chat"}, 422), ({"pool": "chat", "group": "faq", "models": "x"}, 422), ([], 422)]
)
async def test_a_malformed_purge_is_rejected(stand_in, document, status):
    async with router_before(stand_in) as harness:
        assert (await harness.admin("POST", PURGE, json=document))[0] == status


async def test_a_router_without_a_configuration_cannot_purge():
    async with routed(None) as harness:
        assert (await purge(harness))[0] == 503
