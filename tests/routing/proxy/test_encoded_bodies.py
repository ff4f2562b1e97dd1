"""Request bodies in gzip and zstd: decoded as they arrive, with a limit, in turns with other clients."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import zlib

import pytest
from backports import zstd

from routing.http import request as heads
from routing.http.request import EncodedBody
from routing.http.response import RejectedRequestError
from routing.schema import Limits
from tests.fakes.replica import Call, plain_answer
from tests.pace import cpu_slowness
from tests.routing.proxy.harness import (
    BODY,
    CHAT,
    Harness,
    chat_body,
    config,
    get,
    post,
    routed,
)
from tests.routing.proxy.test_turns import MAX_WAIT_S, iterations
from tests.side_by_side import alone

MIB = 1 << 20
ENCODE = {"gzip": gzip.compress, "zstd": zstd.compress}
CODINGS = sorted(ENCODE)
# Repr-Digest too: representation data includes the content coding (RFC 9110, section 8.1).
DIGESTS = [b"Content-Digest: sha-256=:YQ==:", b"Repr-Digest: sha-256=:YQ==:", b"Digest: md5=YQ==", b"Content-MD5: YQ=="]
LONG = chat_body(text="A long text, with numbers: " + ", ".join(map(str, range(60_000))))  # 0.4 MB


def zeros(coding: str, size: int) -> bytes:
    """This many zeros, made piece by piece."""
    if coding == "gzip":
        compressor = zlib.compressobj(9, wbits=31)
        last = compressor.flush
    else:
        compressor = zstd.ZstdCompressor(level=3)
        last = compressor.flush
    piece = bytes(MIB)
    return b"".join(compressor.compress(piece) for _ in range(size // MIB)) + last()


def with_window(log: int) -> bytes:
    """A frame that announces a window of 2 ** log bytes."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
    return compressor.compress(BODY) + compressor.flush()


def header(coding: str) -> bytes:
    return b"Content-Encoding: " + coding.encode()


def in_chunks(body: bytes, coding: str, size: int) -> bytes:
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    start = b"POST %b HTTP/1.1\r\nHost: router\r\n%b\r\nTransfer-Encoding: chunked\r\n\r\n"
    return start % (CHAT, header(coding)) + framed + b"0\r\n\r\n"


async def nothing_is_held(harness: Harness) -> None:
    await harness.until(
        lambda: not (harness.router.unfinished_body_bytes or harness.router.services.held_body_bytes), "no bytes held"
    )


