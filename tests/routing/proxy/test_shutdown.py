"""Draining: requests that have arrived are answered; shared listeners close without refused connections."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from routing.http import sockets
from routing.http.sockets import accept_queue_length, bind, close_listeners, divert_new_connections
from routing.http.tls import TlsFiles
from routing.proxy import shutdown
from routing.proxy.shutdown import CLOSE_S, POLL_S, drain
from routing.schema import Limits
from routing.server import serve
from routing.settings import read_settings
from routing.singleprocess import SingleProcess
from tests.fakes.certificates import Authority
from tests.fakes.replica import Call, Held, answering, hanging, plain_answer, sse
from tests.routing.proxy.harness import CHAT, DEADLINE_S, SOCKET_BYTES, config, get, narrow, post, routed

LARGE = 60_000  # bytes: more than the kernel buffers, and one read of the replica


async def test_a_draining_router_finishes_running_requests(replica):
    replica.script = held_response = Held()
    async with routed(config([replica])) as harness, harness.connect() as idle, harness.connect() as busy:
        await idle.ask(get(b"/health"))
        await busy.send(post(CHAT) + post(CHAT))
        await replica.wait_calls(1)
        draining = asyncio.create_task(harness.server.data.drain())
        assert await idle.read_all() == b""
        assert await harness.admin("GET", "/readyz") == (503, {"status": "not_ready", "reason": "draining"})
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", harness.port)
        assert not draining.done()
        held_response.go.set()
        assert (await busy.read_response()).body == sse({"n": 1}) + sse({"n": 2})
        await ended(draining)
        await harness.at_rest()


async def test_draining_ends_at_its_timeout(replica):

    replica.script = hanging
    async with routed(config([replica], limits=Limits(drain_timeout_s=0.1))) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await replica.wait_calls(1)
        await ended(harness.server.data.drain())


async def test_new_and_incomplete_requests_are_answered_and_their_connections_closed(replica):
    async with routed(config([replica])) as harness, harness.connect() as fresh, harness.connect() as incomplete:
        await incomplete.send(post(CHAT)[:-5])
        await harness.until(lambda: len(harness.router.clients) == 2, "both connections")
        await harness.until(lambda: any(client._reader.head for client in harness.router.clients), "half a request")
        draining = asyncio.create_task(harness.server.data.drain())
        await harness.until(lambda: harness.router.is_draining, "the drain")
        await fresh.send(post(CHAT))
        await incomplete.send(post(CHAT)[-5:])
        for client in (fresh, incomplete):
            response = await client.read_response()
            assert (response.status, response.headers["connection"]) == (200, "close")
            assert await client.read_all() == b""
        await ended(draining)
        await harness.at_rest()


async def test_idle_connections_may_send_one_more_request_during_a_handover(replica):
    async with routed(config([replica])) as harness, harness.connect() as idle, harness.connect() as silent:
        for client in (idle, silent):
            await client.ask(get(b"/health"))
        draining = asyncio.create_task(drain(harness.router, linger_s=0.2))
        await harness.until(lambda: harness.router.is_draining, "the drain")
        response = await idle.ask(post(CHAT))
        assert (response.status, response.headers["connection"]) == (200, "close")
        assert await silent.read_all() == b""
        await ended(draining)


async def ended(draining: Awaitable[None]) -> None:
    async with asyncio.timeout(15):
        await draining


async def goes_on(draining: asyncio.Task[None]) -> None:
    """Check that a drain waits longer than for closing connections."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2 * (CLOSE_S + POLL_S)):
            await asyncio.shield(draining)


async def test_a_slow_client_receives_its_whole_response(replica):
    """The replica has sent the whole response long before."""
    replica.script = answering(b"x" * LARGE)
    async with routed(config([replica])) as harness, narrow(harness) as client:
        client.writer.write(post(CHAT))
        await replica.wait_calls(1)
        await harness.at_rest()
        draining = asyncio.create_task(harness.server.data.drain())
        await goes_on(draining)
        client.writer.transport.resume_reading()
        assert len((await client.read_response()).body) == LARGE
        assert await client.read_all() == b""
        await ended(draining)


async def test_a_slow_client_receives_its_whole_response_over_tls(tmp_path, replica):
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
            draining = asyncio.create_task(harness.server.data.drain())
            await goes_on(draining)
            assert len((await asyncio.to_thread(read, client)).partition(b"\r\n\r\n")[2]) == LARGE
        await ended(draining)


async def test_a_client_that_never_reads_delays_only_until_the_timeout(replica):
    replica.script = answering(b"x" * LARGE)
    limits = Limits(drain_timeout_s=0.5)
    async with routed(config([replica], limits=limits)) as harness, narrow(harness) as client:
        client.writer.write(post(CHAT))
        await replica.wait_calls(1)
        await harness.at_rest()
        await ended(harness.server.data.drain())


