"""A process with few open files, and clients that make it hold many bytes."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from routing.process import create_regular_file, read_regular_file
from routing.schema import Limits
from tests.fakes.replica import Call, FakeReplica, answering, plain_answer
from tests.routing.proxy.harness import CHAT, RawClient, config, connect, get, post, routed
from tests.routing.proxy.own_process import started

MIB = 1 << 20
COMPLETIONS = b"/v1/completions"


async def test_with_few_open_files_replicas_and_the_admin_port_are_reached_and_the_rest_gets_503(
    replica: FakeReplica, tmp_path: Path
) -> None:
    """256 files and 1,000 clients: there were 502s, connections without a response, and no admin port."""
    replica.script = answering(b"{}")
    async with started(replica, tmp_path, Limits(), open_files=256) as router, AsyncExitStack() as stack:
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
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{router.admin_port}/readyz") as response,
        ):
            assert (response.status, "limited to 256" in (await response.json())["warning"]) == (200, True)
        errors = await asyncio.to_thread(router.errors.read_text)
        logged = [line for line in errors.splitlines() if "clients_refused" in line]
        assert (len(logged), "few_open_files" in errors) == (1, True)


async def status_of(client: RawClient) -> int | None:
    """None: the kernel had reset the connection before the response was read."""
    try:
        return (await client.read_response()).status
    except (ConnectionError, asyncio.IncompleteReadError):
        return None


async def test_the_limit_of_open_files_is_raised_at_the_start(replica: FakeReplica, tmp_path: Path) -> None:
    async with started(replica, tmp_path, Limits()) as router:
        limits = await asyncio.to_thread(Path(f"/proc/{router.pid}/limits").read_text)
        soft, hard = next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max open files"))
        assert soft == hard


async def test_large_bodies_are_bounded_together_and_leave_no_memory_behind(
    replica: FakeReplica, tmp_path: Path
) -> None:
    """40 bodies of 8 MB: 400 MiB were left."""
    released = asyncio.Event()

    async def script(call: Call) -> None:
        await released.wait()
        await call.send(plain_answer(b"{}"))

    replica.script = script
    limits = Limits(max_unfinished_body_bytes=64 * MIB)
    body = b'{"prompt":"%b"}' % (b"x" * 8_000_000)
    async with started(replica, tmp_path, limits) as router, AsyncExitStack() as stack:
        async with connect(router.port) as first:
            await first.send(get(b"/health"))
            await first.read_response()
        before = router.memory_bytes("VmRSS")
        clients = [await stack.enter_async_context(connect(router.port)) for _ in range(40)]
        statuses = [asyncio.create_task(large_status(client, body)) for client in clients]
        async with asyncio.timeout(60):
            while sum(task.done() for task in statuses) < 30:
                await asyncio.sleep(0.05)
        assert {task.result() for task in statuses if task.done()} <= {503, None}
        released.set()
        results = await asyncio.gather(*statuses)
        assert results.count(200) >= 5
        assert router.memory_bytes("VmRSS") - before <= 96 * MIB
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
async def test_a_pipe_in_the_state_folder_does_not_hang_the_start(
    name: str, replica: FakeReplica, tmp_path: Path
) -> None:
    replica.script = answering(b"{}")
    for suffix in ("", ".new"):
        os.mkfifo(tmp_path / f"{name}{suffix}")
    async with asyncio.timeout(20), routed(config([replica]), state_dir=tmp_path) as harness:
        assert (await harness.chat()).status == 200
        assert (await harness.push(config([replica], policy_revision=2), 2))[0] == 200


def test_only_regular_files_are_read_and_created(tmp_path: Path) -> None:
    path = tmp_path / "state"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular_file(path)
    os.close(create_regular_file(path))
    assert read_regular_file(path) == b""
