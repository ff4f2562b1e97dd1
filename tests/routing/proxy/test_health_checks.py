"""Health checks, and the engine counters that distinguish a stall from long work."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from routing import engines
from routing.balancing.replicas import HealthRegistry
from routing.engines import ENGINES
from routing.health.checks import MIN_INTERVAL_S, CheckTarget, HealthChecks, check_once
from routing.health.engine_probe import (
    EngineCounters,
    NoCounters,
    ProbeResult,
    parse_counters,
    probe_engine,
    read_counters,
)
from routing.schema import HealthCheck
from routing.types import ReplicaId
from routing.upstream.client import ResponseError, fetch
from routing.upstream.pool import Address
from tests.fakes.replica import STREAM_HEAD, FakeReplica, Script, chunk, fake_replicas, raw, sse
from tests.routing.building import until


@pytest.mark.parametrize(
    ("response", "finding"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", None),
        (b"HTTP/1.0 200\r\n\r\n", None),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "health check returned status 503"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "its response is not HTTP"),
        (b"HTTP/1.1 well\r\n\r\n", "its response is not HTTP"),
        (b"HTTP/1.1 200", "its response is not HTTP"),
        (b"", "its response is not HTTP"),
        (b"x" * 200_000, "its response is not HTTP"),
    ],
)
async def test_every_response_to_a_health_check_has_a_result(response, finding):
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = CheckTarget("a", Address(f"http://127.0.0.1:{port}"), HealthCheck(timeout_s=5.0))
        assert await check_once(target) == finding


async def test_a_host_name_that_cannot_be_resolved_fails_the_check():
    target = CheckTarget("a", Address("http://a..b:80"), HealthCheck())
    assert await check_once(target) == "its host name cannot be resolved"


@asynccontextmanager
async def checked(replica: FakeReplica, check: HealthCheck) -> AsyncIterator[tuple[HealthChecks, HealthRegistry]]:
    """Health checks of one replica after the first success."""
    book = HealthRegistry()
    checks = HealthChecks(book, lambda _: None, lambda _: 0.0)
    checks.configure([CheckTarget(replica.name, Address(replica.url), check)])
    try:
        await until(lambda: checks.status(replica.name).is_up is True)
        yield checks, book
    finally:
        checks.close()


@pytest.mark.parametrize("failures", [1, 2])
async def test_failed_connections_alone_take_no_healthy_replica_down(failures, replica):
    async with checked(replica, HealthCheck(failures=failures, interval_s=3600)) as (checks, book):
        for _ in range(10):
            checks.on_connect_failed(replica.name)
        assert book.is_up(ReplicaId(replica.name))
        await until(lambda: replica.probes == 2)
        checks.on_connect_failed(replica.name)
        await until(lambda: replica.probes == 3)
        assert book.epoch == 0, "nobody ever heard of it"


async def test_failed_connections_and_a_failed_check_take_a_replica_down(replica):
    async with checked(replica, HealthCheck(failures=2, interval_s=3600)) as (checks, book):
        replica.kill()
        checks.on_connect_failed(replica.name)
        await until(lambda: not book.is_up(ReplicaId(replica.name)))


async def test_failing_requests_trigger_at_most_ten_checks_a_second(replica):
    async with checked(replica, HealthCheck(interval_s=3600)) as (checks, _):
        started_at = time.monotonic()
        for number in range(2, 5):
            while replica.probes < number:
                checks.request_check(replica.name)
                await asyncio.sleep(0)
        assert time.monotonic() - started_at >= 2 * MIN_INTERVAL_S


async def test_many_failed_connections_and_a_check_count_as_two_failures(replica):
    async with checked(replica, HealthCheck(failures=3, interval_s=3600)) as (checks, book):
        replica.kill()
        for _ in range(10):
            checks.on_connect_failed(replica.name)
        await until(lambda: checks.status(replica.name).failures == 2)
        assert book.is_up(ReplicaId(replica.name))


DATA = Path(__file__).resolve().parents[2] / "data/vllm"
CAPTURES = sorted(DATA.glob("vllm-metrics-*.txt"))


def counters(text: bytes) -> EngineCounters:
    counters_read = parse_counters(text)
    assert isinstance(counters_read, EngineCounters)
    return counters_read


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.stem)
def test_every_captured_release_has_the_counters(capture):
    counters_read = counters(capture.read_bytes())
    names = {line.partition(b"{")[0] for line in counters_read.lines}
    assert {b"vllm:generation_tokens_total", b"vllm:kv_cache_usage_perc", b"vllm:prompt_tokens_total"} <= names


def test_sglang_shows_its_steps_and_requests():
    text = (
        'sglang:generation_tokens_total{model_name="m"} 5.0\nsglang:token_usage{model_name="m",tp_rank="0"} 0.2\n'
        'sglang:num_running_reqs{model_name="m"} 2.0\nsglang:num_queue_reqs{model_name="m"} 1.0\n'
    )
    before, after = counters(text.encode()), counters(text.replace(" 0.2", " 0.3").encode())
    assert (before.requests, len(before.lines)) == (3, 2)
    assert before.lines != after.lines


def test_what_is_known_of_an_engine_stands_in_its_row_only():
    known = [name for engine in ENGINES for name in (*engine.step_metrics, *engine.request_metrics)]
    known += [text.decode() for engine in ENGINES for _, text in engine.errors]
    routing = Path(engines.__file__).parent
    others = [path for path in routing.rglob("*.py") if path.name != "engines.py" and "standin" not in path.parts]
    assert [(path.name, text) for path in others for text in known if text in path.read_text()] == []


def test_gauges_show_whether_an_engine_has_requests():
    assert counters((DATA / "vllm-metrics-0.32.0-busy.txt").read_bytes()).requests > 0
    assert counters((DATA / "vllm-metrics-0.32.0-idle.txt").read_bytes()).requests == 0


@pytest.mark.parametrize(
    ("name", "is_step"),
    [
        (rb"^vllm:generation_tokens_total\{.*?\} ", True),
        (rb"^vllm:kv_cache_usage_perc\{.*?\} ", True),
        (rb"^vllm:iteration_tokens_total_sum\{.*?\} ", True),
        (rb"^process_cpu_seconds_total ", False),
        (rb"^http_requests_total\{.*?\} ", False),
        (rb"^vllm:num_requests_running\{.*?\} ", False),
    ],
)
def test_counters_of_the_api_server_are_no_progress_of_the_engine(name, is_step):
    text = (DATA / "vllm-metrics-0.32.0-busy.txt").read_bytes()
    changed, count = re.subn(name + rb"(\S+)", lambda match: match[0] + b"7", text, count=1, flags=re.MULTILINE)
    assert count == 1
    assert (counters(changed).lines != counters(text).lines) is is_step


def test_engines_of_one_url_are_distinguished():
    text = b'vllm:generation_tokens_total{engine="0"} 5\nvllm:generation_tokens_total{engine="1"} 6\n'
    assert counters(text).lines != counters(text.replace(b" 6", b" 7")).lines


def test_text_without_the_counters_has_none():
    for text in (b"", b"up 1\n", b"\xff\x00" * 1000, b"# HELP vllm:generation_tokens_total\n"):
        assert parse_counters(text) is NoCounters.ABSENT


# --- what the router asks of a replica by itself ---
@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[FakeReplica, Address]]:
    async with fake_replicas(1, script) as (replica,):
        yield replica, Address(replica.url)


TEXT = b"vllm:generation_tokens_total 5\n"
HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (HEAD + b"Content-Length: 31\r\n\r\n" + TEXT, (200, TEXT)),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nvllm:\r\n1a\r\n" + TEXT[5:] + b"\r\n0\r\n\r\n", (200, TEXT)),
        (HEAD + b"Content-Length: 90\r\n\r\n" + TEXT, ResponseError),
        (HEAD + b"Content-Length: 9000\r\n\r\n" + TEXT * 290, ResponseError),
        (b"SSH-2.0-OpenSSH\r\n\r\n", ResponseError),
    ],
    ids=["length", "chunked", "cut short", "too long", "not HTTP"],
)
async def test_a_response_is_read_whole_or_rejected(sent, expected):
    async with serving(raw(sent, then_close=True)) as (_, address):
        if isinstance(expected, tuple):
            assert await fetch(address, "/x", max_bytes=4096) == expected
        else:
            with pytest.raises(ResponseError):
                await fetch(address, "/x", max_bytes=4096)


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda replica: setattr(replica, "metrics", lambda: TEXT), EngineCounters),
        (lambda replica: setattr(replica, "metrics", None), NoCounters.ABSENT),
        (lambda replica: setattr(replica, "is_stopped", True), NoCounters.NO_RESPONSE),
        (lambda replica: replica.kill(), NoCounters.NO_RESPONSE),
    ],
    ids=["counters", "404", "no response", "refused"],
)
async def test_counters_are_read_or_the_reason_is_returned(prepare, expected):
    async with serving(raw()) as (replica, address):
        prepare(replica)
        counters_read = await read_counters(address, 0.3)
    assert counters_read is expected or (isinstance(counters_read, EngineCounters) and expected is EngineCounters)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (STREAM_HEAD + chunk(sse({"choices": [{"text": "x"}]})), ProbeResult.PASSED),
        (STREAM_HEAD + chunk(sse({"choices": [{"text": "", "finish_reason": "length"}]})), ProbeResult.PASSED),
        (STREAM_HEAD + chunk(b": keep-alive\n\n"), ProbeResult.NO_RESPONSE),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", ProbeResult.NO_RESPONSE),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}", ProbeResult.REJECTED),
        (b"no HTTP at all\r\n\r\n", ProbeResult.NO_RESPONSE),
    ],
    ids=["a token", "a token without text", "comments", "only headers", "rejected", "not HTTP"],
)
async def test_only_a_token_answers_a_probe(sent, expected):
    async with serving(raw(b"")) as (replica, address):
        replica.on_token_probe = raw(sent)
        assert await probe_engine(address, None, 0.5) == (expected, None)  # none of them reports usage
