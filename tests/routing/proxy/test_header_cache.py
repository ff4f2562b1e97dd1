"""A cached head is one that the parser would read the same way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.http.response import MAX_HEAD_BYTES, MAX_HEADS, VARYING_REQUEST_HEADERS, Header, HeaderCache
from tests.fakes.replica import FakeReplica, answering
from tests.routing.proxy.harness import BODY, CHAT, config, post, routed

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


def match_in(heads: HeaderCache[object], data: bytes) -> tuple[object, bytes] | None:
    match = heads.find(data)
    return None if match is None else (match[0].head, match[1])


def match_all_ways(data: bytes) -> list[tuple[object, bytes]]:
    """The matches by look-up and by the connection's latest head."""
    heads = cache_with()
    latest, _, _ = heads.find(message(b"5", b"hello")) or pytest.fail("it is known")
    ways = (heads.find(data), heads.find(data, latest))
    return [(cached.head, body) for cached, body, _ in filter(None, ways)]


@given(st.binary(max_size=300))
def test_the_same_head_with_another_body_matches(body: bytes) -> None:
    assert match_in(cache_with(), message(b"%d" % len(body), body)) == (CACHED, body)


def test_a_head_like_the_connections_latest_matches_directly() -> None:
    heads = cache_with()
    latest, _, _ = heads.find(message(b"5", b"hello")) or pytest.fail("it is known")

    for length in (*range(1_020), *range(9_990, 10_020), *range(99_995, 100_010)):
        data = message(b"%d" % length, b"x" * length)
        assert heads._match_latest(data, latest) == (latest, b"x" * length, [b"%d" % length])
        assert heads._match_latest(data + b"y", latest) is None
        assert length == 0 or heads._match_latest(data[:-1], latest) is None


def test_a_head_unlike_the_connections_latest_matches_too() -> None:
    heads = cache_with()
    latest, _, _ = heads.find(message(b"5", b"hello")) or pytest.fail("it is known")
    other_head = message(b"5", b"hello").replace(b"Host: h", b"Host: i")
    learn(heads, other_head)

    match = heads.find(other_head, latest)
    assert match is not None
    assert match[0] is not latest


@pytest.mark.parametrize(
    "digits", [b"+5", b"-5", b" 5", b"5 ", b"0x5", b"5,5", b"5\t", b"", b"\xb2", b"5_0", b"4", b"6", b"0000000005"]
)
def test_invalid_or_wrong_lengths_are_left_to_the_parser(digits: bytes) -> None:
    assert match_all_ways(message(digits, b"hello")) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        message(b"5", b"hell"),
        message(b"5", b"hello!"),
        message(b"5", b"hello") + message(b"5", b"hello"),
        message(b"5", b"hello").replace(b"Host: h", b"Host: i"),
        message(b"5", b"hello").replace(b"X-Session-ID: s", b"Content-Length: 5"),
        message(b"5", b"hello").replace(b"X-Session-ID: s", b"Transfer-Encoding: chunked"),
        message(b"5", b"hello").replace(b"\r\n", b"\n"),
        message(b"5", b"hello")[:-7],
        message(b"48", b"hello").replace(b"\r\n\r\n", b"\r\n"),
    ],
)
def test_other_messages_are_left_to_the_parser(data: bytes) -> None:
    assert match_all_ways(data) == []


@given(st.binary(max_size=200), st.integers(0, 80), st.binary(max_size=4))
def test_only_the_digits_of_the_length_may_differ(body: bytes, at: int, junk: bytes) -> None:
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
def test_heads_without_a_single_correct_length_are_not_cached(data: bytes, length: int) -> None:
    heads = HeaderCache[object](VARYING_REQUEST_HEADERS)
    learn(heads, data, length)

    assert len(heads) == 0


def test_the_number_of_heads_is_bounded() -> None:
    heads = HeaderCache[object](VARYING_REQUEST_HEADERS)
    for number in range(3 * MAX_HEADS):
        learn(heads, b"POST /%d HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello" % number)
        assert len(heads) <= MAX_HEADS


