"""What a client may send: each ambiguous or malformed form is refused, and nothing of it reaches a replica."""

from __future__ import annotations

import json

import pytest

from routing.schema import Limits
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import BODY, CHAT, Answer, config, get, post, routed

LENGTH = b"Content-Length: %d\r\n" % len(BODY)
START = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: router\r\n"
END = b"\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)

REFUSED = {
    "no Host": (START + LENGTH + END + BODY, 400),
    "empty Host": (START + b"Host:\r\n" + LENGTH + END + BODY, 400),
    "two Hosts": (START + HOST + b"Host: other\r\n" + LENGTH + END + BODY, 400),
    "two equal Hosts": (START + HOST + HOST + LENGTH + END + BODY, 400),
    "Host with a blank": (START + b"Host: a b\r\n" + LENGTH + END + BODY, 400),
    "Host with a path": (START + b"Host: a/b\r\n" + LENGTH + END + BODY, 400),
    "Host with credentials": (START + b"Host: u@a\r\n" + LENGTH + END + BODY, 400),
    "Host list": (START + b"Host: a, b\r\n" + LENGTH + END + BODY, 400),
    "Host with a bad port": (START + b"Host: a:x\r\n" + LENGTH + END + BODY, 400),
    "TE and CL": (START + HOST + LENGTH + CHUNKED + END + CHUNKS, 400),
    "CL and TE": (START + HOST + CHUNKED + LENGTH + END + CHUNKS, 400),
    "TE in HTTP/1.0": (b"POST /v1/chat/completions HTTP/1.0\r\n" + HOST + CHUNKED + END + CHUNKS, 400),
    "TE gzip, chunked": (START + HOST + b"Transfer-Encoding: gzip, chunked\r\n" + END + CHUNKS, 501),
    "TE chunked, gzip": (START + HOST + b"Transfer-Encoding: chunked, gzip\r\n" + END + CHUNKS, 400),
    "TE xchunked": (START + HOST + b"Transfer-Encoding: xchunked\r\n" + END + CHUNKS, 501),
    "TE identity": (START + HOST + b"Transfer-Encoding: identity\r\n" + END + BODY, 501),
    "TE chunked twice": (START + HOST + CHUNKED + CHUNKED + END + CHUNKS, 400),
    "TE empty": (START + HOST + b"Transfer-Encoding:\r\n" + END + BODY, 400),
    "TE quoted": (START + HOST + b'Transfer-Encoding: "chunked"\r\n' + END + CHUNKS, 501),
    "two equal CL": (START + HOST + LENGTH + LENGTH + END + BODY, 400),
    "two different CL": (START + HOST + LENGTH + b"Content-Length: 3\r\n" + END + BODY, 400),
    "CL list": (START + HOST + b"Content-Length: 3, 3\r\n" + END + b"abc", 400),
    "CL signed": (START + HOST + b"Content-Length: +3\r\n" + END + b"abc", 400),
    "CL negative": (START + HOST + b"Content-Length: -3\r\n" + END + b"abc", 400),
    "CL hex": (START + HOST + b"Content-Length: 0x3\r\n" + END + b"abc", 400),
    "CL empty": (START + HOST + b"Content-Length:\r\n" + END + b"abc", 400),
    "CL overflow": (START + HOST + b"Content-Length: 99999999999999999999\r\n" + END + b"abc", 400),
    "CL with an underscore": (START + HOST + b"Content-Length: 1_0\r\n" + END + b"abc", 400),
    "chunk size 0x3": (START + HOST + CHUNKED + END + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
    "chunk size signed": (START + HOST + CHUNKED + END + b"+3\r\nabc\r\n0\r\n\r\n", 400),
    "chunk size overflow": (START + HOST + CHUNKED + END + b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n", 400),
    "chunk longer than its size": (START + HOST + CHUNKED + END + b"3\r\nabcd\r\n0\r\n\r\n", 400),
    "chunk size then a bare LF": (START + HOST + CHUNKED + END + b"3\nabc\r\n0\r\n\r\n", 400),
    "chunk data then a bare LF": (START + HOST + CHUNKED + END + b"3\r\nabc\n0\r\n\r\n", 400),
    "chunk extension with a bare LF": (START + HOST + CHUNKED + END + b"3;a\n=b\r\nabc\r\n0\r\n\r\n", 400),
    "blank before the chunk size": (START + HOST + CHUNKED + END + b" 3\r\nabc\r\n0\r\n\r\n", 400),
    "bare LF lines": (b"GET /health HTTP/1.1\nHost: a\n\n", 400),
    "bare CR in a value": (START + HOST + b"X: a\rb\r\n" + LENGTH + END + BODY, 400),
    "NUL in a value": (START + HOST + b"X: a\0b\r\n" + LENGTH + END + BODY, 400),
    "control in a value": (START + HOST + b"X: a\x01b\r\n" + LENGTH + END + BODY, 400),
    "obs-fold": (START + HOST + b"X: a\r\n b\r\n" + LENGTH + END + BODY, 400),
    "blank before the colon": (START + HOST + b"X : a\r\n" + LENGTH + END + BODY, 400),
    "blank before the first header": (START + b" " + HOST + LENGTH + END + BODY, 400),
    "header without a name": (START + HOST + b": a\r\n" + LENGTH + END + BODY, 400),
    "header without a colon": (START + HOST + b"X\r\n" + LENGTH + END + BODY, 400),
    "header name with a blank": (START + HOST + b"X Y: a\r\n" + LENGTH + END + BODY, 400),
    "header name with a parenthesis": (START + HOST + b"X(: a\r\n" + LENGTH + END + BODY, 400),
    "header name not ASCII": (START + HOST + b"X\xe9: a\r\n" + LENGTH + END + BODY, 400),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 505),
    "HTTP/0.9 by name": (b"GET /health HTTP/0.9\r\n\r\n", 505),
    "HTTP/2.0 by name": (b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "HTTP/1.2": (b"GET /health HTTP/1.2\r\nHost: a\r\n\r\n", 400),
    "lower-case version": (b"GET /health http/1.1\r\nHost: a\r\n\r\n", 400),
    "blank after the version": (b"GET /health HTTP/1.1 \r\nHost: a\r\n\r\n", 400),
    "lower-case method": (b"post /v1/chat/completions HTTP/1.1\r\n" + HOST + LENGTH + END + BODY, 400),
    "unknown method": (b"BREW /health HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "RTSP": (b"DESCRIBE /health RTSP/1.0\r\n\r\n", 405),
    "CONNECT": (b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", 405),
    "another host's absolute form": (b"GET http://other/health HTTP/1.1\r\nHost: router\r\n\r\n", 421),
    "absolute form in HTTP/1.0": (b"GET http://other/health HTTP/1.0\r\n\r\n", 421),
    "ftp absolute form": (b"GET ftp://router/health HTTP/1.1\r\nHost: router\r\n\r\n", 400),
    "target without a slash": (b"GET health HTTP/1.1\r\nHost: router\r\n\r\n", 400),
    "target not ASCII": (b"GET /he\xe9alth HTTP/1.1\r\nHost: router\r\n\r\n", 400),
    "fragment": (b"GET /health#x HTTP/1.1\r\nHost: router\r\n\r\n", 404),
    "two blanks before the target": (b"GET  /x HTTP/1.1\r\nHost: router\r\n\r\n", 404),
    "another expectation": (START + HOST + b"Expect: 200-ok\r\n" + LENGTH + END + BODY, 417),
    "two expectations": (START + HOST + b"Expect: 100-continue\r\n" * 2 + LENGTH + END + BODY, 417),
    "gzip body": (START + HOST + b"Content-Encoding: gzip\r\n" + LENGTH + END + BODY, 415),
    "announced body too large": (START + HOST + b"Content-Length: 99999\r\n" + END, 413),
    "chunked body too large": (START + HOST + CHUNKED + END + b"fff0\r\n" + b"x" * 0xFFF0 + END, 413),
    "too many headers": (START + HOST + b"X: y\r\n" * 100 + LENGTH + END + BODY, 431),
    "headers too large": (START + HOST + (b"X: %b\r\n" % (b"y" * 2000)) * 3 + LENGTH + END + BODY, 431),
    "one header too large": (START + HOST + b"X: " + b"y" * 9000 + END + LENGTH + END + BODY, 431),
    "one header without end": (START + HOST + b"X: " + b"y" * 9000, 431),
    "target too large": (b"GET /" + b"y" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
    "target without end": (b"GET /" + b"y" * 9000, 431),
    "chunks of mostly extension": (START + HOST + CHUNKED + END + b"1;" + b"e" * 20000, 400),
    "trailers without end": (START + HOST + CHUNKED + END + b"1\r\nx\r\n0\r\nT: " + b"e" * 20000, 400),
}

ELSEWHERE = [
    b"/",
    b"*",
    b"/v1",
    b"/v1/",
    b"/v1/chat/completions/",
    b"//v1/chat/completions",
    b"/v1//chat/completions",
    b"/V1/chat/completions",
    b"/v1/chat/completions;a",
    b"/v1/chat/%63ompletions",
    b"/v1/chat/completions%2e",
    b"/v1/../v1/chat/completions",
    b"/v1/./chat/completions",
    b"/v1/x/%2e%2e/chat/completions",
    b"/invocations",
    b"/pause",
    b"/scale_elastic_ep",
    b"/update_weights",
    b"/tokenize",
    b"/metrics",
    b"/load",
    b"/version",
    b"/v1/messages",
    b"/v1/audio/transcriptions",
    b"/collective_rpc",
    b"/reset_prefix_cache",
    b"/sleep",
    b"/admin/config",
]

LIMITS = Limits(max_header_bytes=4096, max_body_bytes=32_768, header_timeout_s=0.3, body_idle_timeout_s=0.3)


@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_that_another_parser_could_read_otherwise_is_refused(name: str, replica: FakeReplica) -> None:
    request, status = REFUSED[name]
    async with routed(config([replica], limits=LIMITS)) as harness, harness.connect() as client:
        await client.send(request)
        answer = await client.answer()

        assert answer.status == status
        assert answer.error["code"] == status
        if status != 404:
            assert answer.headers["connection"] == "close"
            assert await client.read_all() == b""
        assert replica.calls == []


@pytest.mark.parametrize("path", ELSEWHERE)
@pytest.mark.parametrize("method", [b"POST", b"GET"])
async def test_only_the_paths_of_the_contract_are_reached(path: bytes, method: bytes, replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(b"%b %b HTTP/1.1\r\nHost: router\r\nContent-Length: 2\r\n\r\n{}" % (method, path))
        assert (await client.answer()).status == 404
        await client.send(get(b"/health"))
        assert (await client.answer()).status == 200
    assert replica.calls == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        (b"GET", CHAT, "POST"),
        (b"PUT", b"/v1/completions", "POST"),
        (b"OPTIONS", b"/v1/embeddings", "POST"),
        (b"DELETE", b"/v1/models", "GET, HEAD"),
        (b"POST", b"/health", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(
    method: bytes, path: bytes, allowed: str, replica: FakeReplica
) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(b"%b %b HTTP/1.1\r\nHost: router\r\nContent-Length: 0\r\n\r\n" % (method, path))
        answer = await client.answer()
    assert (answer.status, answer.headers["allow"]) == (405, allowed)


ACCEPTED = {
    "absolute form of this host": START.replace(b" /v1", b" http://Router/v1") + HOST + LENGTH + END + BODY,
    "empty lines before": b"\r\n\r\n" + START + HOST + LENGTH + END + BODY,
    "IPv6 Host": START + b"Host: [::1]:8080\r\n" + LENGTH + END + BODY,
    "HTTP/1.0 without Host": b"POST /v1/chat/completions HTTP/1.0\r\n" + LENGTH + END + BODY,
    "chunked": START + HOST + CHUNKED + END + CHUNKS,
    "CHUNKED": START + HOST + b"Transfer-Encoding: CHUNKED\r\n" + END + CHUNKS,
    "chunk extension": START + HOST + CHUNKED + END + CHUNKS.replace(b"\r\n", b";a=b\r\n", 1),
    "one byte a chunk": START + HOST + CHUNKED + END + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    "an offered upgrade": START + HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + LENGTH + END + BODY,
    "a query": START.replace(b" HTTP", b"?a=b HTTP") + HOST + LENGTH + END + BODY,
}


@pytest.mark.parametrize("name", ACCEPTED)
async def test_a_sound_request_reaches_the_replica_whole_and_reframed(name: str, replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(ACCEPTED[name])
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b'{"ok":true}')

    (call,) = replica.calls
    assert call.body == BODY
    assert call.header(b"content-length") == [str(len(BODY)).encode()]
    assert call.header(b"transfer-encoding") == []
    assert call.header(b"host") == [f"127.0.0.1:{replica.port}".encode()]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
async def test_a_request_may_come_in_pieces_of_any_size(size: int, replica: FakeReplica) -> None:
    for name in ("chunked", "absolute form of this host"):
        request = ACCEPTED[name]
        async with routed(config([replica])) as harness, harness.connect() as client:
            await client.send(*(request[start : start + size] for start in range(0, len(request), size)))
            assert (await client.answer()).status == 200
    assert [call.body for call in replica.calls] == [BODY, BODY]


async def test_trailers_never_become_headers(replica: FakeReplica) -> None:
    trailers = b"0\r\nX-Sneaky: 1\r\nAuthorization: Bearer x\r\n\r\n"
    request = START + HOST + CHUNKED + b"Trailer: X-Sneaky\r\n" + END + CHUNKS.replace(b"0\r\n\r\n", trailers)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(request)
        assert (await client.answer()).status == 200
        await client.send(post(CHAT))
        assert (await client.answer()).status == 200
    for call in replica.calls:
        assert call.header(b"x-sneaky") == call.header(b"authorization") == call.header(b"trailer") == []


async def test_only_end_to_end_headers_go_on(replica: FakeReplica) -> None:
    stay = [b"Keep-Alive: 5", b"TE: trailers", b"Proxy-Authorization: x", b"Proxy-Connection: x", b"Upgrade: x"]
    stay += [b"X-Named: 1", b"X-Forwarded-For: 1.2.3.4", b"Forwarded: for=x", b"X-Real-IP: 1", b"X-User-Id: 1"]
    stay += [b"X-Warmpath-Replica: other"]
    go = [b"Authorization: Bearer key", b"Cookie: a=b", b"X-Session-ID: s", b"X-Task-Group: g", b"Accept: */*"]
    async with routed(config([replica])) as harness:
        await harness.chat(headers=[*stay, b"Connection: keep-alive, X-Named", *go])

    sent = {name for name, _ in replica.calls[0].headers}
    assert sent == {b"host", b"content-length", b"x-request-id"} | {line.partition(b":")[0].lower() for line in go}
    assert replica.calls[0].header(b"authorization") == [b"Bearer key"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [(b"my-id_1.2", True), (b"a" * 64, True), (b"a" * 65, False), (b"a b", False), (b"a/b", False), (b"", False)],
)
async def test_a_request_id_is_kept_if_it_is_harmless(given: bytes, kept: bool, replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        answer = await harness.chat(headers=[b"X-Request-Id: " + given])
    (sent,) = replica.calls[0].header(b"x-request-id")
    assert answer.headers["x-request-id"] == sent.decode()
    assert (sent == given) is kept
    assert 1 <= len(sent) <= 64


async def test_expect_100_continue_gets_its_go_ahead_before_the_body(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(START + HOST + LENGTH + b"Expect: 100-continue\r\n" + END)
        assert await client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(BODY)
        assert (await client.answer()).status == 200
    assert replica.calls[0].header(b"expect") == []


async def test_expect_100_continue_with_too_large_a_body_is_refused_without_it(replica: FakeReplica) -> None:
    async with routed(config([replica], limits=LIMITS)) as harness, harness.connect() as client:
        await client.send(START + HOST + b"Content-Length: 99999\r\nExpect: 100-continue\r\n" + END)
        assert (await client.answer()).status == 413


@pytest.mark.parametrize(
    ("body", "param"),
    [(b"", None), (b"{", None), (b"[]", None), (b'{"model":1}', "model"), (b'{"a":' * 200_000, None), (b"\xff", None)],
)
async def test_a_body_that_cannot_be_placed_is_refused(body: bytes, param: str | None, replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness:
        answer = await harness.chat(body)
        await harness.at_rest()
    assert (answer.status, answer.error["param"]) == (400, param)
    assert replica.calls == []


async def test_a_refused_client_can_read_the_refusal_while_it_still_sends(replica: FakeReplica) -> None:
    limits = Limits(max_body_bytes=1024)
    async with routed(config([replica], limits=limits)) as harness, harness.connect() as client:
        await client.send(START + HOST + b"Content-Length: 4000000\r\n" + END, b"x" * 1_000_000)
        assert (await client.answer()).status == 413


async def test_an_error_is_openais_error_object(replica: FakeReplica) -> None:
    async with routed(config([replica], models=("tiny",))) as harness:
        answer = await harness.chat(json.dumps({"model": "other", "messages": []}).encode())
    assert answer.status == 404
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert (answer.error["param"], answer.error["code"]) == ("model", 404)


def test_an_answer_reads_its_own_headers() -> None:
    assert Answer(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", b"", b"").headers == {"a": "b"}
