"""Signals at any time are handled, and none makes a router exit uncleanly."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from routing.schema import Limits
from tests.fakes.certificates import Authority
from tests.fakes.replica import FakeReplica, halting
from tests.routing.proxy.harness import CHAT, config, connect, post
from tests.routing.workers.harness import DEADLINE_S, Process, begun, serving

WORKERS = pytest.mark.parametrize("workers", [1, 2])


async def first_moment(router: Process) -> None:
    """Wait until its first lines have run; before them it is Python's."""

    async def holds_signals() -> bool:
        return is_held(router.process.pid, signal.SIGHUP)

    await router.until(holds_signals, "the first moment")


def is_held(pid: int, number: signal.Signals) -> bool:
    """Whether a process lets a signal wait."""
    masks = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(masks["SigBlk"], 16) >> (number - 1) & 1)


def hang_up(router: Process) -> None:
    """Whether or not it is there still; ``send_signal`` would look, and take its status from who waits for it."""
    with suppress(ProcessLookupError):
        os.kill(router.process.pid, signal.SIGHUP)


@WORKERS
async def test_a_router_starts_although_it_gets_sighups_from_the_beginning(workers, replica, tmp_path):
    async with begun(tmp_path, config([replica]), f"--workers={workers}") as router:
        await first_moment(router)
        ready = asyncio.create_task(router.ready())
        while not ready.done():
            hang_up(router)
            await asyncio.wait([ready], timeout=0.005)
        await ready
        await router.line("nothing_to_reload" if workers == 1 else "workers_replaced")
        assert (await router.chat()).status == 200
        assert await router.end() == 0


@pytest.mark.parametrize(("workers", "stop"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
async def test_a_router_that_is_stopped_before_it_serves_exits_cleanly(workers, stop, replica, tmp_path):
    async with begun(tmp_path, config([replica]), f"--workers={workers}") as router:
        await first_moment(router)
        assert await router.end(stop) == 0
        await router.line(" stopped")
    assert not [line for line in router.lines if " is ready: " in line or "Traceback" in line or "Error" in line]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_router_that_is_stopped_while_its_workers_start_leaves_none_behind(replica, tmp_path):
    async with begun(tmp_path, config([replica]), "--workers=2") as router:

        async def has_workers() -> bool:
            return len(router.workers) == 2

        await router.until(has_workers, "the workers' processes")
        workers = router.workers
        assert await router.end(signal.SIGINT) == 0

        async def are_gone() -> bool:
            return not any(map(is_there, workers))

        await router.until(are_gone, "the workers' end")
    assert not [line for line in router.lines if "Traceback" in line or "defect" in line]


@WORKERS
async def test_sighups_do_not_disturb_the_shutdown(workers, replica, tmp_path):
    replica.script = halting
    limits = Limits(drain_timeout_s=60)
    async with (
        serving(tmp_path, config([replica], limits=limits), f"--workers={workers}") as router,
        connect(router.port) as client,
    ):
        await client.send(post(CHAT))
        await client.read_until(b"\n\n")
        router.process.send_signal(signal.SIGTERM)
        await router.line(" draining ")
        router.process.send_signal(signal.SIGHUP)
        await router.line("nothing_to_reload" if workers == 1 else "reload_ignored")
        ended = asyncio.create_task(router.end())  # the second signal
        async with asyncio.timeout(DEADLINE_S):
            while not ended.done():
                hang_up(router)
                await asyncio.wait([ended], timeout=0.001)
        assert await ended == 0


async def test_a_sighup_while_workers_are_replaced_replaces_them_again(replica, tmp_path):
    """Those that were replaced already have read the files of before it."""
    async with serving(tmp_path, config([replica]), "--workers=2") as router:
        router.process.send_signal(signal.SIGHUP)
        await router.line("worker_started", 3)
        for _ in range(3):
            router.process.send_signal(signal.SIGHUP)
        await router.line("workers_replaced", 2)
        await router.line("worker_started", 6)
        assert (await router.chat()).status == 200
        assert await router.end() == 0
    assert sum("worker_started" in line for line in router.lines) <= 8


# --- A renewed certificate ---


async def serials(router: Process, authority: Authority) -> set[int]:
    """What several clients see, all of them answered."""
    found = set()
    for _ in range(8):
        async with connect(router.port, authority.client()) as client:
            assert (await client.ask(post(CHAT))).status == 200
            found.add(client.seen_serial)
    return found


@pytest.mark.parametrize(("workers", "line"), [(1, "certificate_loaded"), (2, "workers_replaced")])
async def test_every_process_uses_a_renewed_certificate_after_sighup_and_verifies_those_of_replicas(
    workers, line, tmp_path
):
    authority = Authority(tmp_path)
    replica = FakeReplica("secure")
    replica.tls = authority.issue("replica").server()
    await replica.start()
    first = authority.issue("router")
    certificates = (f"--tls-cert={first.path}", f"--tls-key={first.key}", f"--upstream-ca={authority.path}")
    async with serving(tmp_path, config([replica]), f"--workers={workers}", *certificates) as router:
        before = await serials(router, authority)
        second = authority.issue("router")
        router.process.send_signal(signal.SIGHUP)
        await router.line(line)
        after = await serials(router, authority)
        assert await router.end() == 0
    replica.kill()
    assert (before, after) == ({first.serial}, {second.serial})
