"""Parts of HTTP handling: chunks, deadlines, connection limit, usage in responses, usage filter, cached heads."""

from __future__ import annotations

import asyncio
import random
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.http.loop import MAX_SWEEP_S, NEVER, NO_BUCKET, TICK_S, Deadlines
from routing.http.response import (
    MAX_HEAD_BYTES,
    MAX_HEADS,
    SHORT_CHUNK,
    VARYING_REQUEST_HEADERS,
    Header,
    HeaderCache,
    chunk_start,
    chunked,
)
from routing.http.usage import (
    MAX_EVENT_BYTES,
    TAIL_BYTES,
    Fingerprint,
    ResponseTail,
    UsageFilter,
    prompt_and_cached,
)
from routing.proxy.response_relay import NO_END, plain_end
from routing.proxy.router import address_of
from tests.fakes.replica import answering, sse
from tests.routing.proxy.harness import BODY, CHAT, config, post, routed


def test_every_short_chunk_is_recognised():
    for length in range(1, SHORT_CHUNK):
        data = chunked(b"x" * length, False)
        assert data[chunk_start(data) : -2] == b"x" * length
        assert chunk_start(data) > 0


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
def test_an_ipv4_address_and_an_ipv6_network_are_one_client(address_a, address_b, same):
    assert (address_of(Peer((address_a, 1000))) == address_of(Peer((address_b, 2000)))) is same


@pytest.mark.parametrize("peername", [None, "", "/run/socket", ()])
def test_a_peer_without_an_address_does_not_count(peername):
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


async def test_time_in_which_the_loop_could_not_run_does_not_count():
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


async def test_what_has_arrived_is_read_before_a_deadline_is_judged():
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


async def test_a_later_deadline_changes_no_bucket_and_holds():
    loop = asyncio.get_running_loop()
    wheel, waiter = Deadlines(loop), Waiter()
    wheel.arm(waiter, 0.06)
    due = waiter.bucket
    waiter.deadline = later = loop.time() + 0.2
    assert waiter.bucket == due
    async with asyncio.timeout(15):
        await waiter.passed.wait()
    assert waiter.at >= later
    assert (waiter.deadline, waiter.bucket, len(wheel)) == (NEVER, NO_BUCKET, 0)
    wheel.close()


async def test_an_earlier_deadline_holds():
    wheel, waiter = Deadlines(asyncio.get_running_loop()), Waiter()
    wheel.arm(waiter, 1000)
    wheel.arm(waiter, 0.01)
    assert len(wheel) == 1
    async with asyncio.timeout(15):
        await waiter.passed.wait()
    wheel.close()


async def test_disarmed_holders_are_removed():
    wheel, waiters = Deadlines(asyncio.get_running_loop()), [Waiter() for _ in range(100)]
    for number, waiter in enumerate(waiters):
        wheel.arm(waiter, 0.01 + number)
        wheel.arm(waiter, 500 - number)
        wheel.disarm(waiter)
    assert len(wheel) == 0
    waiters[0].deadline = NEVER
    wheel.arm(waiters[1], 0.01)
    waiters[1].deadline = NEVER  # no longer waiting
    wheel.arm(waiters[2], 0.01)
    async with asyncio.timeout(15):
        await waiters[2].passed.wait()
    assert not waiters[1].passed.is_set()
    assert len(wheel) == 0
    wheel.close()


async def test_a_deadline_may_disarm_another():
    wheel, first, second = Deadlines(asyncio.get_running_loop()), Waiter(), Waiter()
    for waiter, address_b in ((first, second), (second, first)):
        wheel.arm(waiter, 0.01)
        waiter.on_deadline = lambda waiter=waiter, address_b=address_b: (wheel.disarm(address_b), waiter.passed.set())
    async with asyncio.timeout(15):
        while not (first.passed.is_set() or second.passed.is_set()):
            await asyncio.sleep(TICK_S)
    await asyncio.sleep(2 * TICK_S)  # for the other one
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


@settings(max_examples=500)
@given(st.lists(hostile, max_size=12))
def test_any_bytes_in_any_cuts_can_be_searched(reads):
    tail = remaining(reads)

    usage = tail.usage()
    for count in prompt_and_cached(usage) if usage else ():
        assert count is None or 0 <= count <= 1 << 30
    assert tail.has_error() in {True, False}
    assert tail.ends_event() in {True, False}


