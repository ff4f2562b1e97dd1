"""Clients that send too much or too slowly, and a router process that has few files or cannot run for a while."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from routing.process import create_regular_file, read_regular_file
from routing.schema import HealthCheck, Limits
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, answering, chunk, plain_answer
from tests.routing.proxy.harness import CHAT, RawClient, config, connect, get, post, routed
from tests.routing.workers.harness import Process, serving


def memory_bytes(router: Process, field: str) -> int:
    """Memory of its process: ``VmRSS``: current, or ``VmHWM``: the peak since ``forget_peak``."""
    parsed = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{router.process.pid}/status").read_text())
    assert parsed
    return int(parsed[1]) * 1024


def forget_peak(router: Process) -> None:
    Path(f"/proc/{router.process.pid}/clear_refs").write_text("5")


# --- Clients that send too much or too slowly: their cost to the router and to other clients ---


MIB = 1 << 20
START = b"POST /v1/completions HTTP/1.1\r\nHost: router\r\n"
CHUNK = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
SLOW_CLIENTS = 2000
OFFERS = 3500  # pipelined upgrade offers


async def pour(client: RawClient, head: bytes, piece: bytes, size: int) -> bytes:
    """Send ``size`` bytes of body, or as many as possible; returns the response."""
    response = asyncio.create_task(client.read_all())
    client.writer.write(head)
    for _ in range(size // len(piece)):
        if response.done() or client.writer.transport.is_closing():
            break
        client.writer.write(piece)
        try:
            await asyncio.wait_for(client.writer.drain(), timeout=10)
        except ConnectionError:
            break
    return await response


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (START + b"Content-Length: 104857600\r\n\r\n", b"x" * 65_536),
        (START + b"Transfer-Encoding: chunked\r\n\r\n", CHUNK),
        (START + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nxxxxx\r\n" * 6000),
        (START + b"Transfer-Encoding: chunked\r\n\r\n1;", b"e" * 65_536),
        (START + b"X: ", b"y" * 65_536),
        (START, b"X: y\r\n" * 10_000),
        (b"GET /", b"y" * 65_536),
        (b"", b"\r\n" * 32_768),
    ],
    ids=["length", "chunks", "tiny chunks", "chunk extension", "header", "headers", "target", "empty lines"],
)
async def test_a_hundred_mebibytes_cost_at_most_sixteen(head, piece, replica, tmp_path):
    limits = Limits(max_body_bytes=8 * MIB)
    async with serving(tmp_path, config([replica], limits=limits)) as router, connect(router.port) as client:
        async with connect(router.port) as other_client:
            assert (await other_client.ask(post(CHAT))).status == 200
        forget_peak(router)
        before = memory_bytes(router, "VmRSS")
        response = await pour(client, head, piece, 100 * MIB)
        assert response == b"" or re.match(rb"HTTP/1.1 (400|413|431) ", response)
        assert memory_bytes(router, "VmHWM") - before <= 16 * MIB
        async with connect(router.port) as other_client:
            assert (await other_client.ask(post(CHAT))).status == 200


async def test_many_upgrade_offers_in_one_read_are_declined(replica, tmp_path):
    """The parser stops at each offer, with all others still unread."""
    offer = get(b"/nowhere", [b"Connection: upgrade", b"Upgrade: x"])
    async with serving(tmp_path, config([replica])) as router, connect(router.port) as client:
        assert (await client.ask(offer)).status == 404
        forget_peak(router)
        before = memory_bytes(router, "VmRSS")
        await client.send(offer * OFFERS)
        for _ in range(OFFERS):
            assert (await client.read_response()).status == 404
        assert memory_bytes(router, "VmHWM") - before <= 16 * MIB


async def test_slow_clients_take_little_memory_and_are_disconnected(replica, tmp_path):
    """A third sends incomplete heads, the others bodies that never end."""
    limits = Limits(header_timeout_s=2.0, body_grace_s=2.0)
    halves = (START, START + b"Content-Length: 1000\r\n\r\n{", START + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{")
    async with serving(tmp_path, config([replica], limits=limits)) as router, asyncio.TaskGroup() as group:
        before = memory_bytes(router, "VmRSS")
        slow = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(SLOW_CLIENTS)]
        for number, (_, writer) in enumerate(slow):
            writer.write(halves[number % len(halves)])
        group.create_task(_drip([writer for number, (_, writer) in enumerate(slow) if number % len(halves) == 1]))
        async with connect(router.port) as other_client:
            assert (await other_client.ask(post(CHAT))).status == 200
        assert memory_bytes(router, "VmRSS") - before <= SLOW_CLIENTS * 16 * 1024
        async with asyncio.timeout(60):
            responses = await asyncio.gather(*(reader.read() for reader, _ in slow))
        assert all(response.startswith(b"HTTP/1.1 408 ") for response in responses)
        for _, writer in slow:
            writer.transport.abort()


async def _drip(writers: list[asyncio.StreamWriter]) -> None:
    """Send a byte from each, again and again, until they are closed."""
    while writers := [writer for writer in writers if not writer.transport.is_closing()]:
        for writer in writers:
            writer.write(b" ")
        await asyncio.sleep(0.5)


async def test_bodies_that_never_end_are_bounded_together(replica, tmp_path):
    limits = Limits(max_unfinished_body_bytes=64 * MIB)
    async with serving(tmp_path, config([replica], limits=limits)) as router:
        before = memory_bytes(router, "VmRSS")
        connections = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(20)]
        for _, writer in connections:
            writer.write(START + b"Content-Length: 8388608\r\n\r\n")
            writer.write(b"x" * (8_388_608 - 1))
        waiting = {asyncio.create_task(reader.readline()) for reader, _ in connections}
        rejected: set[asyncio.Task[bytes]] = set()
        async with asyncio.timeout(60):
            while len(rejected) < 20 - limits.max_unfinished_body_bytes // 8_388_608:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                rejected |= done
        assert {task.result() for task in rejected} == {b"HTTP/1.1 503 Service Unavailable\r\n"}
        assert memory_bytes(router, "VmHWM") - before <= limits.max_unfinished_body_bytes + 64 * MIB
        async with connect(router.port) as other_client:  # a body in one read does not count
            assert (await other_client.ask(post(CHAT))).status == 200
        for _, writer in connections:
            writer.transport.abort()
        await asyncio.gather(*waiting, return_exceptions=True)
        async with connect(router.port) as other_client:
            big = b'{"prompt":"%b"}' % (b"x" * 8_000_000)
            assert (await other_client.ask(post(b"/v1/completions", big))).status == 200


# --- A process with few open files, and clients that make it hold many bytes ---


COMPLETIONS = b"/v1/completions"


async def test_with_few_open_files_replicas_and_the_admin_port_are_reached_and_the_rest_gets_503(replica, tmp_path):
    """256 files and 1,000 clients: there were 502s, connections without a response, and no admin port."""
    replica.script = answering(b"{}")
    async with serving(tmp_path, config([replica]), open_files=256) as router, AsyncExitStack() as stack:
        refused = 0
        admitted: list[RawClient] = []
        for _ in range(25):  # the kernel's queue is short
            clients = await asyncio.gather(*(stack.enter_async_context(connect(router.port)) for _ in range(40)))
            for client in clients:
                await client.send(post(CHAT))
            statuses = await asyncio.gather(*(status_of(client) for client in clients))
            assert set(statuses) <= {200, 503, None}
            admitted += [client for client, status in zip(clients, statuses, strict=True) if status == 200]
            refused += statuses.count(503)
        assert len(admitted) >= 32
        assert refused >= 200
        for client in admitted:
            await client.send(post(CHAT))
        assert {await status_of(client) for client in admitted} == {200}
        status, shown = await router.admin("GET", "/readyz")
        assert (status, "limited to 256" in shown["warning"]) == (200, True)
        await router.line("few_open_files")
        assert len([line for line in router.lines if "clients_refused" in line]) == 1


async def status_of(client: RawClient) -> int | None:
    """None: the kernel had reset the connection before the response was read."""
    try:
        return (await client.read_response()).status
    except (ConnectionError, asyncio.IncompleteReadError):
        return None


async def test_the_limit_of_open_files_is_raised_at_the_start(replica, tmp_path):
    async with serving(tmp_path, config([replica])) as router:
        limits = await asyncio.to_thread(Path(f"/proc/{router.process.pid}/limits").read_text)
        soft, hard = next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files"))
        assert soft == hard


async def test_large_bodies_are_bounded_together_and_leave_no_memory_behind(replica, tmp_path):
    """40 bodies of 8 MB: 400 MiB were left."""
    released = asyncio.Event()

    async def script(call: Call) -> None:
        await released.wait()
        await call.send(plain_answer(b"{}"))

    replica.script = script
    limits = Limits(max_unfinished_body_bytes=64 * MIB)
    body = b'{"prompt":"%b"}' % (b"x" * 8_000_000)
    async with serving(tmp_path, config([replica], limits=limits)) as router, AsyncExitStack() as stack:
        async with connect(router.port) as first:
            await first.ask(get(b"/health"))
        before = memory_bytes(router, "VmRSS")
        clients = [await stack.enter_async_context(connect(router.port)) for _ in range(40)]
        statuses = [asyncio.create_task(large_status(client, body)) for client in clients]
        async with asyncio.timeout(60):
            while sum(task.done() for task in statuses) < 30:
                await asyncio.sleep(0.05)
        assert {task.result() for task in statuses if task.done()} <= {503, None}
        released.set()
        results = await asyncio.gather(*statuses)
        assert results.count(200) >= 5
        assert memory_bytes(router, "VmRSS") - before <= 96 * MIB
        async with connect(router.port) as last:
            assert await large_status(last, body) == 200


async def large_status(client: RawClient, body: bytes) -> int | None:
    sending = asyncio.create_task(client.send(post(COMPLETIONS, body)))
    try:
        return await status_of(client)
    finally:
        sending.cancel()
        await asyncio.wait([sending])


@pytest.mark.parametrize("name", ["residency-0", "config", "config.previous", "events"])
async def test_a_pipe_in_the_state_folder_does_not_hang_the_start(name, replica, tmp_path):
    replica.script = answering(b"{}")
    for suffix in ("", ".new"):
        os.mkfifo(tmp_path / f"{name}{suffix}")
    async with asyncio.timeout(20), routed(config([replica]), state_dir=tmp_path) as harness:
        assert (await harness.chat()).status == 200
        assert (await harness.push(config([replica], policy_revision=2), 2))[0] == 200


def test_only_regular_files_are_read_and_created(tmp_path):
    path = tmp_path / "state"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular_file(path)
    os.close(create_regular_file(path))
    assert read_regular_file(path) == b""


# --- A router that could not run for a while: a stopped process, or one that gets little of the machine ---


# Deadlines that are over long before the process continues.
LIMITS = Limits(
    header_timeout_s=3.0,
    body_idle_timeout_s=3.0,
    body_grace_s=3.0,
    keep_alive_timeout_s=3.0,
    first_byte_timeout_s=3.0,
    response_timeout_s=3.0,
    idle_timeout_s=3.0,
    connect_timeout_s=3.0,
    write_stall_timeout_s=3.0,
    retries=0,
)
STOPPED_S = 6.0
REQUEST = post(CHAT)
CUTS = (0, 30, REQUEST.index(b"\r\n\r\n") + 8, len(REQUEST) - 1)  # nothing, in the head, in the body, before its end


async def streamed(call: Call) -> None:
    await call.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
    await asyncio.sleep(0.2)
    await call.send(chunk(b"data: 2\n\n") + LAST_CHUNK)


async def open_at(port: int, stack: AsyncExitStack, cut: int) -> RawClient:
    client: RawClient = await stack.enter_async_context(connect(port))
    await client.send(REQUEST[:cut])
    return client


async def test_every_request_is_answered_after_the_process_was_stopped(replica, tmp_path):
    """Requests begun before the stop, in its middle, and streams that run through it."""
    snapshot = config([replica], limits=LIMITS, health=HealthCheck(failures=100))
    async with serving(tmp_path, snapshot) as router, AsyncExitStack() as stack:
        kept_alive = await open_at(router.port, stack, len(REQUEST))
        assert (await kept_alive.read_response()).status == 200
        replica.script = streamed
        begun = [(cut, await open_at(router.port, stack, cut)) for cut in CUTS for _ in range(20)]
        running = [await open_at(router.port, stack, len(REQUEST)) for _ in range(20)]
        await replica.wait_calls(21)
        router.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(0.2)
            for cut, client in begun:
                await client.send(REQUEST[cut:])
            await kept_alive.send(REQUEST)
            late = [await open_at(router.port, stack, len(REQUEST)) for _ in range(20)]
            await asyncio.sleep(STOPPED_S)
        finally:
            router.process.send_signal(signal.SIGCONT)
        for client in [kept_alive, *(client for _, client in begun), *running, *late]:
            response = await client.read_response()
            assert (response.status, response.body[:9]) == (200, b"data: 1\n\n")


async def test_a_starved_process_refuses_no_request_that_moves(replica, tmp_path):
    """The process runs for 20 ms in each half second, and each body moves after each of these."""
    limits = Limits(header_timeout_s=0.6, body_idle_timeout_s=0.6, body_grace_s=60, keep_alive_timeout_s=60)
    snapshot = config([replica], limits=limits, health=HealthCheck(failures=100))
    async with serving(tmp_path, snapshot) as router, AsyncExitStack() as stack:
        clients = [await open_at(router.port, stack, len(REQUEST) - 8) for _ in range(20)]
        for at in range(len(REQUEST) - 8, len(REQUEST)):
            router.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.5)
            for client in clients:
                await client.send(REQUEST[at : at + 1])
            router.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.02)
        for client in clients:
            assert (await client.read_response()).status == 200


async def test_connections_that_end_are_counted_by_reason(replica):
    limits = Limits(header_timeout_s=0.1, body_idle_timeout_s=0.1, keep_alive_timeout_s=0.3)

    async def answered(call: Call) -> None:
        await call.send(plain_answer(b"{}"))

    replica.script = answered
    sent = [
        ("idle", b"", b""),
        ("idle", get(b"/health"), b"200"),
        ("timeout", REQUEST[:30], b"408"),
        ("timeout", REQUEST[:-1], b"408"),
        ("rejected", b"GET / HTTP/9.9\r\n\r\n", b"400"),
        ("complete", get(b"/health", [b"Connection: close"]), b"200"),
    ]
    async with routed(config([replica], limits=limits)) as harness:
        for _, data, status in sent:
            async with harness.connect() as client:
                await client.send(data)
                assert (await client.read_all())[9:12] == status
        await harness.send(REQUEST)
        await harness.until(lambda: not harness.router.clients, "the connections to end")
        _, text = await harness.admin("GET", "/metrics")
        for reason, count in (Counter(reason for reason, _, _ in sent) | {"client": 1}).items():
            assert f'connections_closed_total{{reason="{reason}"}} {count}\n' in text, reason
        assert 'connections_closed_total{reason="unread"} 0\n' in text
