"""Semantic response caches, through a router: one replica answers by topic, one embeds topics with noise."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from time import perf_counter, time
from typing import Any

import msgspec
import numpy as np
import pytest
from redis import Redis

from routing.response_cache import evidence as evidence_module
from routing.response_cache import semantic as semantic_module
from routing.response_cache import store as store_module
from routing.response_cache import vectors as vectors_module
from routing.response_cache.evidence import Evidence, State, answer_of, bucket_of, compare
from routing.response_cache.keys import Scope
from routing.response_cache.vectors import BATCH, BLOCK_ROWS, MAX_UNSHARED, SharedVectors, VectorIndex
from routing.schema import (
    Access,
    CachePurge,
    ConfigError,
    PolicyConfig,
    PoolConfig,
    ReplicaConfig,
    ResponseCache,
    RoundRobinSettings,
    RouterConfig,
    SemanticCache,
    SemanticMode,
    TaskGroupConfig,
    dump_snapshot,
    load_snapshot,
    wilson_interval,
)
from tests.fakes.replica import Call, FakeReplica, Script, answering, hanging, raw
from tests.pace import is_within
from tests.routing.proxy.harness import SECRET, Harness, api_key, routed, samples
from tests.routing.proxy.test_response_cache import Received
from tests.routing.proxy.test_response_cache import send as send_only

SEED = 20_260
DIMENSIONS = 64
TOPICS = 40  # each odd one is a near miss of the even one before it
NEAR_MISS = 0.955  # cosine similarity of the two
SHADOW = SemanticCache(embedding_pool="vectors", embedding_model="embedder", timeout_s=5.0)
SERVE = msgspec.structs.replace(
    SHADOW, mode=SemanticMode.SERVE, min_checks=20, min_precision=0.8, threshold=0.9, check_rate=0.001
)


# --- a world of topics ---


def seeded(*parts: object) -> np.random.Generator:
    digest = hashlib.sha256(repr((SEED, *parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def word(topic: int) -> str:
    """A name of a topic without digits, because answers with other numbers are different without further ado."""
    return "topic" + "abcdefghij"[topic // 10] + "abcdefghij"[topic % 10]


def topic_vector(kind: str, name: str) -> np.ndarray:
    """Questions of an odd topic are like those of the topic before; answers of all topics differ."""
    topic = 10 * (ord(name[-2]) - 97) + ord(name[-1]) - 97
    own = unit(seeded(kind, topic).standard_normal(DIMENSIONS))
    if kind == "answer" or topic % 2 == 0:
        return own
    near = unit(seeded(kind, topic - 1).standard_normal(DIMENSIONS))
    return NEAR_MISS * near + math.sqrt(1 - NEAR_MISS**2) * unit(own - (own @ near) * near)


def vector_of(text: str) -> np.ndarray:
    """Its topic's vector with noise, which is the same each time."""
    words = re.findall(r"[a-z]+", text.lower())
    name = next(word for word in words if word.startswith("topic"))
    kind = "answer" if "answer" in words else "question"
    noise = unit(seeded("noise", text).standard_normal(DIMENSIONS))
    return unit(topic_vector(kind, name) + seeded("size", text).uniform(0.05, 0.25) * noise)


async def embed(call: Call) -> None:
    assert call.line == b"POST /v1/embeddings HTTP/1.1"
    body = json.loads(call.body)
    assert body["model"] == "embedder"
    rows = [{"index": at, "embedding": (3 * vector_of(text)).tolist()} for at, text in enumerate(body["input"])]
    await answering(json.dumps({"object": "list", "data": rows[::-1]}).encode())(call)


def answer_in_words(question: str) -> str:
    """The topic's answer, in one of several wordings."""
    name = next(part for part in question.split() if part.startswith("topic"))
    wordings = (f"The answer is {name}.", f"the  ANSWER is {name}!", f"It is {name}, that is the answer, I think.")
    return wordings[int(seeded("wording", question).integers(len(wordings)))]


