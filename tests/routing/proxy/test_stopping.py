"""Whoever was let in before a router stopped is answered."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from routing.http.tls import TlsFiles
from routing.proxy import shutdown
from routing.proxy.shutdown import CLOSE_S, POLL_S, drain
from routing.schema import Limits
from routing.server import serve
from routing.settings import read_settings
from routing.singleprocess import SingleProcess
from tests.fakes.certificates import Authority
from tests.fakes.replica import Call, FakeReplica, Held, answering, hanging, plain_answer, sse
from tests.routing.proxy.harness import CHAT, DEADLINE_S, SOCKET_BYTES, config, get, narrow, post, routed

LARGE = 60_000  # bytes: more than the kernel holds, and in one read of the replica


async def test_a_stopping_router_finishes_what_it_began(replica: FakeReplica) -> None:
    """R11"""
    replica.script = held = Held()
    async with routed(config([replica])) as harness, harness.connect() as idle, harness.connect() as busy:
        await idle.send(get(b"/health"))
        await idle.answer()
        await busy.send(post(CHAT) + post(CHAT))
        await replica.wait_calls(1)
        draining = asyncio.create_task(harness.server.drain())
        assert await idle.read_all() == b""
        assert await harness.admin("GET", "/readyz") == (503, {"status": "not_ready", "reason": "draining"})
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", harness.port)
        assert not draining.done()
        held.go.set()
        assert (await busy.answer()).body == sse({"n": 1}) + sse({"n": 2})
        async with asyncio.timeout(5):
            await draining
        await harness.at_rest()


async def test_a_stopping_router_does_not_wait_for_ever(replica: FakeReplica) -> None:
    """R11"""

    replica.script = hanging
    async with routed(config([replica], limits=Limits(drain_timeout_s=0.1))) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await replica.wait_calls(1)
        async with asyncio.timeout(2):
            await harness.server.drain()


async def test_a_connection_that_was_just_accepted_is_answered_and_closed(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as fresh, harness.connect() as half:
        await half.send(post(CHAT)[:-5])
        await harness.until(lambda: len(harness.router.clients) == 2, "both connections")
        await harness.until(lambda: any(client._reader.head for client in harness.router.clients), "half a request")
        draining = asyncio.create_task(harness.server.drain())
        await harness.until(lambda: harness.router.is_draining, "the drain")
        await fresh.send(post(CHAT))
        await half.send(post(CHAT)[-5:])
        for client in (fresh, half):
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await client.read_all() == b""
        async with asyncio.timeout(5):
            await draining
        await harness.at_rest()


async def test_an_idle_connection_may_bring_one_more_request_where_another_process_goes_on(
    replica: FakeReplica,
) -> None:
    async with routed(config([replica])) as harness, harness.connect() as idle, harness.connect() as silent:
        for client in (idle, silent):
            await client.send(get(b"/health"))
            await client.answer()
        draining = asyncio.create_task(drain(harness.router, linger_s=0.2))
        await harness.until(lambda: harness.router.is_draining, "the drain")
        await idle.send(post(CHAT))
        answer = await idle.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await silent.read_all() == b""
        async with asyncio.timeout(5):
            await draining


async def test_a_connection_that_brings_nothing_holds_nobody_up(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect():
        await harness.until(lambda: bool(harness.router.clients), "the connection")
        async with asyncio.timeout(5):
            await harness.server.drain()


async def goes_on(draining: asyncio.Task[None]) -> None:
    """Check that a drain has not ended when what closes in an orderly way would have."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2 * (CLOSE_S + POLL_S)):
            await asyncio.shield(draining)


async def test_an_answer_is_taken_to_its_end_by_a_client_that_is_slow(replica: FakeReplica) -> None:
    """R11: the replica has said all of it long ago."""
    replica.script = answering(b"x" * LARGE)
    async with routed(config([replica])) as harness, narrow(harness) as client:
        client.writer.write(post(CHAT))
        await replica.wait_calls(1)
        await harness.at_rest()
        draining = asyncio.create_task(harness.server.drain())
        await goes_on(draining)
        client.writer.transport.resume_reading()
        assert len((await client.answer()).body) == LARGE
        assert await client.read_all() == b""
        async with asyncio.timeout(5):
            await draining