@settings(max_examples=200)
@given(st.binary(max_size=300).filter(lambda text: b"usage" not in text), st.integers(0, 7))
def test_usage_at_the_end_is_found_however_it_is_cut(before, cuts):
    stream = (
        before + sse({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}) + sse("[DONE]")
    )
    chance = random.Random(cuts)
    at = sorted(chance.sample(range(1, len(stream)), cuts))
    reads = [stream[a:b] for a, b in zip([0, *at], [*at, len(stream)], strict=True)]

    usage = remaining(reads).usage()
    assert usage is not None
    assert prompt_and_cached(usage) == (9, 4)


def test_the_tail_is_bounded():
    tail = remaining([b'{"usage":{' * 100_000] * 100)

    assert len(tail.text) <= 4 * TAIL_BYTES
    assert tail.usage() is None


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


@settings(max_examples=400)
@given(streams, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.integers(0, 99), st.binary(max_size=40))
def test_only_the_usage_chunk_is_removed_however_a_stream_is_cut(events, newline, seed, end):
    as_sent = [event.replace(b"\n", newline) for event in events]
    remaining = b"".join(
        event for event, is_usage in zip(as_sent, [it == USAGE for it in events], strict=True) if not is_usage
    )
    stream = b"".join(as_sent) + end.replace(b"\n", b"").replace(b"\r", b"")
    reads = cut(stream, seed) if len(stream) > 1 else [stream]

    assert passed(reads) == remaining + stream[len(b"".join(as_sent)) :]


@settings(max_examples=300)
@given(st.binary(max_size=400).filter(lambda text: b"usage" not in text), st.integers(0, 99))
def test_bytes_that_are_not_events_pass_unchanged(stream, seed):
    assert passed(cut(stream, seed) if len(stream) > 1 else [stream]) == stream


def test_the_held_bytes_are_bounded():
    usage_filter = UsageFilter(Fingerprint())
    endless = b"data: " + b"x" * (MAX_EVENT_BYTES + 1)

    assert usage_filter.feed(endless[:MAX_EVENT_BYTES]) == b""
    assert usage_filter.feed(endless[MAX_EVENT_BYTES:]) == endless
    assert usage_filter.is_inside_event
    assert usage_filter.feed(b"y") == b"y"
    assert usage_filter.feed(b"\n") == b"\n"
    assert usage_filter.feed(b"\n" + USAGE + EVENTS[0]) == b"\n" + EVENTS[0]
    assert not usage_filter.is_inside_event


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
def test_the_last_chunk_keeps_the_fingerprint(sent, received, size):
    whole = b"".join(sent)

    assert passed([whole[at : at + size] for at in range(0, len(whole), size)] if size else sent) == received


@pytest.mark.parametrize(
    ("start", "end", "is_plain"),
    [
        (b'{"choices":[{"index":0,"delta":{"content":"a"},', b'"finish_reason":null}]}\n\n', True),
        (b'{"choices":[{"text":"a","logprobs":null,', b'"finish_reason":null,"stop_reason":null}]}\n\n', True),
        (b'{"choices":[{"text":"a",', b'"finish_reason":null}],"usage":{"prompt_tokens":5}}\n\n', False),
        (b'{"choices":[{"text":"a",', b'"finish_reason":"stop"}]}\n\n', False),
        (b'{"choices":[{"text":"a",', b'"finish_reason":null}]}\n', False),
        (b'{"error":{"message":"no"}}\n\n', b"", False),
    ],
)
def test_an_event_of_text_may_pass_unchecked_after_one_that_ends_the_same(start, end, is_plain):
    framed = chunked(b"data: " + start + end, False)

    assert plain_end(framed) == (end + b"\r\n" if is_plain else NO_END)


def test_a_chunk_with_a_finish_reason_passes_with_the_next_event():
    usage_filter = UsageFilter(Fingerprint())

    assert [usage_filter.feed(event) for event in (EVENTS[0], FINISH, DONE)] == [EVENTS[0], b"", FINISH + DONE]