class Engine:
    """The script of a replica that answers chat requests. ``era`` changes all answers."""

    def __init__(self) -> None:
        self.era = ""
        self.requests = 0

    async def __call__(self, call: Call) -> None:
        self.requests += 1
        messages = json.loads(call.body)["messages"]
        content = messages[-1]["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        answer = answer_in_words(text) + (f" Since {self.era} {self.requests} it is otherwise." if self.era else "")
        choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
        await answering(json.dumps(body | {"usage": usage}).encode())(call)


# --- a router before it ---


def fleet(two: list[FakeReplica], cache: SemanticCache | None, **fields: Any) -> RouterConfig:
    policy = PolicyConfig(name="everyday", revision=1, settings=RoundRobinSettings())
    exact = fields.pop("exact", ResponseCache())
    groups = tuple(TaskGroupConfig(name=name, response_cache=exact, semantic_cache=cache) for name in ("faq", "other"))
    replicas = [ReplicaConfig(name=item.name, url=item.url, block_tokens=16) for item in two]
    chat = PoolConfig(name="chat", policy=policy, models=("tiny", "large"), replicas=(replicas[0],), groups=groups)
    vectors = PoolConfig(name="vectors", policy=policy, models=("embedder",), replicas=(replicas[1],))
    return RouterConfig(hash_secret=SECRET, pools=(chat, vectors), **fields)


@asynccontextmanager
async def router_before(
    two: list[FakeReplica], cache: SemanticCache = SERVE, *, embedding: Script = embed, **fields: Any
) -> AsyncIterator[Harness]:
    two[0].script, two[1].script = Engine(), embedding
    async with routed(fleet(two, cache, **fields)) as harness:
        harness.caches.semantic.random = Random(SEED)
        yield harness


def body_of(question: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": question}], "temperature": 0} | fields


async def send(harness: Harness, body: dict[str, Any], **headers: str) -> Received:
    """Send a request, and wait until the background work for it is done."""
    received = await send_only(harness, body, **headers)
    tasks = harness.caches.semantic._tasks
    await harness.until(lambda: not tasks, "background work")
    return received


def similarity(received: Received) -> float | None:
    """The similarity of the question whose response was served."""
    shown = received.headers.get("x-warmpath-cache-similarity")
    return None if shown is None else float(shown)


async def metrics(harness: Harness, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
    rows = samples((await harness.admin("GET", "/metrics"))[1]).get(f"warmpath_router_semantic_cache_{name}", [])
    return [(found, value) for found, value in rows if labels.items() <= found.items()]


async def state(harness: Harness, group: str = "faq") -> str:
    return next(labels["state"] for labels, value in await metrics(harness, "state", group=group) if value)


def evidence_of(harness: Harness, group: str = "faq") -> Evidence:
    return harness.caches.semantic._groups["chat", group].evidence


def anonymous(harness: Harness) -> str:
    """The caller of requests without credentials, where the router checks no keys."""
    keys = harness.caches._keys
    return keys._caller_of(Scope(pool="chat", group="faq", model="tiny", tenant="", key="", credentials=b""))


def trust(harness: Harness, *callers: str) -> None:
    """Let both groups serve these callers and those of earlier requests, as after enough checks."""
    for group in ("faq", "other"):
        evidence = evidence_of(harness, group)
        for name in {anonymous(harness), *evidence._callers, *callers}:
            caller = evidence.of(name)
            for _ in range(evidence.settings.min_checks):
                caller.record(1.0, is_right=True)
            assert caller.state is State.SERVING


# --- shadow ---


@pytest.mark.parametrize(("near_miss", "low", "high"), [(0.995, 0.7, 0.9)])
async def test_shadow_reports_the_precision_of_a_seeded_workload_and_serves_nothing(
    two, monkeypatch, near_miss, low, high
):
    monkeypatch.setattr(sys.modules[__name__], "NEAR_MISS", near_miss)
    order = seeded("order")
    questions = [f"Tell me about {word(int(order.integers(TOPICS)))} please {number}" for number in range(400)]
    found = true_checks(questions)
    async with router_before(two, SHADOW) as harness:
        results = {(await send(harness, body_of(question))).cache for question in questions}
        rows = await metrics(harness, "checks_total", group="faq")
        engine_requests = two[0].script.requests
        is_shadow = await state(harness) == "shadow"

    assert (results, engine_requests, is_shadow) == ({"miss"}, 400, True)
    for threshold in (0.9, 0.95, 0.97):
        expected = [is_right for similarity, is_right in found if similarity >= threshold]
        counts = {True: 0.0, False: 0.0}
        for labels, value in rows:
            if float(labels["similarity"]) >= threshold:
                counts[labels["result"] == "right"] += value
        truth, reported = sum(expected) / len(expected), counts[True] / sum(counts.values())
        assert low < truth < high or threshold != 0.95  # paraphrases, and near misses above the threshold
        assert len(expected) > 150
        assert sum(counts.values()) == pytest.approx(len(expected), abs=3)
        assert reported == pytest.approx(truth, abs=0.03)


def true_checks(questions: list[str]) -> list[tuple[float, bool]]:
    """For each question the similarity of the most similar earlier one, and whether that has the same topic."""
    vectors = np.array([vector_of(question) for question in questions])
    topics = [question.split()[3] for question in questions]
    found = []
    for at in range(1, len(questions)):
        similarities = vectors[:at] @ vectors[at]
        nearest = int(np.argmax(similarities))
        found.append((float(similarities[nearest]), topics[nearest] == topics[at]))
    return found


async def test_without_a_semantic_cache_nothing_is_embedded(two):
    two[0].script, two[1].script = Engine(), embed
    async with routed(fleet(two, None)) as harness:
        for number in range(3):
            await send_only(harness, body_of(f"About topicaa {number}"))
        assert harness.caches.semantic is None

    assert two[1].calls == []


# --- serving ---


async def test_a_similar_question_gets_the_stored_response_once_there_is_enough_evidence(two):
    async with router_before(two) as harness:
        first = await send(harness, body_of("Tell me about topicaa"))
        before = await send(harness, body_of("What is topicaa"))
        trust(harness)
        served = await send(harness, body_of("Please explain topicaa"))
        other = await send(harness, body_of("Please explain topicba"))
        stream = await send(harness, body_of("Explain topicaa", stream=True))
        lookups = {labels["result"]: value for labels, value in await metrics(harness, "lookups_total", group="faq")}

    assert [first.cache, before.cache, served.cache, other.cache] == ["miss", "miss", "hit", "miss"]
    assert served.body in {first.body, before.body}
    assert 0.9 <= similarity(served) <= 1
    assert similarity(other) is None
    assert (stream.cache, stream.body[:6]) == ("hit", b"data: ")
    assert lookups == {"hit": 2, "miss": 1}


async def test_serving_begins_with_the_checks_and_stops_by_itself_when_they_turn_bad(two, caplog):
    caplog.set_level("INFO", logger=evidence_module.logger.name)
    settings = msgspec.structs.replace(SERVE, check_rate=0.2)
    async with router_before(two, settings) as harness:
        engine = two[0].script
        results = [(await send(harness, body_of(f"About topicaa number {at}"))).cache for at in range(60)]
        states = [await state(harness)]
        engine.era = "yesterday"
        results_after = [(await send(harness, body_of(f"About topicaa later {at}"))).cache for at in range(100)]
        states.append(await state(harness))
        engine.era = ""
        await send(harness, body_of("About topicaa", cache={"namespace": "fresh"}))
        for at in range(110):
            await send(harness, body_of(f"About topicaa at last {at}", cache={"namespace": "fresh"}))
        states.append(await state(harness))
        ((_, precision),) = await metrics(harness, "recent_precision_ratio", group="faq")

    assert results[:20] == ["miss"] * 20
    assert 0.6 < results[22:].count("hit") / len(results[22:]) < 0.95  # the others are checks
    assert results_after.count("hit") > 5  # until it is noticed
    assert results_after[60:] == ["miss"] * 40
    assert states == ["serving", "stopped", "serving"]
    assert precision >= 0.8
    messages = [record.message for record in caplog.records if record.name == evidence_module.logger.name]
    assert messages[0].startswith("semantic_cache_serving pool=chat group=faq caller=")
    assert any(message.startswith("semantic_cache_stopped pool=chat group=faq caller=") for message in messages)


@pytest.mark.parametrize(
    ("change", "headers"),
    [
        ({"messages": [{"role": "system", "content": "Be brief"}]}, {}),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}, {}),
        ({"tools": [{"type": "function", "function": {"name": "pay"}}]}, {}),
        ({"model": "large"}, {}),
        ({"seed": 1}, {}),
        ({"top_p": 0.5}, {}),
        ({"max_tokens": 7}, {}),
        ({"response_format": {"type": "json_object"}}, {}),
        ({"a_member_of_a_later_release": 1}, {}),
        ({"cache": {"namespace": "blue"}}, {}),
        ({"cache": {"semantic": False}}, {}),
        ({"prompt_logprobs": 1}, {}),
        ({}, {"X_Task_Group": "other"}),
        ({}, {"Authorization": "Bearer somebody"}),
    ],
)
async def test_a_change_that_matters_misses(two, change, headers):
    async with router_before(two) as harness:
        await send(harness, body_of("Tell me about topicaa"))
        await send(harness, body_of("Tell me about topicca"), **headers)
        trust(harness)
        asked = body_of("Please explain topicaa")
        earlier = change.get("messages", [])
        changed = asked | change | {"messages": earlier + asked["messages"]}
        received = await send(harness, changed, **headers)
        unchanged = await send(harness, body_of("Do explain topicaa"))

    assert (received.status, received.cache) == (200, "miss")
    assert unchanged.cache == "hit"


@pytest.mark.parametrize(
    "last",
    [
        {
            "role": "user",
            "content": [{"type": "text", "text": "About topicaa"}, {"type": "image_url", "image_url": {}}],
        },
        {"role": "assistant", "content": "About topicaa"},
        {"role": "user", "content": "topicaa " * 2000},
        {"role": "user", "content": " "},
    ],
)
async def test_only_text_of_a_user_is_embedded(two, last):
    two[0].script, two[1].script = answering(b"{}"), embed
    async with routed(fleet(two, SHADOW)) as harness:
        received = await send(harness, body_of("") | {"messages": [last]})

    assert received.cache == "miss"
    assert two[1].calls == []


async def test_no_response_crosses_callers(two):
    keys = {name: f"{name}-secret" for name in ("red-1", "red-2", "blue", "loner")}
    tenants = {"red-1": "red", "red-2": "red", "blue": "blue", "loner": None}
    access = Access(keys=tuple(api_key(name, secret, tenant=tenants[name]) for name, secret in keys.items()))
    found = {}
    async with router_before(two, access=access) as harness:
        trust(harness, "tenant red", "tenant blue", "key loner")
        for owner, secret in keys.items():
            for other, other_secret in keys.items():
                namespace = {"cache": {"namespace": f"{owner}.{other}"}}
                await send(harness, body_of("About topicaa", **namespace), Authorization=f"Bearer {secret}")
                asked = body_of(f"About topicaa for {other}", **namespace)
                found[owner, other] = (await send(harness, asked, Authorization=f"Bearer {other_secret}")).cache

    same = {("red-1", "red-2"), ("red-2", "red-1"), *((name, name) for name in keys)}
    assert {pair for pair, cache in found.items() if cache == "hit"} == same


async def test_refusals_of_clients_are_honoured(two):
    async with router_before(two) as harness:
        await send(harness, body_of("Tell me about topicaa"))
        trust(harness)
        asked = body_of("Please explain topicaa")
        results = [
            (await send(harness, asked, Cache_Control="no-store")).cache,
            (await send(harness, asked | {"cache": False})).cache,
            (await send(harness, asked | {"cache": {"semantic": False}}, Cache_Control="no-store")).cache,
            (await send(harness, asked | {"temperature": 0.7, "cache": {"semantic": False}})).cache,
            (await send(harness, asked)).cache,
        ]
        wrong = await send(harness, asked | {"cache": {"semantic": "no"}})

    assert results == ["bypass", "bypass", "bypass", "bypass", "hit"]
    assert wrong.status == 400


async def test_identical_requests_share_the_hit_of_the_first_unless_they_refuse(two):
    async with router_before(two) as harness:
        await send(harness, body_of("Tell me about topicaa"))
        trust(harness)
        release = asyncio.Event()

        async def embed_later(call: Call) -> None:
            await release.wait()
            await embed(call)

        two[1].script = embed_later
        asked = body_of("Please explain topicaa")
        tasks = [asyncio.create_task(send_only(harness, asked)) for _ in range(4)]
        flights = harness.caches.flights
        await harness.until(lambda: [len(flight.followers) for flight in flights.values()] == [3], "followers")
        refusing = asyncio.create_task(send_only(harness, asked | {"cache": {"semantic": False}}))
        await harness.until(lambda: [len(flight.followers) for flight in flights.values()] == [4], "followers")
        release.set()
        received = await asyncio.gather(*tasks)
        refused = await refusing
        engine_requests = two[0].script.requests

    assert [response.cache for response in received] == ["hit"] * 4
    assert len({similarity(response) for response in received}) == 1
    assert (refused.cache, similarity(refused)) == ("miss", None)
    assert engine_requests == 2


async def test_entries_that_are_gone_are_no_hits_and_leave_the_index(two):
    async with router_before(two) as harness:
        await send(harness, body_of("Tell me about topicaa"))
        trust(harness)
        harness.caches.memory.clear()
        received = await send(harness, body_of("Please explain topicaa"))
        ((_, entries),) = await metrics(harness, "index_entries", group="faq")

    assert received.cache == "miss"
    assert entries == 1  # that of the second request


async def test_a_purge_removes_the_vectors_of_its_entries_too(two):
    async with router_before(two) as harness:
        await send(harness, body_of("Tell me about topicaa"))
        trust(harness)
        caches = harness.caches
        await caches.forget(CachePurge(pool="chat", group="another"))
        kept = await metrics(harness, "index_entries", group="faq")
        await caches.forget(CachePurge(pool="chat", group="faq"))
        purged = await metrics(harness, "index_entries", group="faq")

    assert [entries for _, entries in (*kept, *purged)] == [1, 0]


TENANTS = {"red": "red-secret", "blue": "blue-secret"}
WITH_TENANTS = Access(keys=tuple(api_key(name, secret, tenant=name) for name, secret in TENANTS.items()))


async def ask(harness: Harness, tenant: str, times: int, topic: str = "topicaa") -> list[str | None]:
    """How often a tenant's different questions about a topic are answered from the cache."""
    authorization = f"Bearer {TENANTS[tenant]}"
    return [
        (await send(harness, body_of(f"About {topic} number {at}"), Authorization=authorization)).cache
        for at in range(times)
    ]


async def test_good_checks_of_one_tenant_never_let_another_be_served(two):
    async with router_before(two, access=WITH_TENANTS) as harness:
        red = await ask(harness, "red", 40)
        begins = await ask(harness, "blue", SERVE.min_checks + 1)  # the first one has nothing to be compared with
        states = {labels["state"] for labels, value in await metrics(harness, "state", group="faq") if value}
        blue = await ask(harness, "blue", 10, "topicaa again")

    assert red[SERVE.min_checks + 1 :].count("hit") > 10
    assert begins == ["miss"] * (SERVE.min_checks + 1)
    assert states == {"serving"}  # by its own checks
    assert blue.count("hit") >= 8  # the others are checks


async def test_wrong_checks_of_one_tenant_never_stop_another(two):
    async with router_before(two, access=WITH_TENANTS) as harness:
        await ask(harness, "red", 25)
        two[0].script.era = "today"
        await ask(harness, "blue", 40)
        two[0].script.era = ""
        found = await metrics(harness, "state", group="faq")
        ((_, precision),) = await metrics(harness, "recent_precision_ratio", group="faq")
        ((_, checks),) = await metrics(harness, "window_checks", group="faq")
        red = await ask(harness, "red", 10, "topicaa again")

    assert {labels["state"] for labels, value in found if value} == {"serving", "stopped"}
    assert (precision, checks) == (0, 39)  # of the caller that has to be looked at
    assert red.count("hit") >= 8


async def test_the_callers_whose_checks_are_in_memory_are_bounded_and_begin_anew_without_a_store(two, monkeypatch):
    monkeypatch.setattr(evidence_module, "MAX_CALLERS", 3)
    async with router_before(two) as harness:
        trust(harness, "tenant early")
        evidence = evidence_of(harness)
        for name in ("tenant 1", "tenant early", "tenant 2", "tenant 3"):
            evidence.of(name)
        kept = list(evidence._callers)
        states = [evidence.of(name).state for name in ("tenant early", anonymous(harness))]

    assert kept == ["tenant early", "tenant 2", "tenant 3"]
    assert states == [State.SERVING, State.COLLECTING]


# --- failures ---


@pytest.mark.parametrize(
    ("script", "mode"),
    [
        (hanging, SemanticMode.SHADOW),
        (hanging, SemanticMode.SERVE),
        (answering(b"garbage"), SemanticMode.SHADOW),
        (answering(b'{"data": []}'), SemanticMode.SERVE),
        (answering(b'{"data": [{"index": 0, "embedding": []}]}'), SemanticMode.SERVE),
        (answering(b'{"data": [{"index": 0, "embedding": [0, 0]}]}'), SemanticMode.SERVE),
        (answering(b'{"data": [{"index": 0, "embedding": [1e308, 1e308]}]}'), SemanticMode.SERVE),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 5_000_000), SemanticMode.SERVE),
        (None, SemanticMode.SERVE),
    ],
)
async def test_a_pool_of_embeddings_that_fails_costs_a_miss_and_little_time(two, monkeypatch, script, mode):
    monkeypatch.setattr(semantic_module, "BACKGROUND_S", 0.2)
    settings = msgspec.structs.replace(SERVE, timeout_s=0.05, mode=mode)
    async with router_before(two, settings) as harness:
        await send(harness, body_of("Tell me about topicaa"))
        if mode is SemanticMode.SERVE:
            trust(harness)
        if script is None:
            two[1].kill()
        else:
            two[1].script = script
        started = perf_counter()
        received = [await send_only(harness, body_of(f"Please explain topicaa {at}")) for at in range(20)]
        duration_s = perf_counter() - started
        repeated = await send_only(harness, body_of("Please explain topicaa 0"))
        await harness.until(lambda: not harness.caches.semantic._tasks, "the background work to end")
        errors = {labels["kind"] for labels, _ in await metrics(harness, "errors_total", group="faq")}
        assert harness.loads.load("b").running == 0

    assert {response.status for response in received} == {200}
    assert {response.cache for response in received} == {"miss"}
    assert repeated.cache == "hit"
    assert ("timeout" if script is hanging else "paused") in errors  # after some failures the pool is left alone
    assert is_within(duration_s, 20 * 0.1)


