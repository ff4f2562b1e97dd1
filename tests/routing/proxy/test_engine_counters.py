"""The figures of an engine's ``/metrics`` by which a hang is told from long work."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from routing.health.engine_probe import (
    EngineCounters,
    NoCounters,
    Probe,
    parse_counters,
    probe_engine,
    read_counters,
)
from routing.upstream.client import ResponseError, fetch
from routing.upstream.pool import Address
from tests.fakes.replica import FakeReplica, Script, fake_replicas, raw

DATA = Path(__file__).resolve().parents[2] / "data/vllm"
CAPTURES = sorted(DATA.glob("vllm-metrics-*.txt"))


def counters(text: bytes) -> EngineCounters:
    found = parse_counters(text)
    assert isinstance(found, EngineCounters)
    return found


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.stem)
def test_every_captured_release_has_the_figures(capture: Path) -> None:
    found = counters(capture.read_bytes())
    names = {line.partition(b"{")[0] for line in found.lines}
    assert {b"vllm:generation_tokens_total", b"vllm:kv_cache_usage_perc", b"vllm:prompt_tokens_total"} <= names


def test_a_busy_engine_says_that_requests_are_there_and_an_idle_one_that_none_are() -> None:
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
def test_what_an_api_server_counts_by_itself_is_no_step_of_its_engine(name: bytes, is_step: bool) -> None:
    text = (DATA / "vllm-metrics-0.32.0-busy.txt").read_bytes()
    changed, count = re.subn(name + rb"(\S+)", lambda match: match[0] + b"7", text, count=1, flags=re.MULTILINE)
    assert count == 1
    assert (counters(changed).lines != counters(text).lines) is is_step


def test_the_engines_of_one_url_are_told_apart() -> None:
    text = b'vllm:generation_tokens_total{engine="0"} 5\nvllm:generation_tokens_total{engine="1"} 6\n'
    assert counters(text).lines != counters(text.replace(b" 6", b" 7")).lines


def test_text_without_the_figures_has_no_counters() -> None:
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
async def test_a_response_is_read_whole_or_refused(sent: bytes, expected: object) -> None:
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
async def test_counters_are_read_or_it_is_said_why_not(
    prepare: Callable[[FakeReplica], None], expected: object
) -> None:
    async with serving(raw()) as (replica, address):
        prepare(replica)
        found = await read_counters(address, 0.3)
    assert found is expected or (isinstance(found, EngineCounters) and expected is EngineCounters)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n6\r\ndata: \r\n", Probe.PASSED),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", Probe.NO_RESPONSE),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}", Probe.REJECTED),
        (b"no HTTP at all\r\n\r\n", Probe.NO_RESPONSE),
    ],
    ids=["a token", "only headers", "rejected", "not HTTP"],
)
async def test_a_probe_is_answered_by_the_first_byte_of_a_body_alone(sent: bytes, expected: Probe) -> None:
    async with serving(raw(b"")) as (replica, address):
        replica.on_token_probe = raw(sent)
        assert await probe_engine(address, None, 0.5) is expected