# --- A cached head is one that the parser would read the same way ---


HEAD = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: %b\r\nX-Session-ID: s\r\n\r\n"
CACHED = object()


def message(digits: bytes, body: bytes) -> bytes:
    return HEAD % digits + body


def headers_of(data: bytes) -> list[Header]:
    """The headers of a valid message, as a parser returns them."""
    _, *lines = data[: data.index(b"\r\n\r\n")].split(b"\r\n")
    return [(line.partition(b":")[0], line.partition(b":")[2].strip()) for line in lines]


def learn(heads: HeaderCache[object], data: bytes, length: int = 5) -> None:
    heads.learn(data, CACHED, length, headers_of(data))


def cache_with(data: bytes = message(b"5", b"hello")) -> HeaderCache[object]:
    heads = HeaderCache[object](VARYING_REQUEST_HEADERS)
    learn(heads, data)
    return heads


def match_all_ways(data: bytes) -> list[tuple[object, bytes]]:
    """The matches by look-up and by the connection's latest head."""
    heads = cache_with()
    latest, _, _ = heads.find(message(b"5", b"hello")) or pytest.fail("it is known")
    ways = (heads.find(data), heads.find(data, latest))
    return [(cached.head, body) for cached, body, _ in filter(None, ways)]


def test_a_head_like_the_connections_latest_matches_directly():
    heads = cache_with()
    latest, _, _ = heads.find(message(b"5", b"hello")) or pytest.fail("it is known")

    for length in (*range(1_020), *range(9_990, 10_020), *range(99_995, 100_010)):
        data = message(b"%d" % length, b"x" * length)
        assert heads._match_latest(data, latest) == (latest, b"x" * length, [b"%d" % length])
        assert heads._match_latest(data + b"y", latest) is None
        assert length == 0 or heads._match_latest(data[:-1], latest) is None


def test_a_head_unlike_the_connections_latest_matches_too():
    heads = cache_with()
    latest, _, _ = heads.find(message(b"5", b"hello")) or pytest.fail("it is known")
    other_head = message(b"5", b"hello").replace(b"Host: h", b"Host: i")
    learn(heads, other_head)

    match = heads.find(other_head, latest)
    assert match is not None
    assert match[0] is not latest


@given(st.binary(max_size=200), st.integers(0, 80), st.binary(max_size=4))
def test_only_the_digits_of_the_length_may_differ(body, at, junk):
    data = message(b"%d" % len(body), body)
    changed = data[:at] + junk + data[at + len(junk) :]

    for _, matched_body in match_all_ways(changed):
        assert changed == message(b"%d" % len(matched_body), matched_body) or changed == message(
            b"0%d" % len(matched_body), matched_body
        )


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n", 0),
        (message(b"5", b"hello"), 4),
        (b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nX: %b\r\n\r\nhello" % (b"x" * 5000), 5),
    ],
)
def test_heads_without_a_single_correct_length_are_not_cached(data, length):
    heads = HeaderCache[object](VARYING_REQUEST_HEADERS)
    learn(heads, data, length)

    assert len(heads) == 0


def test_the_number_of_heads_is_bounded():
    heads = HeaderCache[object](VARYING_REQUEST_HEADERS)
    for number in range(3 * MAX_HEADS):
        learn(heads, b"POST /%d HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello" % number)
        assert len(heads) <= MAX_HEADS


async def test_a_replica_gets_the_same_request_from_a_cached_head(replica):
    async with routed(config([replica])) as harness, harness.connect() as client:
        responses = [await client.ask(post(CHAT, BODY + b" " * length, [b"X-Thing: 1"])) for length in (0, 0, 7)]
        first, second, longer = replica.calls

        assert len(harness.router.request_head_cache) == len(harness.router.response_head_cache) == 1
    assert [response.status for response in responses] == [200, 200, 200]
    assert responses[0].body == responses[1].body
    assert first.header(b"x-thing") == second.header(b"x-thing") == [b"1"]
    assert first.body == second.body == BODY
    assert longer.body == BODY + b" " * 7
    assert first.header(b"x-request-id") != second.header(b"x-request-id")