async def test_a_burst_of_misses_has_bounded_background_work(two, monkeypatch):
    monkeypatch.setattr(semantic_module, "MAX_TASKS", 4)
    async with router_before(two, SHADOW, embedding=hanging) as harness:
        semantic = harness.caches.semantic
        await asyncio.gather(*(send_only(harness, body_of(f"About topicaa {at}")) for at in range(20)))
        tasks = len(semantic._tasks)
        rows = await metrics(harness, "errors_total", group="faq", kind="dropped")

    assert tasks == 4
    assert rows[0][1] == 16


# --- sharing ---


async def test_routers_with_a_store_share_checks_and_keep_them_over_a_restart(two, stored):
    async with router_before(two) as harness:
        for at in range(25):
            await send(harness, body_of(f"About topicaa {at}", cache={"namespace": "first"}))
        states = [await state(harness)]
    name = next(key for key in stored.keys("warmpath:semantic:*") if not key.endswith((b":counts", b":vectors")))
    async with router_before(two) as harness:
        states.append(await state(harness))
        await send(harness, body_of("About topicaa once more"))
        states.append(await state(harness))
        served = await send(harness, body_of("About topicaa at the end"))
        checks = await metrics(harness, "window_checks", group="faq")
        own = sum(value for _, value in await metrics(harness, "checks_total", group="faq"))
        shared = sum(value for _, value in await metrics(harness, "shared_checks", group="faq"))
    other = msgspec.structs.replace(SERVE, answer_similarity=0.91)
    async with router_before(two, other) as harness:
        await send(harness, body_of("About topicaa with other settings"))
        states.append(await state(harness))

    assert states == ["serving", "collecting", "serving", "collecting"]
    assert served.cache == "hit"
    assert checks[0][1] >= 20
    assert own == 0
    assert shared >= checks[0][1]  # those below the threshold too
    assert stored.lrange(name, 0, -1) == [b"1"] * int(checks[0][1])
    assert stored.ttl(name) > 86_400
    assert b"topic" not in b"".join(stored.keys("*"))