async def test_a_stalled_body_is_rejected(replica, monkeypatch):
    monkeypatch.setattr(shutdown, "FIRST_BYTE_S", 0.1)
    async with routed(config([replica])) as harness, harness.connect() as incomplete, harness.connect() as silent:
        await incomplete.send(post(CHAT)[:-5])
        await harness.until(lambda: any(client._reader.head for client in harness.router.clients), "half a request")
        async with asyncio.timeout(shutdown.UPLOADS_S):
            await drain(harness.router)
        response = await incomplete.read_response()
        assert (response.status, response.headers["retry-after"], response.headers["connection"]) == (503, "1", "close")
        assert await incomplete.read_all() == await silent.read_all() == b""
    assert replica.calls == []


@pytest.mark.parametrize(("uploads_s", "status"), [(5.0, 200), (0.5, 503)])
async def test_a_moving_body_is_received_up_to_a_limit(uploads_s, status, replica, monkeypatch):
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
        assert (await client.read_response()).status == status
        await ended(draining)


async def test_half_a_request_behind_an_answered_one_delays_nothing(replica, monkeypatch):
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
        assert (await client.read_response()).headers["connection"] == "close"
        await ended(draining)


async def test_errors_while_draining_are_raised(tmp_path, monkeypatch):
    async def fail(_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(SingleProcess, "drain", fail)
    monkeypatch.setattr("routing.server.tune_garbage_collector", lambda: None)
    settings = read_settings(
        ["--control-plane=http://127.0.0.1:1", "--port=0", "--admin-port=0", f"--state-dir={tmp_path}"], {}
    )
    running = asyncio.create_task(serve(settings))
    ready = asyncio.Event()
    monkeypatch.setattr("routing.server._print_ready", lambda _: ready.set())
    async with asyncio.timeout(20):
        await ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(RuntimeError, match="a mistake of ours"):
            await running


Sockets = list[socket.socket]


@contextmanager
def connections(port: int, count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        yield


def accept_all(sockets: Sockets) -> list[int]:
    """Accept all connections; returns the number for each socket."""
    counts = [accept_queue_length(listener) for listener in sockets]
    for listener, count in zip(sockets, counts, strict=True):
        for _ in range(count):
            listener.accept()[0].close()
    return counts


@contextmanager
def sharing(leaving: list[Sockets], staying: list[Sockets]) -> Iterator[tuple[int, Sockets, Sockets]]:
    groups = [listener for [listener] in leaving], [listener for [listener] in staying]
    try:
        for listener in (*groups[0], *groups[1]):
            listener.listen(128)
        yield groups[0][0].getsockname()[1], *groups
    finally:
        for listener in (*groups[0], *groups[1]):
            listener.close()


async def pair(leaving: int, staying: int) -> tuple[list[Sockets], list[Sockets]]:
    first = await bind("127.0.0.1", 0, count=leaving, reuse_port=False)
    return first, await bind("127.0.0.1", first[0][0].getsockname()[1], count=staying, reuse_port=True)


@pytest.mark.parametrize(("leaving", "staying"), [(1, 1), (2, 2), (1, 3), (3, 1)])
async def test_new_connections_are_diverted_to_the_other_sockets(leaving, staying, monkeypatch):
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 0.0)
    with sharing(*await pair(leaving, staying)) as (port, old, new):
        with connections(port, 60):
            assert all(accept_all([*old, *new]))
        await divert_new_connections(old)
        with connections(port, 60):
            counts = accept_all(new)
            assert sum(counts) == 60
            assert all(counts)
        close_listeners(old)
        with connections(port, 90):
            counts = accept_all(new)
        assert sum(counts) == 90
        assert all(counts)


async def test_sockets_close_only_with_empty_accept_queues(monkeypatch):
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 0.0)
    with sharing(*await pair(1, 1)) as (port, old, _), connections(port, 60):
        assert accept_queue_length(old[0]) > 0
        leaving = asyncio.create_task(divert_new_connections(old))
        await asyncio.sleep(0)
        assert not leaving.done()
        accept_all(old)
        await ended(leaving)


async def test_a_port_in_use_is_shared_only_on_request():
    [[first]] = await bind("127.0.0.1", 0, count=1, reuse_port=False)
    first.listen(1)
    port = first.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        await bind("127.0.0.1", port, count=1, reuse_port=False)
    [[second]] = await bind("127.0.0.1", port, count=1, reuse_port=True)
    assert second.getsockname()[1] == port
    for listener in (first, second):
        listener.close()


async def test_every_address_of_a_name_has_its_sockets():
    slots = await bind("localhost", 0, count=2, reuse_port=False)
    assert len(slots) == 2
    assert len({listener.family for listener in slots[0]}) == len(slots[0])
    for listener in (*slots[0], *slots[1]):
        listener.close()


async def test_a_failed_bind_leaves_no_socket_open(monkeypatch):
    opened: Sockets = []
    really_open = sockets._bound

    def open_two(*address: object, **options: bool) -> socket.socket:
        if len(opened) == 2:
            raise OSError("too many open files")
        opened.append(really_open(*address, **options))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(sockets, "_bound", open_two)
    with pytest.raises(OSError, match="too many"):
        await bind("127.0.0.1", 0, count=3, reuse_port=True)
    assert [listener.fileno() for listener in opened] == [-1, -1]
