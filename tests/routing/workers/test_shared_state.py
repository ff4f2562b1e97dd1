"""Workers are routers that share their state: by datagrams, or through the server that all routers of a fleet share."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from routing.schema import Limits, LowestCostSettings
from routing.settings import STATE_URL
from tests.fakes.replica import Call, FakeReplica, Held, plain_answer
from tests.routing.proxy.harness import CHAT, RawClient, chat_body, config, connect, post
from tests.routing.workers.harness import EXPLAIN, Load, Process, serving

PEERS, RECEIVED = (
    "warmpath_router_shared_state_peers",
    'warmpath_router_shared_state_messages_total{direction="received"}',
)


async def explanations(router: Process, workers: int) -> list[dict[str, Any]]:
    """What each worker would decide: they are asked in turn."""
    return [(await router.admin("POST", "/admin/explain", json=EXPLAIN))[1] for _ in range(workers)]


async def all_know(router: Process, running: int, workers: int = 2) -> None:
    """Wait until each worker knows how many requests run."""

    async def know() -> bool:
        explained = await explanations(router, workers)
        return all(sum(one["running"] for one in it.get("candidates", [])) == running for it in explained)

    await router.until(know, f"{workers} workers to know of {running} requests")


async def figures(router: Process, *names: str) -> list[float | None]:
    """Samples of a router's metrics; None if it does not expose one."""
    _, text = await router.admin("GET", "/metrics")
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return [float(found[name]) if name in found else None for name in names]


async def has_received(router: Process) -> bool:
    """Whether workers have heard of each other."""
    return bool((await figures(router, RECEIVED))[0])


class HeldIfAsked(Held):
    """Holds the requests whose prompt says so, and answers others."""

    async def __call__(self, call: Call) -> None:
        if b"hold" in call.body:
            await super().__call__(call)
        else:
            await call.send(plain_answer(b"{}"))


@asynccontextmanager
async def held_requests(
    router: Process, replicas: Sequence[FakeReplica], count: int
) -> AsyncIterator[tuple[list[tuple[str, RawClient]], HeldIfAsked]]:
    """Requests that run in all workers of a router until they are let go; each with its worker."""
    script = HeldIfAsked()
    for replica in replicas:
        replica.script = script
    async with AsyncExitStack() as stack:
        clients = []
        for number in range(count):
            client = await stack.enter_async_context(connect(router.port))
            await client.send(post(CHAT, chat_body(text=f"hold {number}")))
            head = await client.read_until(b"\n\n")
            clients.append((head.lower().partition(b"x-request-id: ")[2][:16].decode(), client))
        assert len({worker for worker, _ in clients}) == 2
        yield clients, script