async def test_a_store_keeps_the_checks_of_each_tenant_apart(two, stored):
    async with router_before(two, access=WITH_TENANTS) as harness:
        await ask(harness, "red", 25)
        await ask(harness, "blue", 5)
    async with router_before(two, access=WITH_TENANTS) as harness:
        for tenant in TENANTS:
            await ask(harness, tenant, 1, "topicca")  # its first request reads its checks
        evidence = evidence_of(harness)
        found = {tenant: evidence.of(f"tenant {tenant}") for tenant in TENANTS}
        states = {tenant: caller.state for tenant, caller in found.items()}
        checks = found["blue"].checks
        shared = sum(value for _, value in await metrics(harness, "shared_checks", group="faq"))

    assert states == {"red": State.SERVING, "blue": State.COLLECTING}
    assert checks <= 5
    assert shared >= found["red"].checks + checks
    assert b"red" not in b"".join(stored.keys("*"))


def streams(stored: Redis) -> list[bytes]:
    """The streams of vectors in the store."""
    return [name for name in stored.keys("*") if stored.type(name) == b"stream"]


async def test_routers_with_a_store_share_vectors_and_keep_them_over_a_restart(two, stored, monkeypatch):
    monkeypatch.setattr(vectors_module, "REFRESH_S", 0.0)
    async with router_before(two) as early:
        trust(early)
        await send(early, body_of("Tell me about topicaa"))
        (name,) = streams(stored)
        ttl_s = stored.ttl(name)
        async with router_before(two) as late:
            await send(late, body_of("Tell me about topiccc"))  # a process reads the vectors with its first request
            found = [await send(late, body_of("Please explain topicaa"))]
            await send(early, body_of("Tell me about topicee"))
            found.append(await send(early, body_of("Please explain topiccc")))
            entries = [await metrics(harness, "index_entries", group="faq") for harness in (early, late)]

    assert [received.cache for received in found] == ["hit", "hit"]
    assert all(similarity(received) > SERVE.threshold for received in found)
    assert [rows[0][1] for rows in entries] == [3, 2]
    assert ttl_s > 86_400


