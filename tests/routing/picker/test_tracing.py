"""Spans of requests that Envoy carries, and the trace context that replicas get."""

import json

from tests.fakes.otlp_receiver import PARENT, TRACE, server_and_clients
from tests.routing.picker.streams import EnvoyStream, fleet, picking, replicas

SAMPLED, UNSAMPLED = [("traceparent", f"00-{TRACE}-{PARENT}-{flag}") for flag in ("01", "00")]
USAGE = {"prompt_tokens": 431, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 416}}
ANSWER = json.dumps({"choices": [{"finish_reason": "stop"}], "usage": USAGE}).encode()


async def test_a_picked_request_has_a_server_span_and_a_client_span_that_the_replica_continues(collector):
    async with picking(fleet(replicas())) as (_, channel):
        stream = EnvoyStream(channel)
        picked = await stream.request(headers=[SAMPLED, ("tracestate", "vendor=1")])
        fields, _ = await stream.response(ANSWER, served=picked.endpoints[0])
        await stream.end()

    server, (client,) = server_and_clients(collector)
    assert (server.name, server.trace_id, server.parent_id) == ("POST /v1/chat/completions", TRACE, PARENT)
    assert picked.fields["traceparent"] == f"00-{TRACE}-{client.span_id}-01"
    assert "tracestate" not in picked.removed
    assert (
        server.attributes["warmpath.replica"] == client.attributes["warmpath.replica"] == fields["x-warmpath-replica"]
    )
    assert server.attributes["warmpath.request_id"] == fields["x-request-id"]
    assert server.attributes["http.response.status_code"] == client.attributes["http.response.status_code"] == 200
    assert server.attributes["gen_ai.usage.cache_read.input_tokens"] == 416
    assert (server.attributes["warmpath.outcome"], server.attributes["warmpath.pool"]) == ("ok", "chat")
    assert (server.is_error, client.is_error) == (False, False)


async def test_a_fallback_has_a_span_of_its_own_after_that_of_the_replica_that_failed(collector):
    async with picking(fleet(replicas()), fallbacks=2) as (_, channel):
        stream = EnvoyStream(channel)
        picked = await stream.request(headers=[SAMPLED])
        await stream.response(ANSWER, served=picked.endpoints[2])
        await stream.end()

    server, clients = server_and_clients(collector)
    assert [client.attributes.get("error.type") for client in clients] == ["proxy", "proxy", None]
    assert [client.attributes.get("http.request.resend_count") for client in clients] == [None, 1, 2]
    assert len({client.attributes["warmpath.replica"] for client in clients}) == 3
    assert server.attributes["warmpath.replica"] == clients[-1].attributes["warmpath.replica"]
    assert (server.attributes["warmpath.retries"], server.is_error) == (2, False)


async def test_a_stream_that_envoy_ends_early_is_an_error_of_its_span(collector):
    async with picking(fleet(replicas())) as (_, channel):
        stream = EnvoyStream(channel)
        await stream.request(headers=[SAMPLED])
        await stream.end()

    server, (client,) = server_and_clients(collector)
    assert server.attributes["warmpath.outcome"] == "cancelled"
    assert (server.is_error, client.is_error) == (True, True)


async def test_a_request_without_a_valid_parent_starts_a_trace_without_the_clients_state(collector):
    async with picking(fleet(replicas())) as (_, channel):
        stream = EnvoyStream(channel)
        picked = await stream.request(headers=[("traceparent", "nonsense"), ("tracestate", "vendor=1")])
        await stream.response(ANSWER)
        await stream.end()

    server, (client,) = server_and_clients(collector)
    assert server.parent_id == ""
    assert picked.fields["traceparent"] == f"00-{server.trace_id}-{client.span_id}-01"
    assert "tracestate" in picked.removed


async def test_a_rejected_request_has_only_a_server_span_with_its_status(collector):
    async with picking(fleet(replicas())) as (_, channel):
        stream = EnvoyStream(channel)
        picked = await stream.request(headers=[SAMPLED], subset=[])
        assert picked.status == 503
        await stream.end()

    (server,) = collector.spans
    assert server.attributes["http.response.status_code"] == 503
    assert (server.attributes["warmpath.outcome"], server.is_error) == ("router_error", True)