async def test_a_new_configuration_clears_the_cache(replica):
    async with routed(config([replica])) as harness:
        await harness.chat()
        assert len(harness.router.request_head_cache) == 1
        status, _ = await harness.push(config([replica]), revision=2)

        assert status == 200
        assert len(harness.router.request_head_cache) == 0


TRACED = (
    b"POST /v1/x HTTP/1.1\r\nHost: h\r\ntraceparent: %b\r\n"
    b"Accept: */*\r\nX-Request-ID: %b\r\nContent-Length: %d\r\n\r\n%b"
)


@given(st.from_regex(rb"\A[!-~]([ -~]{0,510}[!-~])?\Z"), st.from_regex(rb"\A[!-~]{1,60}\Z"), st.binary(max_size=40))
def test_varying_values_do_not_make_another_head(trace, name, body):
    first = TRACED % (b"00-1-2-03", b"one", 5, b"hello")
    heads = cache_with(first)
    latest, _, _ = heads.find(first) or pytest.fail("it is known")
    data = TRACED % (trace, name, len(body), body)
    values = [trace, name, b"%d" % len(body)]

    assert heads.find(data) == heads.find(data, latest) == (latest, body, values)


def test_heads_over_the_limit_are_left_to_the_parser():
    first = TRACED % (b"00-1-2-03", b"one", 5, b"hello")
    heads = HeaderCache[object](VARYING_REQUEST_HEADERS)
    heads.reset(1024)
    learn(heads, first)
    latest, _, _ = heads.find(first) or pytest.fail("it is known")
    long = TRACED % (b"0" * 500, b"1" * 500, 5, b"hello")

    assert heads.find(long) is heads.find(long, latest) is None
    heads.reset(MAX_HEAD_BYTES)
    learn(heads, first)
    assert heads.find(long) is not None


async def test_varying_values_reach_the_replica_and_the_record(replica):
    async with routed(config([replica])) as harness, harness.connect() as client:
        for name in (b"first", b"second", b"third%b"):
            extra = [b"traceparent: 00-%b-01" % name, b"X-Request-ID: %b" % name, b"X-Percent: %d%b"]
            response = await client.ask(post(CHAT, BODY, extra))
            assert response.status == 200
            assert (response.headers.get("x-request-id") == name.decode()) == (b"%" not in name)
        calls = replica.calls
        heads = len(harness.router.request_head_cache)

    assert heads == 1
    assert [call.header(b"traceparent") for call in calls] == [[b"00-first-01"], [b"00-second-01"], [b"00-third%b-01"]]
    assert [call.header(b"x-percent") for call in calls] == 3 * [[b"%d%b"]]
    assert [call.header(b"x-request-id") for call in calls[:2]] == [[b"first"], [b"second"]]
    assert calls[2].header(b"x-request-id") not in ([], [b"third%b"])  # an id that may not be forwarded is replaced


async def test_a_response_with_another_date_matches_and_keeps_its_date(replica):
    async with routed(config([replica])) as harness, harness.connect() as client:
        for second in (b"07", b"08", b"10"):
            when = b"Mon, 02 Nov 2026 10:11:%b GMT" % second
            replica.script = answering(extra=b"Date: %b\r\nX-Request-Id: of-engine-%b\r\n" % (when, second))
            response = await client.ask(post(CHAT, BODY))
            assert response.headers.get("date") == when.decode()
        assert len(harness.router.response_head_cache) == 1


UNUSUAL = (b"", b" ", b"a ", b" a", b"\ta", b"a\t", b"a\r\n b", b"a\x7f", b"\xe9", b"a\0", b"x" * 513)


@pytest.mark.parametrize("value", UNUSUAL)
@pytest.mark.parametrize("is_latest", [True, False])
def test_unusual_values_are_left_to_the_parser(value, is_latest):
    first = TRACED % (b"00-1-2-03", b"one", 5, b"hello")
    heads = cache_with(first)
    latest, _, _ = heads.find(first) or pytest.fail("it is known")

    assert heads.find(TRACED % (value, b"one", 5, b"hello"), latest if is_latest else None) is None
    assert heads.find(TRACED % (b"00", value, 5, b"hello"), latest if is_latest else None) is None