async def test_the_store_cannot_read_vectors_and_cannot_forge_them(two, stored):
    async with router_before(two) as harness:
        for group in ("faq", "other"):
            await send(harness, body_of("Tell me about topicaa"), X_Task_Group=group)
    one, other = streams(stored)
    (record,), (moved,) = ([fields[b"v"] for _, fields in stored.xrange(name)] for name in (one, other))
    numbers = vector_of("Tell me about topicaa")
    for data in (moved, record[:-1], b"", record[:20] + bytes(len(record) - 20)):
        stored.xadd(one, {"v": data})
    stored.xadd(one, {"other": b"fields"})
    async with router_before(two) as harness:
        for group in ("faq", "other"):
            await send(harness, body_of("Tell me about topiccc"), X_Task_Group=group)
        rows = samples((await harness.admin("GET", "/metrics"))[1])["warmpath_router_response_cache_store_errors_total"]
        entries = [value for _, value in await metrics(harness, "index_entries")]

    assert not any(numbers.astype(kind).tobytes()[:16] in record for kind in ("<f2", "<f4", "<f8"))
    assert rows == [({"kind": "invalid_vector"}, 5)]
    assert entries == [2, 2]


async def test_a_purge_removes_the_shared_vectors_of_its_task_group(two, stored):
    async with router_before(two) as harness:
        for group in ("faq", "other"):
            await send(harness, body_of("Tell me about topicaa"), X_Task_Group=group)
        caches = harness.caches
        kept = []
        for dry_run in (True, False):
            await caches.purge_store(CachePurge(pool="chat", group="faq", namespace="", dry_run=dry_run))
            kept.append(len(streams(stored)))

    assert kept == [2, 1]