# --- what the replica gets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("body", [BODY, LONG], ids=["short", "long"])
async def test_the_replica_gets_the_decoded_body(coding, body, replica):
    encoded = ENCODE[coding](body)
    async with routed(config([replica])) as harness, harness.connect() as client:
        pieces = (
            post(CHAT, encoded, [header(coding), *DIGESTS]),
            in_chunks(encoded, coding, 1 + len(encoded) // 3),
            in_chunks(encoded, coding, 1 + len(encoded) // 500),
            post(CHAT, encoded, [header(coding)]),
            post(CHAT, body, DIGESTS),  # its members may be completed too
        )
        for sent, data in enumerate(pieces, start=1):
            assert (await client.ask(data)).status == 200
            call = replica.calls[-1]
            assert (len(replica.calls), call.body == body) == (sent, True)
            assert call.header(b"content-length") == [b"%d" % len(body)]
            assert call.header(b"content-encoding") + call.header(b"transfer-encoding") == []
            assert not any(name.endswith((b"digest", b"md5")) for name in call.head.lower().split(b"\r\n"))
        await nothing_is_held(harness)


async def test_several_members_are_one_body(replica):
    half = len(BODY) // 2
    async with routed(config([replica])) as harness:
        for coding, encode in ENCODE.items():
            members = encode(BODY[:half]) + encode(b"") + encode(BODY[half:])
            assert (await harness.chat(members, [header(coding)])).status == 200
        assert (await harness.chat(gzip.compress(BODY), [b"Content-Encoding: X-GZip"])).status == 200
        assert [call.body for call in replica.calls] == [BODY] * 3


async def test_pipelined_requests_are_answered_in_order(replica):
    bodies = [chat_body(text=f"Number {number}. " + "word " * 30_000 * (number % 2)) for number in range(6)]
    data = b"".join(
        post(CHAT, ENCODE[coding](body), [header(coding)]) if coding else post(CHAT, body)
        for body, coding in zip(bodies, ["gzip", "zstd", "", "zstd", "gzip", ""], strict=True)
    )
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(data)
        for _ in bodies:
            assert (await client.read_response()).status == 200
        assert [call.body == body for call, body in zip(replica.calls, bodies, strict=True)] == [True] * 6
        await nothing_is_held(harness)


# --- what is rejected ---------------------------------------------------------------------------------------

INVALID = {
    "gzip cut short": ("gzip", gzip.compress(BODY)[:-1]),
    "gzip without its checksum": ("gzip", gzip.compress(BODY)[:-8]),
    "gzip with a wrong checksum": ("gzip", gzip.compress(BODY)[:-8] + b"\0" * 8),
    "gzip and more": ("gzip", gzip.compress(BODY) + b"more"),
    "gzip and zeros": ("gzip", gzip.compress(BODY) + b"\0" * 8),
    "zlib": ("gzip", zlib.compress(BODY)),
    "plain": ("gzip", BODY),
    "zstd cut short": ("zstd", zstd.compress(BODY)[:-1]),
    "zstd and more": ("zstd", zstd.compress(BODY) + b"more"),
    "zstd as gzip": ("gzip", zstd.compress(BODY)),
    "gzip as zstd": ("zstd", gzip.compress(BODY)),
    "zstd with a window of 16 MiB": ("zstd", with_window(24)),
    "zstd with a window of 128 MiB": ("zstd", with_window(27)),
    "too many members": ("gzip", gzip.compress(b"") * 1001 + gzip.compress(BODY)),
    "too many frames": ("zstd", zstd.compress(b"") * 1001 + zstd.compress(BODY)),
    "gzip in gzip": ("gzip", gzip.compress(gzip.compress(BODY))),  # decoded once, and no JSON
}


@pytest.mark.parametrize("shape", INVALID)
async def test_invalid_bodies_get_400(shape, replica):
    coding, body = INVALID[shape]
    async with routed(config([replica], models=("tiny",))) as harness:
        response = await harness.chat(body, [header(coding)])
        assert (response.status, response.error["type"]) == (400, "invalid_request_error")
        if shape != "gzip in gzip":
            assert response.error["message"].startswith(f"the body is not valid {coding}: ")
        assert (await harness.send(in_chunks(body, coding, 10))).status == 400
        assert replica.calls == []
        await nothing_is_held(harness)


@pytest.mark.parametrize("value", [b"br", b"deflate", b"gzip, zstd", b"compress", b"gzip;q=1", b"*", b"aws-chunked"])
async def test_other_codings_get_415_with_those_that_are_accepted(value, replica):
    async with routed(config([replica])) as harness:
        response = await harness.chat(headers=[b"Content-Encoding: " + value])
        assert (response.status, response.headers["accept-encoding"]) == (415, "gzip, zstd")
        assert response.error["code"] == 415
        assert (await harness.chat(headers=[b"Content-Encoding: identity"])).status == 200


# --- bodies that grow ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    """256 MiB of zeros in each coding, eight times what a body may have."""
    return {coding: zeros(coding, 256 * MIB) for coding in CODINGS}


def decode_all(body: EncodedBody) -> RejectedRequestError | None:
    try:
        while body.step():
            pass
    except RejectedRequestError as rejected:
        return rejected
    return None


def test_a_bomb_is_decoded_up_to_the_limit(bombs):
    for coding, bomb in bombs.items():
        body = EncodedBody(coding.encode(), Limits())
        body.add(bomb)
        rejected = decode_all(body)
        assert rejected is not None
        assert rejected.status == 413
        assert body.held_bytes <= Limits().max_body_bytes + 1 + len(bomb)


def test_a_step_decodes_a_bounded_part(bombs):
    for coding, bomb in bombs.items():
        body = EncodedBody(coding.encode(), Limits())
        body.add(bomb)
        held = body.held_bytes
        for _ in range(20):
            body.step()
            assert body.held_bytes - held <= heads.STEP_BYTES
            held = body.held_bytes


@alone
@pytest.mark.parametrize(("framing", "coding"), [("length", "zstd"), ("chunked", "gzip"), ("behind", "gzip")])
async def test_bombs_hold_nobody_up_and_take_no_memory(coding, framing, bombs, replica):
    """Eight clients at once; the sum of what is held never exceeds the limit of all bodies."""
    bomb = bombs[coding]
    framed = in_chunks(bomb, coding, 8192) if framing == "chunked" else post(CHAT, bomb, [header(coding)])
    data = get(b"/health") * 3 + framed if framing == "behind" else framed
    limits = Limits(max_unfinished_body_bytes=128 * MIB)
    async with routed(config([replica], limits=limits)) as harness:
        held = []

        async def explode() -> int:
            async with harness.connect() as client:
                try:
                    client.writer.write(data)
                    response = await client.read_response()
                    while response.status == 200:
                        response = await client.read_response()
                except ConnectionError:
                    return 0
                return response.status

        async def watch() -> None:
            while True:
                held.append(harness.router.unfinished_body_bytes)
                await asyncio.sleep(0)

        async with harness.connect() as client, iterations() as took_s:
            watching = asyncio.create_task(watch())
            exploding = asyncio.gather(*(explode() for _ in range(8)))
            answered = 0
            while not exploding.done():
                assert (await client.ask(get(b"/health"))).status == 200
                answered += 1
            watching.cancel()
        assert set(exploding.result()) <= {413, 503}
        assert 413 in exploding.result()
        assert answered >= 5
        assert max(held) <= limits.max_unfinished_body_bytes + 8 * MIB
        assert sorted(took_s)[int(0.95 * len(took_s))] <= MAX_WAIT_S * cpu_slowness()
        assert replica.calls == []
        await nothing_is_held(harness)


async def test_a_client_whose_body_is_rejected_may_send_the_rest(replica):
    """More than the kernel holds; decoding the beginning takes several turns, in which nothing is read."""
    body = gzip.compress(bytes(16 * MIB)) + bytes(16 * MIB)
    async with routed(config([replica])) as harness, harness.connect() as client:
        assert (await client.ask(post(CHAT, body, [header("gzip")]))).status == 400


async def test_a_body_behind_one_that_waits_is_limited_too(replica):
    """There was an endless recursion: after the rejection the bytes of the waiting one are still too many."""
    may_end = asyncio.Event()

    async def script(call: Call) -> None:
        await may_end.wait()
        await call.send(plain_answer(b"{}"))

    replica.script = script
    waiting = gzip.compress(chat_body(text=os.urandom(10_000).hex()))
    limits = Limits(max_unfinished_body_bytes=MIB)
    async with routed(config([replica], limits=limits)) as harness:
        async with harness.connect() as first, harness.connect() as second:
            await second.send(post(CHAT, bytes(MIB - 8000))[:-1])
            await harness.until(lambda: harness.router.unfinished_body_bytes == MIB - 8001, "the other client's body")
            await first.send(post(CHAT))
            await replica.wait_calls(1)
            await first.send(post(CHAT, waiting, [header("gzip")]) + post(CHAT, bytes(20_000))[:-1])
            await harness.until(lambda: harness.router.unfinished_body_bytes > MIB, "the first client's bodies")
            may_end.set()
            assert [(await first.read_response()).status for _ in range(2)] == [200, 503]
        await nothing_is_held(harness)


async def test_the_bytes_of_all_clients_are_limited_together(replica):
    """Bodies that wait for their end count by what they have become."""
    limits = Limits(max_unfinished_body_bytes=4 * MIB)
    body = gzip.compress(json.dumps({"text": "a" * 3 * MIB}).encode())
    async with routed(config([replica], limits=limits)) as harness:
        async with harness.connect() as first, harness.connect() as second:
            data = post(CHAT, body, [header("gzip")])
            await first.send(data[:-1])
            await harness.until(lambda: harness.router.unfinished_body_bytes > 3 * MIB, "the first body")
            assert (await second.ask(data[:-1])).status == 503
        await nothing_is_held(harness)
