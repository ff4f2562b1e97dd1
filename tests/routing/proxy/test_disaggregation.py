"""Prompts that another replica prefills first: both legs, which requests have one, and where they are placed."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from routing.schema import (
    ConcurrencyConfig,
    ReplicaState,
    RoundRobinSettings,
    RouterConfig,
    TaskGroupConfig,
)
from tests.fakes.replica import FakeReplica, fake_replicas, sse, streaming
from tests.routing.proxy.disaggregated import (
    BOTH,
    DECODE,
    MEMBER,
    PREFILL,
    PREFILL_PARAMETERS,
    TRANSFER_PARAMETERS,
    Gate,
    decoded,
    explained,
    has_parameters,
    last_prefill,
    legs,
    prefilling,
    prompt,
    replica_rows,
    roles,
)
from tests.routing.proxy.harness import BODY, CHAT, config, post, routed
from tests.routing.standin.replica_process import replica_process

COMPLETION = b"/v1/completions"


async def test_a_long_prompt_is_prefilled_by_one_replica_and_decoded_by_another(two):
    body = prompt(max_tokens=9, max_completion_tokens=9, min_tokens=5, temperature=0.5)
    two[1].script = decoded()
    async with routed(roles(two, PREFILL, DECODE)) as harness:
        response = await harness.chat(body, [b"X-Request-Id: mine"])
        await harness.at_rest()
        (prefill,), (decode,) = two[0].calls, two[1].calls
        page = (await harness.admin("GET", "/admin/decisions"))[1]["decisions"][-1]

    assert (response.status, response.replica) == (200, "replica-1")
    assert response.headers["x-warmpath-prefill-replica"] == "replica-0"
    assert json.loads(prefill.body) == json.loads(body) | {
        MEMBER: PREFILL_PARAMETERS, "stream": False, "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1,
    }  # fmt: skip
    assert json.loads(decode.body) == json.loads(body) | {MEMBER: TRANSFER_PARAMETERS}
    assert prefill.header(b"x-request-id") == decode.header(b"x-request-id") == [b"mine"]
    assert (page["replica"], page["retries"], page["prefill"]["outcome"]) == ("replica-1", 0, "used")
    assert page["prefill"]["replica"] == "replica-0"
    assert page["prefill"]["uncached_tokens"] == page["prompt_tokens_estimate"] > 2500
    assert page["prefill"]["duration_s"] > 0
    assert page["cached_tokens"] == 48  # the transferred tokens are none of the cache's


async def test_a_stream_is_prefilled_without_streaming_and_passes_unchanged(two):
    events = [sse({"n": number, "choices": [{}]}) for number in range(3)]
    two[1].script = streaming(*events)
    async with routed(roles(two, PREFILL, DECODE)) as harness:
        response = await harness.chat(prompt(stream=True, stream_options={"continuous_usage_stats": False}))
        await harness.at_rest()
        found = await legs(harness)

    assert response.body == b"".join(events)
    sent = json.loads(two[0].calls[0].body)
    assert (sent["stream"], sent["stream_options"]) == (False, None)
    decode = json.loads(two[1].calls[0].body)
    assert decode[MEMBER] == TRANSFER_PARAMETERS
    assert decode["stream_options"] == {"continuous_usage_stats": False, "include_usage": True}
    assert found == {("replica-0", "used", ""): 1}


async def test_a_completion_is_prefilled_too(two):
    body = json.dumps({"model": "tiny", "prompt": list(range(3000)), "min_tokens": 3}).encode()
    async with routed(roles(two, PREFILL, DECODE)) as harness, harness.connect() as client:
        assert (await client.ask(post(COMPLETION, body))).status == 200

    assert "max_completion_tokens" not in json.loads(two[0].calls[0].body)
    assert json.loads(two[1].calls[0].body) == json.loads(body) | {MEMBER: TRANSFER_PARAMETERS}


SKIPPED: dict[str, tuple[bytes, bytes, str]] = {
    "short": (CHAT, BODY, "short"),
    "several outputs": (CHAT, prompt(n=2), "parameters"),
    "best of several": (COMPLETION, json.dumps({"prompt": "word " * 2500, "best_of": 2}).encode(), "parameters"),
    "echo": (COMPLETION, json.dumps({"prompt": "word " * 2500, "echo": True}).encode(), "parameters"),
    "log probabilities of the prompt": (CHAT, prompt(prompt_logprobs=1), "parameters"),
    "several prompts": (COMPLETION, json.dumps({"prompt": ["word " * 2500] * 2}).encode(), "parameters"),
    "lists of token ids": (COMPLETION, json.dumps({"prompt": [[1] * 3000]}).encode(), "parameters"),
    "a member twice": (CHAT, prompt()[:-1] + b',"seed":1,"seed":2}', "parameters"),
    "responses": (b"/v1/responses", json.dumps({"model": "tiny", "input": "word " * 2500}).encode(), "endpoint"),
    "messages": (b"/v1/messages", prompt(max_tokens=4), "endpoint"),
    "embeddings": (b"/v1/embeddings", json.dumps({"model": "tiny", "input": "word " * 2500}).encode(), "endpoint"),
}


@pytest.mark.parametrize("name", SKIPPED)
async def test_other_requests_go_to_a_decode_replica_at_once(name, two):
    path, body, cause = SKIPPED[name]
    async with routed(roles(two, PREFILL, DECODE)) as harness:
        _, explanation = await explained(harness, body, path)
        response = await harness.send(post(path, body))
        found, record = await legs(harness), await last_prefill(harness)

    assert (response.status, response.replica) == (200, "replica-1")
    assert "x-warmpath-prefill-replica" not in response.headers
    assert two[0].calls == []
    assert two[1].calls[0].body.startswith(body[:-1])  # the router adds the id of a stored response
    assert found == {("", "skipped", cause): 1}
    assert (record["outcome"], record["replica"], record["cause"]) == ("skipped", None, cause)
    assert (explanation["prefill"]["replica"], explanation["prefill"]["skipped"]) == (None, cause)


def without(whole: RouterConfig, state: ReplicaState) -> RouterConfig:
    """With another state of the first replica."""
    pool = whole.pools[0]
    first, *rest = pool.replicas
    return replace(whole, pools=(replace(pool, replicas=(replace(first, state=state), *rest)),))


@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.DISABLED])
async def test_without_an_available_prefill_replica_a_decode_replica_does_all(state, two):
    async with routed(without(roles(two, PREFILL, BOTH), state)) as harness:
        response = await harness.chat(prompt())
        found = await legs(harness)

    assert (response.status, two[0].calls, has_parameters(two[1].calls[0])) == (200, [], False)
    assert found == {("", "skipped", "no_replica"): 1}


async def test_prefill_replicas_get_no_requests_of_clients(three):
    whole = roles(three, PREFILL, DECODE, BOTH, settings=RoundRobinSettings())
    async with routed(whole) as harness:
        seen = [(await harness.chat()).replica for _ in range(4)]
        three[1].kill()
        three[2].kill()
        failed = await harness.chat()

    assert sorted(seen) == ["replica-1", "replica-1", "replica-2", "replica-2"]
    assert failed.status == 502
    assert three[0].calls == []


async def test_decode_replicas_take_turns_although_a_leg_comes_first(three):
    async with routed(roles(three, PREFILL, DECODE, DECODE, settings=RoundRobinSettings())) as harness:
        seen = [(await harness.chat(prompt(str(number)))).replica for number in range(4)]

    assert sorted(seen) == ["replica-1", "replica-1", "replica-2", "replica-2"]


async def test_the_next_turn_needs_no_prefill_leg_where_the_first_was_decoded(two):
    first = json.loads(prompt())
    more = {"role": "assistant", "content": "Hm."}, {"role": "user", "content": "And then?"}
    turn = json.dumps({**first, "messages": [*first["messages"], *more]}).encode()
    async with routed(roles(two, PREFILL, DECODE)) as harness:
        await harness.chat(json.dumps(first).encode())
        _, explanation = await explained(harness, turn)
        await harness.chat(turn)
        record = await last_prefill(harness)

    assert len(two[0].calls) == 1
    assert record["cause"] == explanation["prefill"]["skipped"] == "short"
    assert record["uncached_tokens"] == explanation["prefill"]["uncached_tokens"] < 200
    assert explanation["prefill"]["min_uncached_tokens"] == 2048


async def test_prompts_with_a_common_prefix_are_prefilled_where_it_is_cached():
    async with fake_replicas(6) as six:
        whole = roles(six, PREFILL, PREFILL, PREFILL, PREFILL, DECODE, DECODE, minimum=0)
        for replica in six[:4]:
            replica.script = prefilling(usage={"prompt_tokens": 3000})
        async with routed(whole) as harness:
            for _ in range(6):
                await harness.chat(prompt("same"))
            _, explanation = await explained(harness, prompt("same"))

    counts = [len(replica.calls) for replica in six[:4]]
    assert sorted(counts) == [0, 0, 0, 6]
    assert explanation["prefill"]["replica"] == six[counts.index(6)].name
    assert explanation["prefill"]["hit_tokens"] > 2500


async def test_a_leg_counts_at_both_replicas_and_its_tokens_at_the_one_that_prefills():
    async with fake_replicas(3) as three:
        whole = roles(three, PREFILL, PREFILL, DECODE)
        gate = three[0].script = three[1].script = Gate()
        async with routed(whole) as harness:
            first = asyncio.create_task(harness.chat(prompt("a")))
            await harness.until(lambda: three[0].calls or three[1].calls, "the first leg")
            rows = await replica_rows(harness)
            second = asyncio.create_task(harness.chat(prompt("b")))
            await harness.until(lambda: three[0].calls and three[1].calls, "a leg at each replica")
            gate.opened.set()
            assert {(await first).status, (await second).status} == {200}
            await harness.at_rest()

    loads = {row["name"]: (row["running"], row["waiting_tokens"]) for row in rows}
    busy = loads.pop("replica-0") if loads["replica-0"] != (0, 0) else loads.pop("replica-1")
    assert busy[0] == 1
    assert busy[1] > 2500
    assert sorted(loads.values()) == [(0, 0), (1, 0)]


BY_CLIENT: dict[str, bytes] = {
    "an object": prompt(**{MEMBER: TRANSFER_PARAMETERS}),
    "of a short prompt": BODY[:-1] + b',"kv_transfer_params":{"do_remote_prefill":true}}',
    "with an escaped name": BODY[:-1] + b',"kv\\u005ftransfer_params":{}}',
    "twice": BODY[:-1] + b',"kv_transfer_params":{},"kv_transfer_params":null}',
    "large": prompt("x" * 300_000, **{MEMBER: TRANSFER_PARAMETERS}),
}


@pytest.mark.parametrize("name", BY_CLIENT)
@pytest.mark.parametrize("path", [CHAT, b"/v1/messages"])
async def test_clients_may_not_name_a_host_that_an_engine_connects_to(path, name, two):
    body = BY_CLIENT[name]
    async with routed(roles(two, PREFILL, DECODE)) as harness:
        response = await harness.send(post(path, body))
        status, _ = await explained(harness, body, path)
        await harness.at_rest()

    assert (response.status, two[0].calls, two[1].calls) == (400, [], [])
    assert status == 400


async def test_null_parameters_and_texts_about_them_are_accepted(two):
    async with routed(roles(two, PREFILL, DECODE)) as harness:
        assert (await harness.chat(prompt('"kv_transfer_params": {}', **{MEMBER: None}))).status == 200
        assert (await harness.chat(BODY[:-1] + b',"kv_transfer_params": null}')).status == 200

    assert json.loads(two[1].calls[0].body)[MEMBER] == TRANSFER_PARAMETERS
    assert json.loads(two[1].calls[1].body)[MEMBER] is None


async def test_pools_without_roles_pass_the_parameters_of_clients(two):
    body = prompt(**{MEMBER: TRANSFER_PARAMETERS})
    async with routed(config(two)) as harness:
        response = await harness.chat(body)
        _, page = await harness.admin("GET", "/admin/decisions")
        _, explanation = await explained(harness, body)
        _, text = await harness.admin("GET", "/metrics")

    (call,) = [*two[0].calls, *two[1].calls]
    assert (response.status, call.body) == (200, body)
    assert page["decisions"][0]["prefill"] is explanation["prefill"] is None
    assert "prefill_legs" not in text


async def test_large_bodies_are_changed_by_their_layout(two):
    body = prompt("x" * 400_000, stream=True, stream_options={"include_usage": True}, n=1)
    two[1].script = streaming(sse({"n": 1}))
    async with routed(roles(two, PREFILL, DECODE)) as harness:
        assert (await harness.chat(body)).status == 200

    prefill, decode = (json.loads(replica.calls[0].body) for replica in two)
    assert prefill == json.loads(body) | {
        MEMBER: PREFILL_PARAMETERS, "stream": False, "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1,
        "stream_options": None,
    }  # fmt: skip
    assert decode == json.loads(body) | {MEMBER: TRANSFER_PARAMETERS}


async def test_a_task_group_prefills_with_its_own_replicas(three):
    group = TaskGroupConfig(name="coding", replicas=("replica-1", "replica-2"))
    alone = TaskGroupConfig(name="alone", replicas=("replica-2",))
    async with routed(roles(three, PREFILL, PREFILL, DECODE, groups=(group, alone))) as harness:
        for number in range(3):
            await harness.chat(prompt(str(number)), [b"X-Task-Group: coding"])
        await harness.chat(prompt("alone"), [b"X-Task-Group: alone"])
        found = await legs(harness)

    assert [len(replica.calls) for replica in three] == [0, 3, 4]
    assert found == {("replica-1", "used", ""): 3, ("", "skipped", "no_replica"): 1}


async def test_a_request_occupies_one_place_of_a_concurrency_limit_for_both_legs(two):
    whole = roles(two, PREFILL, DECODE, concurrency=ConcurrencyConfig(max_running=1))
    gate = two[0].script = Gate()
    async with routed(whole) as harness:
        first = asyncio.create_task(harness.chat(prompt("a")))
        await two[0].wait_calls(1)
        second = asyncio.create_task(harness.chat(prompt("b")))
        await harness.until(lambda: harness.router.services.in_flight == 2, "both requests")
        assert len(two[0].calls) == 1
        gate.opened.set()
        assert {(await first).status, (await second).status} == {200}
        await harness.at_rest()

    assert [len(replica.calls) for replica in two] == [2, 2]


async def test_a_minimum_of_the_pool_decides(two):
    async with routed(roles(two, PREFILL, DECODE, minimum=5000)) as harness:
        await harness.chat(prompt())
        assert two[0].calls == []
        assert (await harness.push(roles(two, PREFILL, DECODE, minimum=1), 2))[0] == 200
        await harness.chat(BODY)
        assert len(two[0].calls) == 1


async def test_the_replica_of_a_decode_leg_is_chosen_again_if_it_is_down_by_then(three):
    whole = roles(three, PREFILL, DECODE, DECODE)
    gate = three[0].script = Gate()
    async with routed(whole) as harness:
        _, explanation = await explained(harness, prompt())
        request = asyncio.create_task(harness.chat(prompt()))
        await three[0].wait_calls(1)
        harness.health.mark(explanation["replica"], up=False)
        gate.opened.set()
        response = await request
        await harness.at_rest()

    assert response.status == 200
    assert response.replica != explanation["replica"]
    (decode,) = [*three[1].calls, *three[2].calls]
    assert json.loads(decode.body)[MEMBER] == TRANSFER_PARAMETERS


# --- Stand-in replicas with roles behind a router: the responses are those of a single replica ---


JSON = b"Content-Type: application/json"
FAST = ("--prefill-rate", "200000", "--step-s", "0.002")


def text_of(body: bytes) -> bytes:
    """The text of a response or of a stream."""
    return b"".join(re.findall(rb'"content": ?"([^"]*)"', body))


async def test_many_requests_at_once_are_prefilled_and_decoded_once_each():
    kinds = (PREFILL, PREFILL, DECODE, DECODE)
    members = [FakeReplica(f"{kind.value}-{number}") for number, kind in enumerate(kinds)]
    prompts = [prompt(f"{number} ", max_tokens=12, stream=number % 2 == 1) for number in range(24)]
    with ExitStack() as stack:
        alone = stack.enter_context(replica_process(*FAST))
        fleet = [stack.enter_context(replica_process(*FAST, "--role", kind.value)) for kind in kinds]
        for member, process in zip(members, fleet, strict=True):
            member.port = process.port
        async with routed(roles(members, *kinds)) as harness:
            responses = await asyncio.gather(*(harness.chat(body, [JSON]) for body in prompts))
            await harness.at_rest()
            found, decisions = await legs(harness), harness.decisions
        expected = [alone.send("POST", CHAT.decode(), body, {"Content-Type": "application/json"}) for body in prompts]
        sources = [
            [process.metric("vllm:prompt_tokens_by_source_total", source=source) for process in fleet]
            for source in ("external_kv_transfer", "local_compute")
        ]

    texts = [text_of(response.body) for response in responses]
    assert all(texts)
    assert texts == [text_of(response.body) for response in expected]
    assert {key[1] for key in found} == {"used"}
    assert sum(found.values()) == 24
    assert all(value >= 6 for value in found.values())  # both prefill replicas
    assert sources[0][:2] == [0, 0]
    assert sum(sources[0][2:]) > 24 * 2900
    assert sum(sources[1][2:]) == 24  # the last token of each prompt
    assert all(row["cached_tokens"] < 100 for row in decisions)  # of distinct prompts
    assert {row["replica"] for row in decisions} == {"decode-2", "decode-3"}