def of_process(clients: Sequence[tuple[str, RawClient]], pid: int) -> list[tuple[str, RawClient]]:
    """The clients whose connections a process has."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(path.readlink().name)
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {int(line[2].split(":")[1], 16) for line in lines if f"socket:[{line[9]}]" in inodes}
    return [it for it in clients if it[1].writer.get_extra_info("sockname")[1] in ports]


async def test_a_prompt_that_one_worker_has_sent_is_found_cached_by_all(four, tmp_path):
    for replica in four:
        replica.script = HeldIfAsked()
    prompt = "A document that is long enough to be cached. " * 60
    asked = {"path": "/v1/chat/completions", "body": msgspec.json.decode(chat_body(text=prompt))}
    async with serving(tmp_path, config(four, settings=LowestCostSettings()), "--workers=2") as router:
        sent = await router.chat(chat_body(text=prompt))

        async def all_find_it() -> bool:
            found = [(await router.admin("POST", "/admin/explain", json=asked))[1] for _ in range(2)]
            return all((it["replica"], it["reason"]) == (sent.replica, "hit") for it in found)

        await router.until(all_find_it, "all workers to find the prompt")
        await router.until(partial(has_received, router), "messages of workers")
        [peers] = await figures(router, PEERS)

    assert sent.status == 200
    assert peers is None  # other routers, of which these know nothing


async def test_max_in_flight_holds_for_all_workers_together(four, tmp_path):
    held = Held()
    four[0].script = held
    few = config(four[:1], limits=Limits(max_in_flight=6))
    async with serving(tmp_path, few, "--workers=2") as router, AsyncExitStack() as stack:
        for count in range(1, 7):
            client = await stack.enter_async_context(connect(router.port))
            await client.send(post(CHAT))
            await four[0].wait_calls(count)

        assert {(await router.chat()).status for _ in range(16)} == {503}
        assert len(four[0].calls) == 6
        held.go.set()


async def test_a_killed_worker_loses_its_own_requests_and_its_load_is_forgotten(four, tmp_path):
    async with (
        serving(tmp_path, config(four), "--workers=2") as router,
        held_requests(router, four, 24) as (clients, script),
    ):
        await all_know(router, 24)
        load = Load(router)
        await load.more(50)
        killed = router.workers[0]
        lost = of_process(clients, killed)
        os.kill(killed, signal.SIGKILL)
        await router.line("worker_started", 3)
        await load.more(50)
        await load.stop()
        await all_know(router, 24 - len(lost))
        script.go.set()
        kept = [it for it in clients if it not in lost]
        bodies = [(await client.reader.readuntil(b"0\r\n\r\n")) for _, client in kept]
        await all_know(router, 0)

    assert 0 < len(lost) < 24
    assert len(bodies) == 24 - len(lost)
    failed = load.outcomes.total() - load.outcomes["200"]
    assert failed <= load.clients, load.outcomes  # what the killed worker had under way
    assert load.outcomes["ConnectionRefusedError"] == 0


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_stopped_worker_is_forgotten_until_it_continues_and_loses_nothing(four, tmp_path):
    async with (
        serving(tmp_path, config(four), "--workers=2") as router,
        held_requests(router, four, 24) as (clients, script),
    ):
        await all_know(router, 24)
        pid = router.workers[0]
        count = len(of_process(clients, pid))
        with stopped(pid):
            await router.line("worker_silent")  # explanations are the other worker's from now on
            await all_know(router, 24 - count)
        await router.line("worker_responds")
        await all_know(router, 24)
        script.go.set()
        bodies = [await client.reader.readuntil(b"0\r\n\r\n") for _, client in clients]
        await all_know(router, 0)

    assert 0 < count < 24
    assert len(bodies) == 24
    assert not [line for line in router.lines if "worker_died" in line or "defect" in line]


async def test_new_workers_know_the_load_of_those_that_they_replace(four, tmp_path):
    async with (
        serving(tmp_path, config(four), "--workers=2") as router,
        held_requests(router, four, 24) as (clients, script),
    ):
        router.process.send_signal(signal.SIGHUP)
        await router.line("workers_replaced")
        await all_know(router, 24)
        script.go.set()
        bodies = [await client.reader.readuntil(b"0\r\n\r\n") for _, client in clients]
        await all_know(router, 0)

    assert len(bodies) == 24


async def test_workers_and_other_routers_are_one_fleet_through_the_server_and_peers_are_routers(four, tmp_path, valkey):
    environment = os.environ | {STATE_URL: f"unix://{urlsplit(valkey).path}"}
    fleet = config(four)
    other_fleet = msgspec.structs.replace(fleet, hash_secret="00" * 16)
    async with AsyncExitStack() as stack:
        one, other, apart = [
            await stack.enter_async_context(
                serving(tmp_path, snapshot, f"--workers={workers}", name=name, environment=environment)
            )
            for name, snapshot, workers in (("one", fleet, 2), ("other", fleet, 1), ("apart", other_fleet, 2))
        ]

        async def hear_each_other() -> bool:
            return await figures(one, PEERS) == await figures(other, PEERS) == [1]

        await one.until(hear_each_other, "two routers to hear each other")
        clients, script = await stack.enter_async_context(held_requests(one, four, 24))
        await all_know(one, 24)
        await all_know(other, 24, workers=1)
        await apart.until(partial(has_received, apart), "messages of workers")
        [alone] = await figures(apart, PEERS)
        script.go.set()
        for _, client in clients:
            await client.reader.readuntil(b"0\r\n\r\n")
        await other.end()

        async def is_alone() -> bool:
            return await figures(one, PEERS) == [0]

        await one.until(is_alone, "the router to notice that it is alone")

    assert alone == 0  # its workers hear each other, and are not other routers