async def test_an_answer_behind_tls_is_taken_to_its_end_by_a_client_that_is_slow(
    tmp_path: Path, replica: FakeReplica
) -> None:
    authority, replica.script = Authority(tmp_path), answering(b"x" * LARGE)
    certificate = authority.issue("router")
    files = TlsFiles(str(certificate.path), str(certificate.key))

    def ask(port: int) -> ssl.SSLSocket:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        plain.settimeout(DEADLINE_S)
        plain.connect(("127.0.0.1", port))
        client = authority.client().wrap_socket(plain, server_hostname="127.0.0.1")
        client.sendall(post(CHAT))
        return client

    def read(client: ssl.SSLSocket) -> bytes:
        return b"".join(iter(lambda: client.recv(65536), b""))

    async with routed(config([replica]), tls=files) as harness:
        with await asyncio.to_thread(ask, harness.port) as client:
            await replica.wait_calls(1)
            await harness.at_rest()
            draining = asyncio.create_task(harness.server.drain())
            await goes_on(draining)
            assert len((await asyncio.to_thread(read, client)).partition(b"\r\n\r\n")[2]) == LARGE
        async with asyncio.timeout(5):
            await draining


async def test_a_client_that_never_takes_its_answer_is_not_waited_for_for_ever(replica: FakeReplica) -> None:
    replica.script = answering(b"x" * LARGE)
    limits = Limits(drain_timeout_s=0.5)
    async with routed(config([replica], limits=limits)) as harness, narrow(harness) as client:
        client.writer.write(post(CHAT))
        await replica.wait_calls(1)
        await harness.at_rest()
        async with asyncio.timeout(5):
            await harness.server.drain()


async def test_a_body_that_stops_coming_is_turned_away(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "FIRST_BYTE_S", 0.1)
    async with routed(config([replica])) as harness, harness.connect() as half, harness.connect() as silent:
        await half.send(post(CHAT)[:-5])
        await harness.until(lambda: any(client._reader.head for client in harness.router.clients), "half a request")
        async with asyncio.timeout(shutdown.UPLOADS_S):
            await drain(harness.router)
        answer = await half.answer()
        assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
        assert await half.read_all() == await silent.read_all() == b""
    assert replica.calls == []


@pytest.mark.parametrize(("uploads_s", "status"), [(5.0, 200), (0.5, 503)])
async def test_a_body_that_goes_on_coming_is_waited_for_so_long(
    uploads_s: float, status: int, replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "FIRST_BYTE_S", 0.4)
    monkeypatch.setattr(shutdown, "UPLOADS_S", uploads_s)
    whole = post(CHAT)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(whole[:-10])
        await harness.until(lambda: any(client._reader.head for client in harness.router.clients), "part of a request")
        draining = asyncio.create_task(drain(harness.router))
        with suppress(ConnectionError):
            for at in range(len(whole) - 10, len(whole)):
                await asyncio.sleep(0.1)
                await client.send(whole[at : at + 1])
        assert (await client.answer()).status == status
        async with asyncio.timeout(5):
            await draining


async def test_half_a_request_behind_one_that_is_answered_holds_nobody_up(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "FIRST_BYTE_S", 60.0)
    monkeypatch.setattr(shutdown, "UPLOADS_S", 60.0)
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await call.send(plain_answer(b"fine"))

    replica.script = script
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT) + post(CHAT)[:-5])
        await replica.wait_calls(1)
        draining = asyncio.create_task(drain(harness.router))
        await harness.until(lambda: harness.router.is_draining, "the drain")
        go.set()
        assert (await client.answer()).headers["connection"] == "close"
        async with asyncio.timeout(5):
            await draining


async def test_what_goes_wrong_while_draining_is_not_taken_for_a_good_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(SingleProcess, "drain", fail)
    monkeypatch.setattr("routing.server.tune_garbage_collector", lambda: None)
    settings = read_settings(
        ["--control-plane=http://127.0.0.1:1", "--port=0", "--admin-port=0", f"--state-dir={tmp_path}"], {}
    )
    running = asyncio.create_task(serve(settings))
    ready = asyncio.Event()
    monkeypatch.setattr("routing.server._say_ready", lambda _: ready.set())
    async with asyncio.timeout(20):
        await ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(RuntimeError, match="a mistake of ours"):
            await running