async def test_shared_vectors_are_bounded(stored):
    store, batches = store_module.Store(os.environ["WARMPATH_ROUTER_CACHE_URL"]), []
    index = VectorIndex(max_entries=10)
    writer = SharedVectors("vectors", SECRET, store, VectorIndex(max_entries=10), lambda: None)
    for at in range(MAX_UNSHARED + 44):
        writer.add(b"scope", f"entry-{at}", np.full(2, at, dtype=np.float32), time() + 60)
    await writer.share()
    length = stored.xlen("vectors")
    await SharedVectors("vectors", SECRET, store, index, lambda: batches.append(len(index))).share()
    await store.close()

    assert 10 <= length <= 10 + 100  # a stream is cut between nodes of 100
    assert len(batches) == length // BATCH + 1
    assert max(batches) == 10


async def test_a_shared_vector_that_has_expired_or_is_of_another_model_is_not_added(stored):
    store, index = store_module.Store(os.environ["WARMPATH_ROUTER_CACHE_URL"]), VectorIndex(max_entries=10)
    vectors = SharedVectors("vectors", SECRET, store, index, lambda: None)
    index.put(b"known", "own", unit(np.ones(3)).astype(np.float32), time() + 60, time())
    vectors.add(b"known", "of another model", np.ones(2, dtype=np.float32), time() + 60)
    vectors.add(b"known", "expired", np.ones(3, dtype=np.float32), time() - 1)
    vectors.add(b"known", "good", np.ones(3, dtype=np.float32), time() + 60)
    await vectors.share()
    names = {match.name for match in await index.nearest(b"known", np.ones(3, dtype=np.float32), time())}
    await store.close()

    assert names == {"own", "good"}


# --- its parts ---


async def test_the_index_is_bounded_and_drops_what_was_used_least_recently():
    index, generator = VectorIndex(max_entries=50), seeded("index")
    vectors = [unit(generator.standard_normal(16)).astype(np.float32) for _ in range(200)]
    for at, vector in enumerate(vectors):
        index.put(b"scope-%d" % (at % 7), f"entry-{at}", vector, 1e12, float(at))
        await index.nearest(b"scope-0", vectors[0], float(at))

    assert len(index) == 50
    assert (await index.nearest(b"scope-0", vectors[0], 300.0))[0] == ("entry-0", 1.0)
    assert all(match.similarity < 1 for match in await index.nearest(b"scope-1", vectors[1], 300.0))
    rows = sum(len(scope.times) for scope in index._scopes.values())
    assert index.bytes == sum(scope.bytes for scope in index._scopes.values()) <= 7 * 1500 + rows * (64 + 16 + 400)
    for at in range(200):
        index.remove(b"scope-%d" % (at % 7), f"entry-{at}")
    assert (len(index), index.bytes) == (0, 0)


