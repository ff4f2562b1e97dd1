"""Spans of sampled requests, exported to a collector, and the trace context that replicas get."""

from __future__ import annotations

import json
import logging
import time

import pytest

from routing.observability.tracing import MAX_QUEUED, Span, Tracer
from tests.fakes.otlp_receiver import PARENT, TRACE, server_and_clients
from tests.fakes.replica import answering, streaming
from tests.routing.proxy.disaggregated import DECODE, PREFILL, decoded, prompt, roles
from tests.routing.proxy.harness import BODY, CHAT, config, post, routed
from tests.routing.workers.harness import serving

SAMPLED = f"traceparent: 00-{TRACE}-{PARENT}-01".encode()
UNSAMPLED = f"traceparent: 00-{TRACE}-{PARENT}-00".encode()
USAGE = {"prompt_tokens": 431, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 416}}
ANSWER = json.dumps({"choices": [], "usage": USAGE}).encode()
STREAMED = json.dumps({"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Say it."}]}).encode()


async def test_a_request_has_a_server_span_and_a_client_span_that_the_replica_continues(replica, collector):
    replica.script = streaming(b"data: {}\n\n", b"data: " + ANSWER + b"\n\n")
    async with routed(config([replica])) as harness:
        response = await harness.chat(STREAMED, [SAMPLED, b"tracestate: vendor=1"])
        assert response.status == 200

    server, (client,) = server_and_clients(collector)
    assert (server.name, server.trace_id, server.parent_id) == ("POST /v1/chat/completions", TRACE, PARENT)
    assert (client.name, client.is_error, server.is_error) == ("chat tiny", False, False)
    assert replica.calls[0].header(b"traceparent") == [f"00-{TRACE}-{client.span_id}-01".encode()]
    assert replica.calls[0].header(b"tracestate") == [b"vendor=1"]
    assert server.attributes.pop("gen_ai.server.time_to_first_token") > 0
    assert server.attributes.pop("warmpath.request_id") == response.headers["x-request-id"]
    assert server.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 431,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 416,
        "warmpath.outcome": "ok",
        "warmpath.pool": "chat",
        "warmpath.task_group": "",
        "warmpath.replica": "replica-0",
        "warmpath.decision.reason": "round_robin",
        "warmpath.policy": "everyday",
        "warmpath.policy.revision": 1,
        "warmpath.retries": 0,
    }
    assert client.attributes["gen_ai.usage.cache_read.input_tokens"] == 416
    assert 0 < client.seconds <= server.seconds < 60
    assert (server.resource["service.name"], server.resource["service.instance.id"][:7]) == (
        "warmpath-router",
        "tested/",
    )
    assert b"Say it." not in b"".join(collector.bodies)


async def test_each_attempt_has_a_span_with_the_cause_of_its_failure(two, collector):
    two[0].script, two[1].script = answering(b"{}", status=503), answering(ANSWER)
    async with routed(config(two)) as harness:
        while (await harness.chat()).headers["x-warmpath-replica"] != "replica-1" or not two[0].calls:
            pass  # until the first replica got one
        attempts = [len(item.calls) for item in two]

    retried = next(span for span in collector.spans if span.is_server and span.attributes["warmpath.retries"] == 1)
    first, second = (span for span in collector.spans if span.parent_id == retried.span_id)
    assert (first.attributes["warmpath.replica"], first.is_error) == ("replica-0", True)
    assert first.attributes["error.type"] == "status_503"
    assert (second.attributes["warmpath.replica"], second.is_error) == ("replica-1", False)
    assert second.attributes["http.request.resend_count"] == 1
    assert not retried.is_error
    sent = [call.header(b"traceparent") for item in two for call in item.calls]
    clients = [span for span in collector.spans if not span.is_server]
    assert len(clients) == sum(attempts)
    assert sorted(value for (value,) in sent) == sorted(
        f"00-{span.trace_id}-{span.span_id}-01".encode() for span in clients
    )


