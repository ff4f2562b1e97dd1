"""Parts of HTTP handling: chunks, deadlines, connection limit, usage in responses, usage filter."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.http.loop import MAX_SWEEP_S, NEVER, NO_BUCKET, TICK_S, Deadlines
from routing.http.response import SHORT_CHUNK, chunk_start, chunked
from routing.http.usage import (
    MAX_EVENT_BYTES,
    TAIL_BYTES,
    Fingerprint,
    ResponseTail,
    UsageFilter,
    prompt_and_cached,
)
from routing.proxy.router import address_of
from tests.fakes.replica import sse


def test_every_short_chunk_is_recognised() -> None:
    for length in range(1, SHORT_CHUNK):
        data = chunked(b"x" * length, False)
        assert data[chunk_start(data) : -2] == b"x" * length
        assert chunk_start(data) > 0


@pytest.mark.parametrize("length", [15, 16, 17, 255, 256, 257])
def test_one_byte_more_or_less_is_not_recognised(length: int) -> None:
    data = chunked(b"x" * length, False)

    assert chunk_start(data + b"y") == chunk_start(data[:-1]) == chunk_start(data[1:]) == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        b"0\r\n\r\n",
        b"1\r\n\r\n\r\n",
        b"5\r\nhello",
        b"5\r\nhello\n\n",
        b"5\nhello\r\n\r\n",
        b"05\r\nhello\r\n",
        b"5;a\r\nhello\r\n",
        b"A\r\n0123456789\r\n",
        b"+5\r\nhello\r\n",
        b"5\r\nhello\r\n5\r\nhello\r\n",
        chunked(b"hello", True),
        chunked(b"x" * SHORT_CHUNK, False),
    ],
)
def test_other_bytes_are_left_to_the_parser(data: bytes) -> None:
    assert chunk_start(data) == 0


class Peer:
    """A transport with a peer name."""

    def __init__(self, peername: object) -> None:
        self._peername = peername

    def get_extra_info(self, name: str) -> object:
        assert name == "peername"
        return self._peername


@pytest.mark.parametrize(
    ("address_a", "address_b", "same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_an_ipv4_address_and_an_ipv6_network_are_one_client(address_a: str, address_b: str, same: bool) -> None:
    assert (address_of(Peer((address_a, 1000))) == address_of(Peer((address_b, 2000)))) is same


@pytest.mark.parametrize("peername", [None, "", "/run/socket", ()])
def test_a_peer_without_an_address_does_not_count(peername: object) -> None:
    assert address_of(Peer(peername)) == ""


class Waiter:
    def __init__(self) -> None:
        self.deadline, self.bucket = NEVER, NO_BUCKET
        self.passed = asyncio.Event()
        self.at = 0.0

    def on_deadline(self) -> None:
        self.at = asyncio.get_running_loop().time()
        self.passed.set()

    def postpone(self, stalled_s: float) -> None:
        self.deadline += stalled_s


async def test_a_deadline_passes_in_time() -> None:
    loop = asyncio.get_running_loop()
    wheel, waiter = Deadlines(loop), Waiter()
    started_at = loop.time()
    wheel.arm(waiter, 0.12)
    async with asyncio.timeout(15):
        await waiter.passed.wait()
    assert waiter.at >= started_at + 0.12
    assert (waiter.deadline, waiter.bucket, len(wheel)) == (NEVER, NO_BUCKET, 0)
    wheel.close()


async def test_time_in_which_the_loop_could_not_run_does_not_count() -> None:
    loop = asyncio.get_running_loop()
    wheel, waiter, distant = Deadlines(loop), Waiter(), Waiter()
    wheel.arm(waiter, 0.2)
    wheel.arm(distant, 1000)
    before = distant.deadline
    time.sleep(1)  # noqa: ASYNC251 - the loop must not run
    async with asyncio.timeout(15):
        await waiter.passed.wait()
    assert waiter.at >= loop.time() - 15
    assert distant.deadline >= before + 1 - MAX_SWEEP_S
    assert waiter.deadline == NEVER
    wheel.close()


async def test_what_has_arrived_is_read_before_a_deadline_is_judged() -> None:
    """The byte arrives while the loop does not run, and the reader moves the deadline when it gets it."""
    loop = asyncio.get_running_loop()
    wheel, waiter = Deadlines(loop), Waiter()
    own, other = socket.socketpair()
    with own, other:
        loop.add_reader(own, lambda: (own.recv(1), wheel.arm(waiter, 1000)))
        wheel.arm(waiter, 0.01)
        other.send(b"x")
        time.sleep(MAX_SWEEP_S)  # noqa: ASYNC251 - the loop must not run
        wheel._sweep()
        async with asyncio.timeout(15):
            while waiter.deadline < loop.time() + 100:
                await asyncio.sleep(0.01)
        loop.remove_reader(own)
    assert not waiter.passed.is_set()
    wheel.close()


async def test_a_later_deadline_changes_no_bucket_and_holds() -> None:
    loop = asyncio.get_running_loop()
    wheel, waiter = Deadlines(loop), Waiter()
    wheel.arm(waiter, 0.06)
    due = waiter.bucket
    waiter.deadline = later = loop.time() + 0.2
    assert waiter.bucket == due
    async with asyncio.timeout(15):
        await waiter.passed.wait()
    assert waiter.at >= later
    wheel.close()


async def test_an_earlier_deadline_holds() -> None:
    wheel, waiter = Deadlines(asyncio.get_running_loop()), Waiter()
    wheel.arm(waiter, 1000)
    wheel.arm(waiter, 0.01)
    assert len(wheel) == 1
    async with asyncio.timeout(15):
        await waiter.passed.wait()
    wheel.close()


async def test_disarmed_holders_are_removed() -> None:
    wheel, waiters = Deadlines(asyncio.get_running_loop()), [Waiter() for _ in range(100)]
    for number, waiter in enumerate(waiters):
        wheel.arm(waiter, 0.01 + number)
        wheel.arm(waiter, 500 - number)
        wheel.disarm(waiter)
    assert len(wheel) == 0
    waiters[0].deadline = NEVER
    wheel.arm(waiters[1], 0.01)
    waiters[1].deadline = NEVER  # no longer waiting
    await asyncio.sleep(3 * TICK_S)
    assert not waiters[1].passed.is_set()
    assert len(wheel) == 0
    wheel.close()


async def test_a_deadline_may_disarm_another() -> None:
    wheel, first, second = Deadlines(asyncio.get_running_loop()), Waiter(), Waiter()
    for waiter, address_b in ((first, second), (second, first)):
        wheel.arm(waiter, 0.01)
        waiter.on_deadline = lambda waiter=waiter, address_b=address_b: (wheel.disarm(address_b), waiter.passed.set())
    await asyncio.sleep(4 * TICK_S)
    assert first.passed.is_set() != second.passed.is_set()
    wheel.close()


PIECES = (
    *(b'"usage"', b"usage", b":", b" ", b"\n", b"\r\n\r\n", b"{", b"}", b"{}", b"[", b"]", b"null", b",", b'"', b"\\"),
    *(b"data: ", b"data:", b'{"error":', b"[DONE]", b'"prompt_tokens":', b"5", b"-1", b"1e9", b"99999999999999999999"),
    *(b'"prompt_tokens_details":{', b'"cached_tokens":3}', b'"usage":{"prompt_tokens":7}', b"\xff", b"\0", b"\xc3"),
    b'"usage": {"prompt_tokens": 431, "prompt_tokens_details": {"cached_tokens": 416}}',
)
hostile = st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join))


def remaining(reads: list[bytes]) -> ResponseTail:
    """The tail of these reads."""
    tail = ResponseTail()
    for read in reads:
        tail.add(read)
    return tail


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(hostile, max_size=12))
def test_any_bytes_in_any_cuts_can_be_searched(reads: list[bytes]) -> None:
    tail = remaining(reads)

    usage = tail.usage()
    for count in prompt_and_cached(usage) if usage else ():
        assert count is None or 0 <= count <= 1 << 30
    assert tail.has_error() in {True, False}
    assert tail.ends_event() in {True, False}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=300).filter(lambda text: b"usage" not in text), st.integers(0, 7))
def test_usage_at_the_end_is_found_however_it_is_cut(before: bytes, cuts: int) -> None:
    stream = (
        before + sse({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}) + sse("[DONE]")
    )
    chance = random.Random(cuts)
    at = sorted(chance.sample(range(1, len(stream)), cuts))
    reads = [stream[a:b] for a, b in zip([0, *at], [*at, len(stream)], strict=True)]

    usage = remaining(reads).usage()
    assert usage is not None
    assert prompt_and_cached(usage) == (9, 4)


def test_the_tail_is_bounded() -> None:
    tail = remaining([b'{"usage":{' * 100_000] * 100)

    assert len(tail.text) <= 4 * TAIL_BYTES
    assert tail.usage() is None


CAPTURES = Path(__file__).parents[2] / "data" / "vllm"
USAGE = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":5,"total_tokens":6}}\n\n'
EVENTS = (
    sse({"choices": [{"delta": {"content": "a"}}]}),
    sse({"choices": [{"delta": {"content": '"usage":{"choices":[]}'}}]}),
    sse({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 5}}),  # continuous_usage_stats
    sse({"choices": [{"text": "x"}], "usage": None}),
    sse({"choices": [], "usage": None}),
    sse({"choices": [], "prompt_filter_results": []}),
    sse({"choices": [{"text": "long " * 5000}], "usage": {}}),
    sse("[DONE]"),
    b": ping\n\n",
    b"event: x\nid: 1\ndata: {}\n\n",
    b'data: {not json "usage" "choices":[]\n\n',
)
streams = st.lists(st.sampled_from((*EVENTS, USAGE)), max_size=8)


def passed(reads: list[bytes]) -> bytes:
    """The bytes that a filter passes."""
    usage_filter = UsageFilter(Fingerprint())
    return b"".join(map(usage_filter.feed, reads)) + usage_filter.flush()


def cut(stream: bytes, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    cuts = sorted(chance.sample(range(1, len(stream)), min(chance.choice((1, 3, 30)), len(stream) - 1)))
    return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(streams, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.integers(0, 99), st.binary(max_size=40))
def test_only_the_usage_chunk_is_removed_however_a_stream_is_cut(
    events: list[bytes], newline: bytes, seed: int, end: bytes
) -> None:
    as_sent = [event.replace(b"\n", newline) for event in events]
    remaining = b"".join(
        event for event, is_usage in zip(as_sent, [it == USAGE for it in events], strict=True) if not is_usage
    )
    stream = b"".join(as_sent) + end.replace(b"\n", b"").replace(b"\r", b"")
    reads = cut(stream, seed) if len(stream) > 1 else [stream]

    assert passed(reads) == remaining + stream[len(b"".join(as_sent)) :]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=400).filter(lambda text: b"usage" not in text), st.integers(0, 99))
def test_bytes_that_are_not_events_pass_unchanged(stream: bytes, seed: int) -> None:
    assert passed(cut(stream, seed) if len(stream) > 1 else [stream]) == stream


def test_reads_of_whole_events_pass_without_a_copy() -> None:
    usage_filter = UsageFilter(Fingerprint())
    for event in (EVENTS[0], EVENTS[0].replace(b"\n", b"\r\n"), EVENTS[0] + EVENTS[8]):
        assert usage_filter.feed(event) is event


def test_the_held_bytes_are_bounded() -> None:
    usage_filter = UsageFilter(Fingerprint())
    endless = b"data: " + b"x" * (MAX_EVENT_BYTES + 1)

    assert usage_filter.feed(endless[:MAX_EVENT_BYTES]) == b""
    assert usage_filter.feed(endless[MAX_EVENT_BYTES:]) == endless
    assert usage_filter.is_inside_event
    assert usage_filter.feed(b"y") == b"y"
    assert usage_filter.feed(b"\n") == b"\n"
    assert usage_filter.feed(b"\n" + USAGE + EVENTS[0]) == b"\n" + EVENTS[0]
    assert not usage_filter.is_inside_event


@pytest.mark.parametrize("case", ["chat-stream-usage", "completion-stream", "chat-stream-n2"])
def test_streams_of_a_real_engine_lose_only_their_usage_chunk(case: str) -> None:
    lines = map(json.loads, (CAPTURES / "vllm-http-0.32.0-ok.jsonl").read_text().splitlines())
    reads = [text.encode() for _, text in next(it for it in lines if it["case"] == case)["response"]["reads"]]
    remaining = [read for read in reads if b'"choices":[]' not in read]
    if len(remaining) < len(reads):  # the fingerprint moves to the last chunk that remains
        moved = json.dumps(json.loads(reads[-2][6:])["system_fingerprint"]).encode()
        remaining[-2] = remaining[-2].replace(b"}\n\n", b',"system_fingerprint":' + moved + b"}\n\n")

    assert passed(reads) == b"".join(remaining)
    assert passed([b"".join(reads)]) == b"".join(remaining)


FINISH = b'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n'
FINGERPRINT = b'data: {"choices":[],"usage":{"prompt_tokens":5},"system_fingerprint":"v1"}\n\n'
FINISHED = b'data: {"choices":[{"index":0,"finish_reason":"stop"}],"system_fingerprint":"v1"}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ([FINISH, FINGERPRINT, DONE], FINISHED + DONE),
        ([FINISH, FINGERPRINT], FINISHED),
        ([FINISH, USAGE, DONE], FINISH + DONE),  # it has no fingerprint
        ([FINISH, DONE], FINISH + DONE),
        ([FINISH], FINISH),
        ([FINISHED, FINGERPRINT, DONE], FINISHED + DONE),  # it has both
        ([FINISH, EVENTS[0], FINISH, FINGERPRINT, DONE], FINISH + EVENTS[0] + FINISHED + DONE),  # two choices
        ([FINISH, FINGERPRINT, FINGERPRINT, DONE], FINISHED + DONE),
        ([EVENTS[0], FINGERPRINT, DONE], EVENTS[0] + DONE),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 50])
def test_the_last_chunk_keeps_the_fingerprint(sent: list[bytes], received: bytes, size: int) -> None:
    whole = b"".join(sent)

    assert passed([whole[at : at + size] for at in range(0, len(whole), size)] if size else sent) == received


def test_a_chunk_with_a_finish_reason_passes_with_the_next_event() -> None:
    usage_filter = UsageFilter(Fingerprint())

    assert [usage_filter.feed(event) for event in (EVENTS[0], FINISH, DONE)] == [EVENTS[0], b"", FINISH + DONE]
