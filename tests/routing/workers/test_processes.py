"""Workers die, are replaced and drained without affecting requests of other workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from routing.schema import LowestCostSettings, ResponseCache, TaskGroupConfig
from tests.fakes.replica import Held, answering, sse
from tests.routing.proxy.harness import CHAT, chat_body, config, connect, post
from tests.routing.workers.harness import DEADLINE_S, Load, Process, loaded, serving, worker_of


async def total(router: Process, name: str) -> float:
    _, text = await router.admin("GET", "/metrics")
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def replaced(router: Process, before: list[int]) -> None:
    async def all_new() -> bool:
        return len(router.workers) == len(before) and not set(router.workers) & set(before)

    await router.until(all_new, "new workers in the place of all old ones")


async def test_restarted_workers_know_what_all_workers_have_sent(four, tmp_path):
    snapshot = config(four, settings=LowestCostSettings())
    prompts = [chat_body(text=f"Document {number}. " * 60) for number in range(30)]
    async with serving(tmp_path, snapshot, "--workers=2") as router:
        before = [await router.chat(prompt) for prompt in prompts]
        assert len({worker_of(response) for response in before}) == 2
        await router.end()
    async with serving(tmp_path, snapshot, "--workers=3") as router:
        after = [await router.chat(prompt) for prompt in prompts * 2]
    assert len({worker_of(response) for response in after}) > 1
    reasons = [response.headers["x-warmpath-reason"] for response in after]
    assert "cold" not in reasons
    assert reasons.count("hit") >= 0.9 * len(after)  # the load that another worker reported last moves some


def counted(text: str) -> dict[str, float]:
    """Counters and histograms of an exposition, sample by sample."""
    found: dict[str, float] = {}
    kind = ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            kind = line.rpartition(" ")[2]
        elif not line.startswith("#") and kind in {"counter", "histogram"}:
            sample, _, value = line.rpartition(" ")
            found[sample] = float(value)
    return found


async def kill_all(router: Process) -> None:
    """Kill the workers there are, and wait until they are gone."""
    killed = set(router.workers)
    for worker in killed:
        os.kill(worker, signal.SIGKILL)

    async def are_gone() -> bool:
        return not killed & set(router.workers)

    await router.until(are_gone, "the killed workers to be gone")


async def test_no_connection_is_refused_and_no_counter_decreases_when_all_workers_die_or_are_replaced(
    replica, tmp_path
):
    """The admin port answers all the while."""
    over = asyncio.Event()

    async def keep_reading(router: Process) -> int:
        before: dict[str, float] = {}
        reads = 0
        while not over.is_set():
            status, text = await router.admin("GET", "/metrics")
            now = counted(text)
            assert status == 200
            assert not {sample for sample in before if now.get(sample, 0.0) < before[sample]}
            for path in ("/healthz", "/admin/config", "/admin/replicas", "/admin/decisions?limit=1"):
                assert (await router.admin("GET", path))[0] == 200, path
            before, reads = now, reads + 1
        return reads

    async with serving(tmp_path, config([replica]), "--workers=2") as router:
        reading = asyncio.create_task(keep_reading(router))
        async with loaded(router) as load:
            for started in (2, 4):
                await router.line("worker_started", started)
                await kill_all(router)
                await load.more(50)
            before = load.outcomes.total() - load.outcomes["200"]
            router.process.send_signal(signal.SIGHUP)
            await router.line("workers_replaced")
            await load.more(50)
        over.set()
        assert await reading > 5
        assert await total(router, "warmpath_router_worker_restarts_total") == 4
        assert await router.admin("GET", "/readyz") == (200, {"status": "ready", "revision": 1})
    lost = load.outcomes.total() - load.outcomes["200"]
    assert load.outcomes["ConnectionRefusedError"] == 0
    assert lost == before <= 2 * load.clients, load.outcomes  # at most what they had under way at each death


async def test_workers_are_replaced_one_by_one_without_losing_a_request(replica, tmp_path):
    async with serving(tmp_path, config([replica]), "--workers=2") as router:
        before = router.workers
        async with loaded(router, 20, keep=True) as load:
            router.process.send_signal(signal.SIGHUP)
            await router.line("workers_replaced")
            await replaced(router, before)
            await load.more()
        assert set(load.outcomes) == {"200"}
        assert len(load.seen_workers) == 4
        assert await total(router, "warmpath_router_requests_total") == load.outcomes["200"]
        _, shown = await router.admin("GET", "/admin/decisions", params={"limit": "1000"})
        assert shown["dropped"] == 0
        numbers = [one["seq"] for one in shown["decisions"]]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) == min(1000, load.outcomes["200"])
        assert not [line for line in router.lines if "worker_died" in line]


async def test_all_workers_drain_at_the_first_signal(replica, tmp_path):
    replica.script = held = Held()
    async with serving(tmp_path, config([replica]), "--workers=2") as router, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connect(router.port)) for _ in range(8)]
        for client in clients:
            await client.send(post(CHAT))
        await replica.wait_calls(8)
        ending = asyncio.create_task(router.end())
        await router.line("draining")

        async def refuses() -> bool:
            try:
                async with connect(router.port):
                    return False
            except ConnectionError as error:  # a reset is of one that came while the port closed
                return isinstance(error, ConnectionRefusedError)

        await router.until(refuses, "the port to close")
        assert (await router.admin("GET", "/readyz"))[0] == 503
        held.go.set()
        for client in clients:
            assert (await client.read_response()).body == sse({"n": 1}) + sse({"n": 2})
        assert await ending == 0
        assert not [line for line in router.lines if "worker_died" in line or "defect" in line]


async def test_no_worker_outlives_its_parent(replica, tmp_path):
    async with serving(tmp_path, config([replica]), "--workers=2") as router:
        workers = router.workers
        assert len(workers) == 2
        await router.end(signal.SIGKILL)

        async def all_gone() -> bool:
            return not any(is_running(worker) for worker in workers)

        await router.until(all_gone, "the workers to end")


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended while its status was read
        return False


async def test_a_second_router_cannot_bind_the_same_port_without_reuse_port(replica, tmp_path):
    async with serving(tmp_path, config([replica]), "--workers=2") as router:
        with pytest.raises(AssertionError, match="Address already in use"):
            async with serving(tmp_path, config([replica]), "--workers=2", port=router.port, name="other"):
                pass


@pytest.mark.parametrize(("workers", "successors", "keep"), [(1, 1, False), (1, 2, True)])
async def test_a_router_takes_over_from_another_without_a_refused_connection(
    workers, successors, keep, replica, tmp_path
):
    same = (tmp_path, config([replica]), "--reuse-port")
    async with serving(*same, f"--workers={workers}", name="old") as old:
        load = Load(old, 20, keep=keep)
        await load.more()
        async with serving(*same, f"--workers={successors}", port=old.port, name="new") as new:
            await load.more()
            assert await old.end() == 0
            await load.more()
            first = {worker_of(await new.chat()) for _ in range(24)}
            await load.stop()
    assert load.outcomes.keys() <= {"200", "ConnectionResetError"}, load.outcomes
    assert load.outcomes["ConnectionResetError"] <= 1, "what arrives in the microseconds of closing: see listening.py"
    assert len(load.seen_workers) == workers + successors
    assert len(first) == successors


async def test_a_purge_of_response_caches_reaches_the_memory_of_every_worker(replica, tmp_path):
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    completion = {"id": "1", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
    replica.script = answering(body=json.dumps(completion).encode())
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 0}).encode()
    snapshot = config([replica], groups=(TaskGroupConfig(name="faq", response_cache=ResponseCache()),))
    async with serving(tmp_path, snapshot, "--workers=2") as router:

        async def caches_seen_in_all_workers() -> list[str]:
            """What the first request to each worker got."""
            first_by_worker: dict[str, str] = {}
            async with asyncio.timeout(DEADLINE_S):
                while len(first_by_worker) < 2:
                    response = await router.chat(body, [b"X-Task-Group: faq"])
                    first_by_worker.setdefault(worker_of(response), response.headers["x-warmpath-cache"])
            return list(first_by_worker.values())

        before = [await caches_seen_in_all_workers() for _ in range(2)]
        purge = {"pool": "chat", "group": "faq"}
        status, purged = await router.admin("POST", "/admin/response-cache/purge", json=purge)
        after = await caches_seen_in_all_workers()

    assert before == [["miss", "miss"], ["hit", "hit"]]
    assert (status, purged["memory_entries"], purged["store_entries"], purged["problem"]) == (200, 2, None, None)
    assert after == ["miss", "miss"]