@pytest.mark.parametrize(
    ("headers", "environment", "is_traced", "forwarded"),
    [
        pytest.param([], {}, True, "new", id="no parent: by ratio"),
        pytest.param([], {"OTEL_TRACES_SAMPLER_ARG": "0"}, False, None, id="no parent, ratio 0"),
        pytest.param([SAMPLED], {"OTEL_TRACES_SAMPLER_ARG": "0"}, True, "child", id="the parent is sampled"),
        pytest.param([UNSAMPLED], {}, False, "same", id="the parent is not sampled"),
        pytest.param([UNSAMPLED], {"OTEL_TRACES_SAMPLER": "always_on"}, True, "child", id="whatever the parent says"),
        pytest.param([SAMPLED], {"OTEL_TRACES_SAMPLER": "always_off"}, False, "same", id="never"),
        pytest.param([SAMPLED], {"OTEL_SDK_DISABLED": "true"}, False, "same", id="disabled"),
        pytest.param([SAMPLED], {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False, "same", id="off by default"),
        pytest.param([b"traceparent: 00-junk"], {}, True, "new", id="an invalid parent starts a trace"),
        pytest.param([SAMPLED, SAMPLED], {}, True, "new", id="so do two"),
        pytest.param([SAMPLED.replace(TRACE.encode(), b"0" * 32)], {}, True, "new", id="and an id of zeros"),
        pytest.param([SAMPLED.replace(b": 00", b": cc") + b"-more"], {}, True, "child", id="a future version"),
    ],
)
async def test_sampling_follows_the_parent_and_else_the_ratio(
    replica, collector, monkeypatch, headers, environment, is_traced, forwarded
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sent = [*headers, b"TraceState: vendor=1"]
    async with routed(config([replica])) as harness, harness.connect() as client:
        for _ in range(3):  # the head is parsed, then cached
            assert (await client.ask(post(CHAT, BODY, sent))).status == 200

    servers = [span for span in collector.spans if span.is_server]
    assert len(servers) == (3 if is_traced else 0)
    clients = {f"00-{span.trace_id}-{span.span_id}-01".encode() for span in collector.spans if not span.is_server}
    values = [call.header(b"traceparent") for call in replica.calls]
    if forwarded in {"new", "child"}:
        assert {value for (value,) in values} == clients
        assert {span.trace_id == TRACE for span in servers} == {forwarded == "child"}
    else:
        assert values == 3 * [[header.partition(b": ")[2] for header in headers]]
    states = {tuple(call.header(b"tracestate")) for call in replica.calls}
    assert states == ({()} if forwarded == "new" else {(b"vendor=1",)})


async def test_a_request_that_no_replica_gets_has_a_server_span_alone(replica, collector):
    async with routed(config([replica], models=("other",))) as harness:
        assert (await harness.chat()).status == 404
        replica.script = answering(b"{}", status=500)
        assert (await harness.chat(BODY.replace(b"tiny", b"other"))).status == 500

    unplaced, (client,), failed = collector.spans[0], collector.spans[1:2], collector.spans[2]
    assert (unplaced.attributes["http.response.status_code"], unplaced.is_error) == (404, False)
    assert (client.attributes["error.type"], failed.attributes["error.type"]) == ("500", "500")
    assert failed.is_error


async def test_a_prefill_leg_is_an_attempt(two, collector):
    pool = roles(two, PREFILL, DECODE)
    two[1].script = decoded()
    async with routed(pool) as harness:
        assert (await harness.chat(prompt())).status == 200

    _, (leg, attempt) = server_and_clients(collector)
    assert (leg.attributes["warmpath.leg"], leg.attributes["warmpath.replica"]) == ("prefill", "replica-0")
    assert attempt.attributes["warmpath.replica"] == "replica-1"
    for span, item in ((leg, two[0]), (attempt, two[1])):
        assert item.calls[0].header(b"traceparent") == [f"00-{span.trace_id}-{span.span_id}-01".encode()]


async def test_credentials_of_the_collector_are_sent_and_never_logged(replica, collector, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret,malformed s3cret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    caplog.set_level(logging.DEBUG)
    async with routed(config([replica])) as harness:
        await harness.chat()
    assert collector.authorizations == ["Bearer s3cret"]

    collector.status = 401
    async with routed(config([replica])) as harness:
        await harness.chat()
    assert "span_export_failed" in caplog.text
    assert "s3cret" not in caplog.text


async def test_a_collector_that_hangs_costs_clients_nothing(replica, collector, monkeypatch):
    monkeypatch.setattr("routing.observability.span_export.CLOSE_S", 0.2)
    monkeypatch.setattr("routing.observability.span_export.EVERY_S", 0.01)
    collector.status = None
    async with routed(config([replica])) as harness:
        for _ in range(20):
            assert (await harness.chat()).status == 200
        _, text = await harness.admin("GET", "/metrics")

    assert "warmpath_router_spans_exported_total 0\n" in text


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"},
        {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://127.0.0.1:9", "OTEL_EXPORTER_OTLP_CERTIFICATE": "/none"},
    ],
)
async def test_a_router_serves_without_traces_if_their_settings_are_invalid(
    replica, collector, monkeypatch, caplog, environment
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    async with routed(config([replica])) as harness:
        assert (await harness.chat()).status == 200

    assert "tracing_unavailable reason=" in caplog.text


def test_the_queue_is_bounded_and_counts_what_it_drops():
    tracer = Tracer(1.0)
    for _ in range(MAX_QUEUED + 5):
        tracer.add(Span("a", 1, 2, 3, time.time_ns()))

    assert (len(tracer.queue), tracer.dropped) == (MAX_QUEUED, 5)
    assert 'warmpath_router_spans_dropped_total{cause="queue_full"} 5' in list(tracer.lines())


async def test_every_worker_exports_and_counts_its_spans(replica, collector, tmp_path):
    async with serving(tmp_path, config([replica]), "--workers=2") as router:
        for _ in range(6):
            assert (await router.chat()).status == 200

        async def exported() -> bool:
            _, text = await router.admin("GET", "/metrics")
            return "warmpath_router_spans_exported_total 12\n" in text

        await router.until(exported, "all spans to be exported")

    assert len(collector.spans) == 12