async def test_an_index_grows_without_copying_what_it_has_and_finds_vectors_in_all_blocks():
    index, generator = VectorIndex(max_entries=10_000), seeded("blocks")
    vectors = [unit(generator.standard_normal(8)).astype(np.float32) for _ in range(3 * BLOCK_ROWS + 5)]
    for at, vector in enumerate(vectors):
        index.put(b"scope", f"entry-{at}", vector, 1e12, float(at))
        if at == BLOCK_ROWS:
            full = index._scopes[b"scope"].blocks[0]
    blocks = index._scopes[b"scope"].blocks
    places = [0, BLOCK_ROWS - 1, BLOCK_ROWS, 2 * BLOCK_ROWS + 7, len(vectors) - 1]
    found = [(await index.nearest(b"scope", vectors[at], 1e6))[0].name for at in places]
    index.remove(b"scope", "entry-0")  # the last one, of another block, takes its row
    moved = (await index.nearest(b"scope", vectors[-1], 1e6))[0]

    assert blocks[0] is full
    assert [len(block) for block in blocks] == [BLOCK_ROWS] * 4
    assert found == [f"entry-{at}" for at in places]
    assert moved == (f"entry-{len(vectors) - 1}", 1.0)


async def test_an_index_finds_the_nearest_and_forgets_expired_vectors():
    index, generator = VectorIndex(max_entries=1000), seeded("nearest")
    vectors = [unit(generator.standard_normal(32)).astype(np.float32) for _ in range(300)]
    for at, vector in enumerate(vectors):
        index.put(b"scope", str(at), vector, expires_s=100.0 + at, now=0.0)
    query = unit(generator.standard_normal(32)).astype(np.float32)
    similarities = [float(vector @ query) for vector in vectors]
    best = max(range(300), key=similarities.__getitem__)
    best_left = max(range(150, 300), key=similarities.__getitem__)

    assert (await index.nearest(b"scope", query, 0.0))[0] == (str(best), round(similarities[best], 4))
    assert (await index.nearest(b"scope", query, 249.5))[0].name == str(best_left)
    assert await index.nearest(b"scope", query, 1000.0) == []
    assert await index.nearest(b"scope", query[:16], 0.0) == []  # of another model


async def test_a_search_in_a_thread_finds_the_same_while_vectors_come_and_go(monkeypatch):
    index, generator = VectorIndex(max_entries=1000), seeded("thread")
    vectors = [unit(generator.standard_normal(32)).astype(np.float32) for _ in range(200)]
    for at, vector in enumerate(vectors):
        index.put(b"scope", str(at), vector, 1e12, 0.0)
    expected = [await index.nearest(b"scope", vector, 1.0) for vector in vectors]
    monkeypatch.setattr(vectors_module, "MAX_LOOP_NUMBERS", 0)
    assert [await index.nearest(b"scope", vector, 1.0) for vector in vectors] == expected

    async def searched(at: int) -> list[Any]:
        return await index.nearest(b"scope", vectors[at], 1.0)

    searches = [asyncio.create_task(searched(at)) for at in range(0, 200, 2)]
    for at in range(1, 200, 2):
        index.remove(b"scope", str(at))
        await asyncio.sleep(0)
    for matches in await asyncio.gather(*searches):
        for name, similarity in matches:
            assert any(similarity == round(float(vectors[int(name)] @ vectors[at]), 4) for at in range(0, 200, 2))


async def test_an_index_that_shrinks_keeps_the_vectors_used_last():
    index, generator = VectorIndex(max_entries=1000), seeded("shrink")
    vectors = [unit(generator.standard_normal(32)).astype(np.float32) for _ in range(100)]
    for at, vector in enumerate(vectors):
        index.put(b"scope", str(at), vector, 1e12, float(at))
    before = index.bytes
    index.shrink()

    assert (len(index), index.bytes < 0.6 * before) == (50, True)
    assert [(await index.nearest(b"scope", vectors[at], 200.0))[0] for at in (50, 99)] == [("50", 1.0), ("99", 1.0)]
    assert (await index.nearest(b"scope", vectors[49], 200.0))[0].similarity < 0.9
    index.put(b"scope", "new", vectors[0], 1e12, 200.0)
    assert (await index.nearest(b"scope", vectors[0], 200.0))[0] == ("new", 1.0)
    while len(index):
        index.shrink()
    assert index.bytes == 0


