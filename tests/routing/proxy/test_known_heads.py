"""A head that is recognised is one that the parser would read the same way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.proxy.known_heads import MAX_HEADS, KnownHead, KnownHeads
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import BODY, CHAT, config, post, routed

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: %b\r\nX-Session-ID: s\r\n\r\n"
KNOWN = object()


def message(digits: bytes, body: bytes) -> bytes:
    return HEAD % digits + body


def taught(data: bytes = message(b"5", b"hello")) -> KnownHeads[object]:
    heads = KnownHeads[object]()
    heads.learn(data, KNOWN, 5)
    return heads


def found_in(heads: KnownHeads[object], data: bytes) -> tuple[object, bytes] | None:
    found = heads.find(data)
    return None if found is None else (found[0].head, found[1])


def by_all_ways(data: bytes) -> list[tuple[object, bytes]]:
    """What is found by looking it up, and what by the head that the connection had last."""
    heads = taught()
    latest, _ = heads.find(message(b"5", b"hello")) or pytest.fail("it is known")
    ways = (heads.find(data), heads.find(data, latest))
    return [(known.head, body) for known, body in filter(None, ways)]


@given(st.binary(max_size=300))
def test_the_same_head_before_another_body_is_recognised(body: bytes) -> None:
    assert found_in(taught(), message(b"%d" % len(body), body)) == (KNOWN, body)


def test_one_that_is_laid_out_as_the_connections_last_is_found_by_that_alone() -> None:
    heads = taught()
    latest, _ = heads.find(message(b"5", b"hello")) or pytest.fail("it is known")

    for length in (*range(1_020), *range(9_990, 10_020), *range(99_995, 100_010)):
        data = message(b"%d" % length, b"x" * length)
        assert heads._alike(data, latest) == (latest, b"x" * length)
        assert heads._alike(data + b"y", latest) is None
        assert length == 0 or heads._alike(data[:-1], latest) is None


def test_a_length_at_the_same_place_of_another_head_is_not_taken_for_one_where_it_stands() -> None:
    heads = KnownHeads[object]()
    heads.learn(b"A /x\r\nX: 55\r\nContent-Length: 5\r\n\r\nhello", KNOWN, 5)
    shifted = b"A /x\r\nX: 5"
    latest = KnownHead(KNOWN, len(shifted), len(shifted) + len(b"\r\nContent-Length: 5\r\n\r\n"))

    assert heads.find(b"A /x\r\nX: 55\r\nContent-Length: 5\r\n\r\nhello", latest) is not None
    assert heads.find(b"A /x\r\nX: 55\r\nContent-Length: 7\r\n\r\nhello", latest) is None


def test_what_a_connection_had_last_is_forgotten_with_the_rest() -> None:
    heads = taught()
    latest, _ = heads.find(message(b"5", b"hello")) or pytest.fail("it is known")
    heads.forget()

    assert heads.find(message(b"5", b"hello"), latest) is None


def test_another_head_than_the_connections_last_is_found_too() -> None:
    heads = taught()
    latest, _ = heads.find(message(b"5", b"hello")) or pytest.fail("it is known")
    other = message(b"5", b"hello").replace(b"Host: h", b"Host: i")
    heads.learn(other, KNOWN, 5)

    found = heads.find(other, latest)
    assert found is not None
    assert found[0] is not latest


@pytest.mark.parametrize("name", [b"content-length", b"CONTENT-LENGTH", b"Content-Length"])
def test_a_length_is_found_however_its_name_is_written(name: bytes) -> None:
    data = HEAD.replace(b"Content-Length", name) % b"5" + b"hello"
    expected = None if name.isupper() else (KNOWN, b"hello")  # nobody shouts: the parser's way will do

    assert found_in(taught(data), data) == expected


@pytest.mark.parametrize(
    "digits", [b"+5", b"-5", b" 5", b"5 ", b"0x5", b"5,5", b"5\t", b"", b"\xb2", b"5_0", b"4", b"6", b"0000000005"]
)
def test_digits_that_are_none_or_that_count_otherwise_are_left_to_the_parser(digits: bytes) -> None:
    assert by_all_ways(message(digits, b"hello")) == []


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
def test_anything_else_is_left_to_the_parser(data: bytes) -> None:
    assert by_all_ways(data) == []


@given(st.binary(max_size=200), st.integers(0, 80), st.binary(max_size=4))
def test_only_the_digits_may_differ(body: bytes, at: int, junk: bytes) -> None:
    data = message(b"%d" % len(body), body)
    changed = data[:at] + junk + data[at + len(junk) :]

    for _, seen in by_all_ways(changed):
        assert changed == message(b"%d" % len(seen), seen) or changed == message(b"0%d" % len(seen), seen)


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"POST /x HTTP/1.1\r\nHost: h\r\nX-Strength: 5\r\nContent-Length: 5\r\n\r\nhello", 5),  # found first
        (b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n", 0),
        (message(b"5", b"hello"), 4),
        (b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nX: %b\r\n\r\nhello" % (b"x" * 5000), 5),
    ],
)
def test_what_cannot_be_told_apart_by_its_length_alone_is_not_remembered(data: bytes, length: int) -> None:
    heads = KnownHeads[object]()
    heads.learn(data, KNOWN, length)

    assert len(heads) == 0


def test_the_number_of_heads_is_bounded() -> None:
    heads = KnownHeads[object]()
    for number in range(3 * MAX_HEADS):
        heads.learn(b"POST /%d HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello" % number, KNOWN, 5)
        assert len(heads) <= MAX_HEADS


async def test_a_replica_gets_the_same_from_a_head_read_before(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        answers = []
        for length in (0, 0, 7):
            await client.send(post(CHAT, BODY + b" " * length, [b"X-Thing: 1"]))
            answers.append(await client.answer())
        first, second, longer = replica.calls

        assert len(harness.router.request_heads) == len(harness.router.answer_heads) == 1
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert answers[0].body == answers[1].body
    assert first.header(b"x-thing") == second.header(b"x-thing") == [b"1"]
    assert first.body == second.body == BODY
    assert longer.body == BODY + b" " * 7
    assert first.header(b"x-request-id") != second.header(b"x-request-id")


async def test_a_new_configuration_reads_every_head_anew(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        await harness.chat()
        assert len(harness.router.request_heads) == 1
        status, _ = await harness.push(config([replica]), revision=2)

        assert status == 200
        assert len(harness.router.request_heads) == 0