async def test_a_replica_gets_the_same_request_from_a_cached_head(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        responses = []
        for length in (0, 0, 7):
            await client.send(post(CHAT, BODY + b" " * length, [b"X-Thing: 1"]))
            responses.append(await client.read_response())
        first, second, longer = replica.calls

        assert len(harness.router.request_head_cache) == len(harness.router.response_head_cache) == 1
    assert [response.status for response in responses] == [200, 200, 200]
    assert responses[0].body == responses[1].body
    assert first.header(b"x-thing") == second.header(b"x-thing") == [b"1"]
    assert first.body == second.body == BODY
    assert longer.body == BODY + b" " * 7
    assert first.header(b"x-request-id") != second.header(b"x-request-id")


async def test_a_new_configuration_clears_the_cache(replica: FakeReplica) -> None:
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
UNUSUAL = (b"", b" ", b"a ", b" a", b"\ta", b"a\t", b"a\r\n b", b"a\x7f", b"\xe9", b"a\0", b"x" * 513)


@given(st.from_regex(rb"\A[!-~]([ -~]{0,510}[!-~])?\Z"), st.from_regex(rb"\A[!-~]{1,60}\Z"), st.binary(max_size=40))
def test_varying_values_do_not_make_another_head(trace: bytes, name: bytes, body: bytes) -> None:
    first = TRACED % (b"00-1-2-03", b"one", 5, b"hello")
    heads = cache_with(first)
    latest, _, _ = heads.find(first) or pytest.fail("it is known")
    data = TRACED % (trace, name, len(body), body)
    values = [trace, name, b"%d" % len(body)]

    assert heads.find(data) == heads.find(data, latest) == (latest, body, values)


@pytest.mark.parametrize("value", UNUSUAL)
@pytest.mark.parametrize("is_latest", [True, False])
def test_unusual_values_are_left_to_the_parser(value: bytes, is_latest: bool) -> None:
    first = TRACED % (b"00-1-2-03", b"one", 5, b"hello")
    heads = cache_with(first)
    latest, _, _ = heads.find(first) or pytest.fail("it is known")

    assert heads.find(TRACED % (value, b"one", 5, b"hello"), latest if is_latest else None) is None
    assert heads.find(TRACED % (b"00", value, 5, b"hello"), latest if is_latest else None) is None


def test_heads_over_the_limit_are_left_to_the_parser() -> None:
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


async def test_varying_values_reach_the_replica_and_the_record(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        for name in (b"first", b"second", b"third%b"):
            extra = [b"traceparent: 00-%b-01" % name, b"X-Request-ID: %b" % name, b"X-Percent: %d%b"]
            await client.send(post(CHAT, BODY, extra))
            response = await client.read_response()
            assert response.status == 200
            assert (response.headers.get("x-request-id") == name.decode()) == (b"%" not in name)
        calls = replica.calls
        heads = len(harness.router.request_head_cache)

    assert heads == 1
    assert [call.header(b"traceparent") for call in calls] == [[b"00-first-01"], [b"00-second-01"], [b"00-third%b-01"]]
    assert [call.header(b"x-percent") for call in calls] == 3 * [[b"%d%b"]]
    assert [call.header(b"x-request-id") for call in calls[:2]] == [[b"first"], [b"second"]]
    assert calls[2].header(b"x-request-id") not in ([], [b"third%b"])  # an id that may not be forwarded is replaced


async def test_a_response_with_another_date_matches_and_keeps_its_date(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        for second in (b"07", b"08", b"10"):
            when = b"Mon, 02 Nov 2026 10:11:%b GMT" % second
            replica.script = answering(extra=b"Date: %b\r\nX-Request-Id: of-engine-%b\r\n" % (when, second))
            await client.send(post(CHAT, BODY))
            response = await client.read_response()
            assert response.headers.get("date") == when.decode()
        assert len(harness.router.response_head_cache) == 1