async def test_the_memory_of_all_indexes_is_bounded(two, monkeypatch):
    monkeypatch.setattr(semantic_module, "INDEX_BYTES", 20_000)
    async with router_before(two, SHADOW) as harness:
        for at in range(40):
            await send(
                harness, body_of(f"About topicaa {at}", max_tokens=at + 1), X_Task_Group=("faq", "other")[at % 2]
            )
        sizes = [value for _, value in await metrics(harness, "index_bytes")]

    assert 15_000 < sum(sizes) <= 20_000
    assert min(sizes) > 5_000


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("Yes.", "yes", True),
        ("The answer\nis 42", "the answer is *42*!", True),
        ("a + b", "a - b", None),
        ("It costs 5 euros", "It costs 6 euros", False),
        ("-5 degrees", "5 degrees", False),
        ("On 3 May, 12 people", "12 people on 3 May", None),
        ("Paris", "London", None),
        ("", "", True),
    ],
)
def test_answers_are_compared_by_text_before_their_embeddings_are(one, other, expected):
    assert compare(one, other) is expected


def test_answers_contain_tool_calls_and_no_reasoning():
    call = {"id": "x", "type": "function", "function": {"name": "pay", "arguments": '{"b": 1, "a": 2}'}}
    message = {"role": "assistant", "content": "Hm", "reasoning": "secretly", "tool_calls": [call]}
    chat = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
    blocks = [{"type": "thinking", "thinking": "secretly"}, {"type": "text", "text": "Hm"}]
    tool = {"type": "tool_use", "id": "y", "name": "pay", "input": {"a": 2, "b": 1}}
    anthropic = json.dumps({"type": "message", "content": [*blocks, tool]}).encode()

    expected = 'Hm\n["pay",{"a":2,"b":1}]'
    assert answer_of(b"/v1/chat/completions", chat, is_stream=False) == expected
    assert answer_of(b"/v1/messages", anthropic, is_stream=False) == expected
    assert answer_of(b"/v1/messages", b"[]", is_stream=False) is None
    assert answer_of(b"/v1/messages", b"data: {", is_stream=True) is None


def test_intervals_and_buckets():
    assert wilson_interval(0, 0) == (0, 1)
    assert wilson_interval(200, 200) == pytest.approx((0.9812, 1), abs=1e-4)
    assert wilson_interval(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert [bucket_of(value) for value in (0.7, 0.7099, 0.95, 0.9499, 0.29 + 0.7, 1.0)] == [
        "0.70",
        "0.70",
        "0.95",
        "0.94",
        "0.99",
        "1.00",
    ]


# --- configuration ---


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        ({"embedding_pool": "nowhere"}, "embedding_pool", "no pool is named 'nowhere'"),
        ({"embedding_pool": "chat"}, "embedding_model", "pool 'chat' has no model 'embedder'"),
        ({"embedding_model": "tiny"}, "embedding_model", "pool 'vectors' has no model 'tiny'"),
        ({"embedding_model": "unknown"}, "embedding_model", "pool 'vectors' has no model 'unknown'"),
    ],
)
async def test_a_configuration_names_an_embedding_model_of_the_pool(two, change, path, reason):
    found = fleet(two, msgspec.structs.replace(SHADOW, **change))
    with pytest.raises(ConfigError, match=reason) as raised:
        load_snapshot(dump_snapshot(found, 1).document)
    assert raised.value.path == f"$.pools[0].groups[0].semantic_cache.{path}"


async def test_a_configuration_needs_the_exact_cache_and_the_path_of_embeddings(two):
    with pytest.raises(ConfigError, match="no response_cache"):
        load_snapshot(dump_snapshot(fleet(two, SHADOW, exact=None), 1).document)
    found = fleet(two, SHADOW)
    pools = found.pools[0], msgspec.structs.replace(found.pools[1], paths=("/v1/score",))
    with pytest.raises(ConfigError, match="does not serve /v1/embeddings"):
        load_snapshot(dump_snapshot(msgspec.structs.replace(found, pools=pools), 1).document)


async def test_a_router_without_numpy_rejects_the_configuration(two, monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)  # an import fails
    async with routed(fleet(two, None)) as harness:
        status, answer = await harness.push(fleet(two, SHADOW), 2)

    assert status == 422
    assert "install warmpath[semantic]" in json.dumps(answer)


async def test_evidence_and_index_survive_a_configuration_that_does_not_concern_them(two):
    async with router_before(two) as harness:
        await send(harness, body_of("About topicaa"))
        trust(harness)
        await harness.push(fleet(two, SERVE, exact=ResponseCache(ttl_s=60)), 2)
        same = (await send(harness, body_of("Say more about topicaa"))).cache
        await harness.push(fleet(two, SERVE, exact=ResponseCache(version="2")), 3)
        states = await state(harness)

    assert (same, states) == ("hit", "collecting")


async def test_what_was_learnt_in_shadow_is_served_from_at_once(two):
    shadow = msgspec.structs.replace(SERVE, mode=SemanticMode.SHADOW)
    async with router_before(two, shadow) as harness:
        for at in range(25):
            await send(harness, body_of(f"About topicaa {at}"))
        states = [await state(harness)]
        await harness.push(fleet(two, SERVE), 2)
        states.append(await state(harness))
        served = (await send(harness, body_of("Say more about topicaa"))).cache
        await harness.push(fleet(two, msgspec.structs.replace(SERVE, threshold=0.91)), 3)
        states.append(await state(harness))
        ((_, entries),) = await metrics(harness, "index_entries", group="faq")

    assert (states, served) == (["shadow", "serving", "collecting"], "hit")
    assert entries == 25  # are kept, while the checks start anew at another threshold
