"""The picker's side of external processing, with streams that Envoy would send."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import tracemalloc
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from backports import zstd
from grpc import aio
from msgspec.structs import replace

from routing.http.tls import TlsFiles
from routing.observability.decision_log import DecisionRing
from routing.picker.messages import ProcessingRequest
from routing.picker.replies import CHUNK_BYTES
from routing.picker.service import EXTERNAL_PROCESSOR, Picker
from routing.schema import (
    ConcurrencyConfig,
    Limits,
    LowestCostSettings,
    PrefixHashSettings,
    ReplicaConfig,
)
from routing.settings import STATE_URL
from routing.sharing import exchange, transports, view
from routing.types import TargetId
from tests.fakes.certificates import Authority
from tests.fakes.replica import FakeReplica, fake_replicas, sse
from tests.routing.picker.streams import (
    BUFFERED,
    ENDPOINT,
    STREAMED,
    EnvoyStream,
    connected,
    fields_of,
    fleet,
    head,
    health,
    pairs,
    picking,
    replicas,
)
from tests.routing.proxy.harness import (
    BODY,
    DEADLINE_S,
    KEY,
    Harness,
    api_key,
    chat_body,
    config,
    routed,
    with_canary,
    with_keys,
)

USAGE = {"prompt_tokens": 4310, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4096}}
PLAIN = json.dumps({"choices": [{"finish_reason": "stop"}], "usage": USAGE}).encode()
TOKEN, DONE = sse({"choices": [{"delta": {"content": "word"}}]}), sse("[DONE]")
USAGE_EVENT = sse({"choices": [], "usage": USAGE})
STREAM = chat_body(stream=True)
EVENTS = "text/event-stream"


def endpoint(replica: FakeReplica) -> str:
    return f"127.0.0.1:{replica.port}"


async def decisions(harness: Harness) -> list[dict[str, Any]]:
    await harness.at_rest()
    _, page = await harness.admin("GET", "/admin/decisions")
    return page["decisions"]


async def test_header_and_metadata_name_the_same_endpoints_once_each():
    three = replicas()
    async with picking(fleet(three), fallbacks=8) as (_, channel):
        picked = await EnvoyStream(channel).request(headers=[(ENDPOINT, "10.9.9.9:1")])

    assert picked.fields[ENDPOINT] == picked.metadata
    assert sorted(picked.endpoints) == sorted(map(endpoint, three))
    assert picked.body == BODY


async def test_the_number_of_fallbacks_is_a_setting():
    async with picking(fleet(replicas()), fallbacks=0) as (_, channel):
        picked = await EnvoyStream(channel).request()

    assert len(picked.endpoints) == 1


async def test_choices_are_those_of_the_router():
    three = replicas()
    whole = fleet(three, settings=PrefixHashSettings(slack_s=60))
    by_name = {three[number].name: endpoint(three[number]) for number in range(3)}
    async with picking(whole, fallbacks=2) as (harness, channel):
        for number in range(8):
            body = chat_body(text=f"Prompt {number}. " * 50)
            explained = {"path": "/v1/chat/completions", "body": json.loads(body)}
            _, explanation = await harness.admin("POST", "/admin/explain", json=explained)
            picked = await EnvoyStream(channel).request(body)
            assert picked.endpoints[0] == by_name[explanation["replica"]]


async def test_fallbacks_do_not_take_turns_of_round_robin():
    three = replicas()
    async with picking(fleet(three), fallbacks=2) as (_, channel):
        first = [(await EnvoyStream(channel).request()).endpoints[0] for _ in range(6)]

    assert sorted(first) == sorted(2 * [endpoint(replica) for replica in three])


async def test_a_subset_without_an_eligible_replica_gets_503():
    three = replicas()
    async with picking(fleet(three)) as (harness, channel):
        for subset in ([], ["127.0.0.1:9"], ["no endpoint"]):
            picked = await EnvoyStream(channel).request(subset=subset)
            assert picked.status == 503
        assert (await EnvoyStream(channel).request(subset=[endpoint(three[2])])).endpoints == [endpoint(three[2])]
        assert harness.router.services.in_flight == 1


async def test_an_address_of_ipv6_matches_in_any_spelling():
    whole = fleet(replicas(2))
    members = (ReplicaConfig(name="six", url="http://[fd00::1]:8000"), *whole.pools[0].replicas)
    six = replace(whole, pools=(replace(whole.pools[0], replicas=members),))
    async with picking(six) as (_, channel):
        picked = await EnvoyStream(channel).request(subset=["[FD00:0::1]:8000"])

    assert picked.endpoints == ["[fd00::1]:8000"]


async def test_replicas_that_envoy_cannot_reach_by_address_are_never_chosen(caplog):
    whole = fleet(replicas(1))
    urls = ("http://gpu-1:8000", "https://10.0.0.1:8000", "http://10.0.0.2:8000/base")
    others = tuple(ReplicaConfig(name=f"other-{number}", url=url) for number, url in enumerate(urls))
    members = (*whole.pools[0].replicas, *others)
    async with picking(replace(whole, pools=(replace(whole.pools[0], replicas=members),)), fallbacks=8) as (_, channel):
        for _ in range(4):
            assert (await EnvoyStream(channel).request()).endpoints == ["127.0.0.1:1"]

    logged = [record.args for record in caplog.records if "replica_not_pickable" in record.getMessage()]
    assert len(logged) == 3


async def test_a_large_body_comes_back_in_chunks_and_its_trailers_follow():
    body = chat_body(text="0123456789" * 40_000)
    async with picking(fleet(replicas())) as (harness, channel):
        picked = await EnvoyStream(channel).request(body, chunks=7, has_trailers=True)

        assert picked.body == body
        assert max(map(len, picked.chunks)) == CHUNK_BYTES
        assert picked.replies[-1].HasField("request_trailers")
        ends = [reply.request_body.response.body_mutation.streamed_response.end_of_stream for reply in picked.replies]
        assert not any(ends)
        assert harness.router.unfinished_body_bytes == 0


async def test_a_buffered_body_is_replaced_only_if_it_changed():
    async with picking(fleet(replicas())) as (_, channel):
        same = await EnvoyStream(channel).request(mode=BUFFERED, response_mode=STREAMED)
        changed = await EnvoyStream(channel).request(STREAM, mode=BUFFERED, response_mode=STREAMED)
        without_filter = await EnvoyStream(channel).request(STREAM, mode=BUFFERED, response_mode=BUFFERED)

    assert (same.new_body, "content-length" in same.fields) == (b"", False)
    assert json.loads(changed.new_body)["stream_options"] == {"include_usage": True}
    assert changed.fields["content-length"] == str(len(changed.new_body))
    assert without_filter.new_body == b""
    assert same.metadata == same.fields[ENDPOINT]


async def test_bodies_that_are_not_sent_whole_are_rejected():
    async with picking(fleet(replicas())) as (_, channel):
        stream = EnvoyStream(channel)
        await stream.send(request_headers={"headers": head(b"/v1/chat/completions")}, protocol_config={})
        assert (await stream.read()).immediate_response.status.code == 500
        assert await stream.read() is None


async def test_usage_and_prediction_are_recorded():
    async with picking(fleet(replicas(), settings=LowestCostSettings())) as (harness, channel):
        body = chat_body(text="A long prompt. " * 400)
        for _ in range(2):
            stream = EnvoyStream(channel)
            await stream.request(body)
            await stream.response(PLAIN)
            await stream.end()
        first, second = await decisions(harness)

    assert (first["hit_tokens"], first["cached_tokens"], first["generated_tokens"]) == (0, 4096, 3)
    assert second["replica"] == first["replica"]
    assert second["hit_tokens"] > 1000
    assert first["ttft_s"] is None


async def test_the_usage_chunk_that_the_client_did_not_ask_for_is_removed():
    async with picking(fleet(replicas())) as (harness, channel):
        stream = EnvoyStream(channel)
        assert b"include_usage" in (await stream.request(STREAM)).body
        _, passed = await stream.response(TOKEN, USAGE_EVENT[:20], USAGE_EVENT[20:] + DONE, kind=EVENTS)
        (decision,) = await decisions(harness)

    assert passed == TOKEN + DONE
    assert (decision["prompt_tokens"], decision["streamed"]) == (4310, True)
    assert decision["ttft_s"] is not None


async def test_without_full_duplex_each_part_of_a_response_gets_one_reply():
    async with picking(fleet(replicas())) as (harness, channel):
        stream, replies = EnvoyStream(channel), []
        await stream.request(STREAM, mode=BUFFERED, response_mode=STREAMED)
        await stream.send(response_headers={"headers": pairs([(":status", "200"), ("content-type", EVENTS)])})
        await stream.read()
        for number, piece in enumerate((TOKEN, USAGE_EVENT, DONE)):
            await stream.send(response_body={"body": piece, "end_of_stream": number == 2})
            replies.append((await stream.read()).response_body.response.body_mutation)
        (decision,) = await decisions(harness)

    assert [(reply.body, reply.clear_body) for reply in replies] == [(b"", False), (b"", True), (b"", False)]
    assert decision["prompt_tokens"] == 4310


async def test_a_response_whose_body_is_not_sent_ends_with_its_stream():
    async with picking(fleet(replicas())) as (harness, channel):
        stream = EnvoyStream(channel)
        assert (await stream.request(STREAM, response_mode=0)).body == STREAM
        await stream.send(response_headers={"headers": pairs([(":status", "200")])})
        await stream.read()
        await stream.end()
        (decision,) = await decisions(harness)
        _, metrics = await harness.admin("GET", "/metrics")

    assert (decision["status"], decision["prompt_tokens"]) == (200, None)
    assert 'outcome="ok"} 1' in metrics


async def test_an_engine_that_rejects_the_usage_request_is_not_asked_again():
    async with picking(fleet(replicas(1))) as (_, channel):
        stream = EnvoyStream(channel)
        await stream.request(STREAM)
        await stream.response(b'{"error":{"message":"stream_options: unknown"}}', status=400)
        assert (await EnvoyStream(channel).request(STREAM)).body == STREAM


async def test_a_response_counts_at_the_replica_that_served_it():
    three = replicas()
    async with picking(fleet(three), fallbacks=2) as (harness, channel):
        stream = EnvoyStream(channel)
        picked = await stream.request()
        names = {endpoint(replica): replica.name for replica in three}
        first, second, third = (names[item] for item in picked.endpoints)
        assert harness.loads.load(first).running == 1
        await stream.send(
            response_headers={"headers": pairs([(":status", "200")])},
            attributes={
                "envoy.filters.http.ext_proc": {"fields": {"upstream.address": {"string_value": picked.endpoints[2]}}}
            },
        )
        fields = fields_of((await stream.read()).response_headers.response)
        loads = [harness.loads.load(name).running for name in (first, second, third)]
        await stream.send(response_body={"body": PLAIN, "end_of_stream": True})
        (decision,) = await decisions(harness)
        _, metrics = await harness.admin("GET", "/metrics")

    assert (fields["x-warmpath-replica"], loads) == (third, [0, 0, 1])
    assert (decision["replica"], decision["retries"]) == (third, 2)
    for failed in (first, second):
        assert f'warmpath_router_retries_total{{pool="chat",replica="{failed}",cause="proxy"}} 1' in metrics


async def test_a_replica_that_envoy_chose_by_itself_gets_the_response_counted():
    three = replicas()
    async with picking(fleet(three), fallbacks=0) as (harness, channel):
        stream = EnvoyStream(channel)
        (first,) = (await stream.request()).endpoints
        other = next(replica for replica in three if endpoint(replica) != first)
        fields, _ = await stream.response(PLAIN, served=endpoint(other))
        (decision,) = await decisions(harness)

    assert (fields["x-warmpath-replica"], decision["replica"], decision["retries"]) == (other.name, other.name, 1)


async def test_a_response_from_elsewhere_counts_at_no_replica():
    async with picking(fleet(replicas())) as (harness, channel):
        stream = EnvoyStream(channel)
        await stream.request()
        fields, passed = await stream.response(PLAIN, served="10.1.1.1:80")
        assert (fields, passed, await decisions(harness)) == ({}, PLAIN, [])


async def test_replicas_that_keep_failing_are_ejected():
    three = replicas()
    async with picking(fleet(three, settings=PrefixHashSettings(slack_s=60)), fallbacks=2) as (harness, channel):
        first = (await EnvoyStream(channel).request()).endpoints[0]
        for _ in range(5):
            stream = EnvoyStream(channel)
            picked = await stream.request()
            assert picked.endpoints[0] == first
            await stream.response(PLAIN, served=picked.endpoints[1])
        assert (await EnvoyStream(channel).request()).endpoints[0] != first
        assert list(harness.breakers.ejections.values()) == [1]


@pytest.mark.parametrize("ends", ["half-close", "cancel"])
async def test_a_stream_that_ends_early_releases_the_load(ends):
    async with picking(fleet(replicas())) as (harness, channel):
        stream = EnvoyStream(channel)
        await stream.request(STREAM)
        await stream.send(response_headers={"headers": pairs([(":status", "200"), ("content-type", EVENTS)])})
        await stream.read()
        await stream.send(response_body={"body": TOKEN})
        await stream.read()
        assert harness.router.services.in_flight == 1
        if ends == "cancel":
            stream.cancel()
        else:
            await stream.end()
        (decision,) = await decisions(harness)
        _, metrics = await harness.admin("GET", "/metrics")

    assert decision["latency_s"] is None
    assert 'outcome="cancelled"} 1' in metrics


async def test_streams_leave_nothing_behind_however_they_end():
    async with picking(fleet(replicas()), fallbacks=2) as (harness, channel):
        harness.router.services.decisions = DecisionRing(max_records=5)

        async def run(number: int) -> None:
            stream = EnvoyStream(channel)
            picked = await stream.request(STREAM)
            if number % 4 == 0:
                stream.cancel()
                return
            if number % 4 == 1:
                served = picked.endpoints[-1] if number == 1 else picked.endpoints[0]
                await stream.response(TOKEN, USAGE_EVENT, DONE, kind=EVENTS, served=served)
            await stream.end()

        objects = []
        for _ in range(3):
            await asyncio.gather(*map(run, range(40)))
            await harness.at_rest()
            gc.collect()
            objects.append(len(gc.get_objects()))

    assert objects[2] - objects[1] < 40  # less than one for each stream


async def test_a_queued_request_is_admitted_in_turn_unless_its_stream_has_ended():
    one_at_a_time = ConcurrencyConfig(max_running=1, max_waiting=9, max_wait_s=60)
    async with picking(fleet(replicas(), concurrency=one_at_a_time)) as (harness, channel):
        services = harness.router.services
        running, left = EnvoyStream(channel), EnvoyStream(channel)
        await running.request()
        await left.send(request_headers={"headers": head(b"/v1/chat/completions")})
        await left.send(request_body={"body": BODY, "end_of_stream": True})
        await harness.until(lambda: services.in_flight == 2, "the second request")
        waiting = asyncio.create_task(EnvoyStream(channel).request())
        await harness.until(lambda: services.in_flight == 3, "the third request")
        await left.end()
        await harness.until(lambda: services.in_flight == 2, "the end of the second request")
        await running.response(PLAIN)
        assert (await waiting).endpoints


async def test_a_body_that_is_too_large_is_rejected_before_its_end():
    async with picking(fleet(replicas(), limits=Limits(max_body_bytes=1024))) as (harness, channel):
        stream = EnvoyStream(channel)
        await stream.send(request_headers={"headers": head(b"/v1/chat/completions")})
        await stream.send(request_body={"body": b"x" * 2000})
        assert (await stream.read()).immediate_response.status.code == 413
        assert await stream.read() is None
        assert harness.router.unfinished_body_bytes == 0


async def test_a_missing_key_is_rejected_before_the_body_and_a_valid_one_is_not_forwarded():
    whole = with_keys(replicas(), api_key(tenant="acme"))
    keyed = tuple(replace(replica, api_key="sk-engine") for replica in whole.pools[0].replicas)
    whole = replace(whole, pools=(replace(whole.pools[0], replicas=keyed),))
    async with picking(whole) as (_, channel):
        stream = EnvoyStream(channel)
        await stream.send(request_headers={"headers": head(b"/v1/messages")})
        rejected = (await stream.read()).immediate_response
        stream = EnvoyStream(channel)
        await stream.send(request_headers={"headers": head(b"/health", method="GET"), "end_of_stream": True})
        alive = (await stream.read()).immediate_response
        picked = await EnvoyStream(channel).request(headers=[("authorization", f"Bearer {KEY}"), ("api-key", "x")])

    assert (rejected.status.code, json.loads(rejected.body)["type"]) == (401, "error")
    assert alive.status.code == 200
    assert picked.fields["authorization"] == "Bearer sk-engine"
    assert picked.removed == ["api-key"]
    assert len(json.loads(picked.body)["cache_salt"]) == 32


async def test_ranks_are_in_a_header_and_fallbacks_have_the_same():
    whole = fleet(replicas())
    first, *rest = whole.pools[0].replicas
    members = (replace(first, data_parallel_size=2), replace(rest[0], data_parallel_size=2), rest[1])
    async with picking(replace(whole, pools=(replace(whole.pools[0], replicas=members),)), fallbacks=8) as (_, channel):
        picked = [await EnvoyStream(channel).request() for _ in range(5)]

    assert sorted(item.fields.get("x-data-parallel-rank", "") for item in picked) == ["", "0", "0", "1", "1"]
    assert [len(item.endpoints) for item in picked if "x-data-parallel-rank" in item.fields] == [2, 2, 2, 2]
    assert [len(item.endpoints) for item in picked if "x-data-parallel-rank" not in item.fields] == [1]


async def test_a_request_without_a_body_gets_its_endpoint_with_the_headers():
    async with picking(fleet(replicas())) as (_, channel):
        picked = await EnvoyStream(channel).request(b'{"model":"tiny","input":"Hi"}', path=b"/v1/responses")
        replies = []
        for name in (json.loads(b"".join(picked.chunks))["request_id"].encode(), b"resp_1"):
            stream = EnvoyStream(channel)
            message = {"headers": head(b"/v1/responses/" + name, method="GET"), "end_of_stream": True}
            await stream.send(request_headers=message)
            replies.append(await stream.read())

    assert fields_of(replies[0].request_headers.response)[ENDPOINT] == picked.fields[ENDPOINT]
    assert replies[1].immediate_response.status.code == 404


async def test_a_body_that_another_process_reads_is_placed_too():
    async with picking(fleet(replicas(), models=("tiny",))) as (_, channel):
        picked = await EnvoyStream(channel).request(chat_body(text="x" * 300_000))
        malformed = await EnvoyStream(channel).request(b"[" * 300_000)

    assert len(picked.endpoints) == 1
    assert malformed.status == 400


async def test_a_large_body_is_kept_until_its_replica_is_chosen_and_its_prompt_until_the_first_token():
    body = chat_body(text="x" * (4 << 20))
    async with picking(fleet(replicas(), models=("tiny",))) as (harness, channel):
        streams = [EnvoyStream(channel) for _ in range(5)]
        await streams[0].request(body)  # starts the process that reads large bodies
        gc.collect()
        tracemalloc.start()
        try:
            for stream in streams[1:]:
                await stream.request(body)
            gc.collect()
            kept_bodies = [tracemalloc.get_traced_memory()[0] / len(body)]
            for stream in streams[1:]:
                await stream.send(response_headers={"headers": pairs([(":status", "200"), ("content-type", EVENTS)])})
                await stream.read()
                await stream.send(response_body={"body": TOKEN})
                await stream.read()
            gc.collect()
            kept_bodies.append(tracemalloc.get_traced_memory()[0] / len(body))
        finally:
            tracemalloc.stop()
        running = harness.router.services.in_flight

    assert running == 5
    assert kept_bodies[0] < 5  # a retry by Envoy may need the prompts
    assert kept_bodies[1] < 1


async def test_unknown_fields_and_messages_of_newer_envoys_are_ignored():
    future = b"\xaa\x06\x03new"  # field 101
    three = replicas()
    async with picking(fleet(three)) as (_, channel):
        call = channel.stream_stream(f"/{EXTERNAL_PROCESSOR}/Process", response_deserializer=None)()
        message = {"headers": head(b"/v1/models", method="GET"), "end_of_stream": True}
        await call.write(future)
        await call.write(ProcessingRequest(request_headers=message).SerializeToString() + future)
        assert await call.read() is not aio.EOF


async def test_health_follows_the_configuration_and_the_drain():
    names = ("", "readiness", EXTERNAL_PROCESSOR)
    async with picking(None) as (harness, channel):
        assert [await health(channel, name) for name in (*names, "liveness")] == [2, 2, 2, 1]
        assert (await EnvoyStream(channel).request()).status == 503
        await harness.push(fleet(replicas()), 1)
        assert [await health(channel, name) for name in (*names, "liveness")] == [1, 1, 1, 1]
        harness.router.begin_draining()
        assert [await health(channel, name) for name in (*names, "liveness")] == [2, 2, 2, 1]
        with pytest.raises(aio.AioRpcError) as error:
            await health(channel, "nobody")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_streams_that_run_complete_during_a_drain(monkeypatch):
    monkeypatch.setattr("routing.picker.service.LINGER_S", 0.0)
    async with picking(fleet(replicas())) as (harness, channel):
        stream = EnvoyStream(channel)
        await stream.request()
        drain = asyncio.create_task(harness.server.data.drain())
        await harness.until(lambda: harness.router.is_draining, "the drain")
        _, passed = await stream.response(PLAIN)
        await stream.end()
        async with asyncio.timeout(20):
            await drain
    assert passed == PLAIN


async def test_a_canary_is_named_in_the_response():
    async with fake_replicas(2) as two, picking(with_canary(two, share=1.0)) as (_, channel):
        stream = EnvoyStream(channel)
        await stream.request()
        fields, _ = await stream.response(PLAIN)

    assert fields["x-warmpath-revision"] == "2"


async def test_the_port_speaks_tls_with_the_newest_certificate(tmp_path):
    authority = Authority(tmp_path)
    first, second = authority.issue("first"), authority.issue("second")
    http2 = authority.client()
    http2.set_alpn_protocols(["h2"])
    files = TlsFiles(str(first.path), str(first.key))
    async with routed(fleet(replicas()), make=Picker, tls=files) as harness:
        async with connected(harness.port, grpc.ssl_channel_credentials(authority.path.read_bytes())) as channel:
            assert (await EnvoyStream(channel).request()).endpoints
        first.path.write_bytes(second.path.read_bytes())
        first.key.write_bytes(second.key.read_bytes())
        harness.server.reload()
        async with harness.connect(http2) as client:
            assert client.seen_serial == second.serial


# --- bodies in gzip and zstd --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, BUFFERED], ids=["duplex", "buffered"])
@pytest.mark.parametrize(("coding", "encode"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
async def test_the_replica_gets_the_decoded_body(coding, encode, mode):
    modes = {} if mode is None else {"mode": mode, "response_mode": STREAMED}
    async with picking(fleet(replicas())) as (harness, channel):
        picked = await EnvoyStream(channel).request(
            encode(BODY), [("content-encoding", coding), ("Content-Digest", "sha-256=:YQ==:")], **modes
        )
        assert (picked.body if mode is None else picked.new_body) == BODY
        assert picked.removed == ["Content-Digest", "content-encoding"]
        assert mode is None or picked.fields["content-length"] == str(len(BODY))
        assert harness.router.unfinished_body_bytes == 0


async def test_invalid_and_growing_bodies_are_rejected():
    bodies = (("gzip", gzip.compress(bytes(40 << 20)), 413), ("gzip", gzip.compress(BODY)[:-1], 400), ("br", BODY, 415))
    async with picking(fleet(replicas())) as (harness, channel):
        for coding, body, status in bodies:
            picked = await EnvoyStream(channel).request(body, [("content-encoding", coding)])
            assert picked.immediate is not None
            assert picked.immediate.status.code == status
            accepted = [option.header.raw_value for option in picked.immediate.headers.set_headers]
            assert (b"gzip, zstd" in accepted) == (status == 415)
        assert harness.router.unfinished_body_bytes == 0


async def test_a_picker_and_a_router_follow_each_others_prompts_and_loads(valkey, monkeypatch):
    monkeypatch.setenv(STATE_URL, f"unix://{urlsplit(valkey).path}")
    for module, name in (
        (view, "SILENT_S"),
        (exchange, "SILENT_S"),
        (transports, "CONNECT_S"),
        (transports, "REPLACE_S"),
    ):
        monkeypatch.setattr(module, name, 1000.0)  # a busy machine may stall for seconds
    async with fake_replicas(6) as six:
        shared, by_name = config(six, settings=LowestCostSettings()), {it.name: endpoint(it) for it in six}
        async with routed(shared) as router, picking(shared) as (picker, channel), asyncio.timeout(DEADLINE_S):
            views = {harness: harness.router.state_exchange.view for harness in (router, picker)}
            while None in [harness.router.balancer.residency.placed for harness in views]:  # they have found each other
                await asyncio.sleep(0.005)
            found: list[list[str]] = []
            for number in range(8):
                body, stream = chat_body(text=f"Prompt {number}. " * 500), EnvoyStream(channel)
                known = {harness: shared.placed for harness, shared in views.items()}
                turns, chosen = ((router, picker), (picker, router))[number % 2], []
                for harness in turns:
                    if harness is router:
                        chosen.append(by_name[(await router.chat(body)).replica])
                    else:
                        chosen.append((await stream.request(body)).endpoints[0])
                        await stream.response(b"{}")
                        await stream.end()
                    loads = [turns[1].router.balancer.loads.load(TargetId(name)) for name in by_name]
                    while views[turns[1]].placed == known[turns[1]] or any(load.running for load in loads):
                        await asyncio.sleep(0.005)  # until the second one knows what the first one has sent
                found.append(chosen)
            busy = TargetId(six[0].name)
            picker.router.balancer.loads.dispatch(busy, 1000)
            while not router.router.balancer.loads.load(busy).remote_running:
                await asyncio.sleep(0.005)

    assert [first for first, _ in found] == [second for _, second in found]
    assert len({first for first, _ in found}) > 1
