"""Limits hold for all workers of a router together."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path
from time import monotonic

import pytest

from routing.http.auth import AccessControl, Grant
from routing.limits.budgets import Budget
from routing.limits.concurrency import HIGHEST, ConcurrencyLimiter
from routing.proxy.admission_queues import AdmissionQueues, QueuePermit
from routing.schema import ConcurrencyConfig
from routing.workers.shared_limits import QUEUES, LimitsMemory, WorkerLimits, WorkerPermits, assign_queues, assign_rates
from tests.fakes.replica import Call, FakeReplica, plain_answer
from tests.pace import slowdown
from tests.routing.limits.test_limits import QueuedRequest, end_oldest
from tests.routing.proxy.harness import CHAT, api_key, bearer, config, connect, post, with_keys
from tests.routing.workers.harness import DEADLINE_S, Process, serving, worker_of

WORKERS = 4


class Counting:
    """A replica's script that sees how many requests are with it at once."""

    def __init__(self, lasts_s: float) -> None:
        self.most = self.running = 0
        self._lasts_s = lasts_s

    async def __call__(self, call: Call) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self._lasts_s)
        self.running -= 1
        await call.send(plain_answer(b"{}"))


async def ask(router: Process, headers: list[bytes] | None = None) -> tuple[int, str]:
    answer = await router.chat(headers=headers or [])
    return answer.status, worker_of(answer)


async def test_max_running_one_lets_one_request_run_in_all_workers_and_each_worker_gets_its_turn(replica, tmp_path):
    script = replica.script = Counting(0.01)
    limit = ConcurrencyConfig(max_running=1, max_waiting=1000, max_wait_s=30)
    async with serving(tmp_path, config([replica], concurrency=limit), f"--workers={WORKERS}") as router:
        async with asyncio.timeout(DEADLINE_S):
            seen = await asyncio.gather(*(ask(router) for _ in range(120)))

    assert script.most == 1
    assert {status for status, _ in seen} == {200}
    assert len({worker for _, worker in seen}) == WORKERS


async def test_a_killed_workers_permit_is_released(replica, tmp_path):
    script = replica.script = Counting(3600.0)
    limit = ConcurrencyConfig(max_running=1, max_waiting=1000, max_wait_s=30)
    async with serving(tmp_path, config([replica], concurrency=limit), "--workers=3") as router:
        first = asyncio.ensure_future(router.chat())
        await replica.wait_calls(1)
        others = [asyncio.ensure_future(ask(router)) for _ in range(12)]
        replica.script = Counting(0.0)
        busy = holder(router, replica)
        os.kill(busy, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            done = await asyncio.gather(first, *others, return_exceptions=True)

    assert script.most == 1
    assert isinstance(done[0], BaseException)
    answered = [one[0] for one in done[1:] if isinstance(one, tuple)]
    assert set(answered) == {200}
    assert len(answered) >= 2  # of those that were not in the killed worker


def holder(router: Process, replica: FakeReplica) -> int:
    """The process id of the worker whose connection to the replica is in use."""
    ends = [replica.calls[0].writer.get_extra_info(end)[1] for end in ("peername", "sockname")]
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # Both ports: connections to other servers may use the same local port.
    inode = next(line[9] for line in lines if [int(end.split(":")[1], 16) for end in line[1:3]] == ends)
    for pid in router.workers:
        connection_pools = (str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink())
        if f"socket:[{inode}]" in connection_pools:
            return pid
    raise AssertionError("no worker has it")


async def test_the_rate_of_an_api_key_holds_for_all_workers_together(replica, tmp_path):
    replica.script = Counting(0.0)
    rate, burst, seconds = 40.0, 10, 3.0
    key = api_key(requests_per_s=rate, burst=burst)
    seen: Counter[int] = Counter()
    workers: set[str] = set()
    async with serving(tmp_path, with_keys([replica], key), "--workers=2") as router:
        begun = monotonic()

        async def go_on() -> None:
            while monotonic() - begun < seconds:
                async with connect(router.port) as client:
                    answer = await client.ask(post(CHAT, headers=[bearer()]))
                    seen[answer.status] += 1
                    workers.add(worker_of(answer))

        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(go_on() for _ in range(16)))
        took_s = monotonic() - begun

    assert len(workers) > 1
    assert seen[429] > 0
    assert 0.7 * rate * seconds / slowdown() <= seen[200] <= 1.05 * rate * took_s + burst


def grants(
    count: int, *, tokens_per_min: int, before: dict[str, int] | None = None, memory: LimitsMemory
) -> list[Grant]:
    """The same key in several workers."""
    key = api_key(tokens_per_min=tokens_per_min)
    snapshot = with_keys([], key)
    slots = assign_rates(snapshot, before or {}, memory)
    found = []
    for row in range(count):
        limits = WorkerLimits(memory, row)
        limits.configure(slots, {})
        found.append(AccessControl(snapshot, limits).grant_of(key.name))
    return [grant for grant in found if grant is not None]


def left(grant: Grant) -> int:
    assert isinstance(grant.tokens, Budget)
    return grant.tokens.available(monotonic())


def test_tokens_counted_by_one_worker_are_spent_for_all():
    memory = LimitsMemory.create(3)
    one, other, third = grants(3, tokens_per_min=600, memory=memory)
    one.charge_prompt(400)
    other.charge_prompt(100)

    assert [left(grant) // 10 for grant in (one, other, third)] == [10, 10, 10]


def test_a_changed_rate_continues_from_the_level_of_the_previous_one_once():
    memory = LimitsMemory.create(2)
    before = grants(2, tokens_per_min=600, memory=memory)
    before[0].charge_prompt(590)
    slots = assign_rates(with_keys([], api_key(tokens_per_min=600)), {}, LimitsMemory.create(1))
    after = grants(2, tokens_per_min=60_000, before=slots, memory=memory)
    for old, new in zip(before, after, strict=True):
        new.carry_over(old)
    assert [left(grant) < 1000 for grant in after] == [True, True]
    before[1].charge_prompt(10_000)  # of a request that began under the rate before

    assert [left(grant) for grant in after] == [0, 0]


def test_a_queue_keeps_its_slot_while_configured_and_frees_it_when_no_request_runs_there():
    memory = LimitsMemory.create(2)
    limit = ConcurrencyConfig(max_running=1)
    slots = assign_queues(config([], concurrency=limit), {}, memory)
    assert assign_queues(config([], concurrency=limit), slots, memory) == slots == {"chat/": 0}
    place = WorkerPermits(memory, 0, 1)
    assert place.acquire(1, 1.0)
    assert assign_queues(config([]), slots, memory) == {}
    assert assign_queues(config([], concurrency=limit), {}, memory) == {"chat/": 1}
    memory.clear(1)
    assert assign_queues(config([], concurrency=limit), {}, memory) == {"chat/": 0}


def test_the_first_request_in_order_gets_the_permit_unless_its_worker_has_stopped():
    memory = LimitsMemory.create(2)
    here, there = (WorkerPermits(memory, 0, row) for row in range(2))
    WorkerLimits(memory, 1).tick(0)
    there.publish_queue(1, 5.0)
    assert not here.acquire(1, 4.0)
    assert here.acquire(1, 6.0)
    here.release()
    memory.ticks[1] -= 1.0
    assert here.acquire(1, 4.0)


async def test_a_worker_that_removes_a_limit_admits_its_requests_and_gives_their_permits_back():
    memory, limited = LimitsMemory.create(2), config([], concurrency=ConcurrencyConfig(max_running=1))
    slots = assign_queues(limited, {}, memory)
    here, there = AdmissionQueues(), AdmissionQueues()
    for row, queues in enumerate((here, there)):
        limits = WorkerLimits(memory, row)
        limits.configure({}, slots)
        limits.tick(0)
        queues.configure(limited, limits)
    admitted: list[str] = []

    def asks(queues: AdmissionQueues, name: str, priority: int = 5) -> QueuePermit:
        permit = queues.permit("chat", "", priority, None, 0, lambda: admitted.append(name), lambda _: None)
        if permit.acquire():
            admitted.append(name)
        return permit

    running = asks(here, "running")
    asks(here, "waiting")
    asks(there, "more urgent, in the other worker", 0)
    here.configure(config([]))
    await asyncio.sleep(0)
    assert admitted == ["running", "waiting"]
    running.release()
    there.admit()
    await asyncio.sleep(0)
    assert admitted == ["running", "waiting", "more urgent, in the other worker"]
    assert [sum(memory.running(0)), sum(memory.waiting(0))] == [1, 0]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_flow_has_one_share_however_many_workers_its_connections_reach(workers):
    memory = LimitsMemory.create(4)
    limit = ConcurrencyConfig(max_running=1, max_waiting=100_000)
    limiters = [ConcurrencyLimiter(limit, monotonic, permits=WorkerPermits(memory, 0, row)) for row in range(4)]

    def arrive(row: int, flow: str, count: int) -> None:
        for _ in range(count):
            limiters[row].acquire(QueuedRequest(0, flow, 100))

    arrive(0, "before", 1)
    for row in range(workers):
        arrive(row, "hostile", 200)
    arrive(3, "modest", 100)
    seen = Counter[str]()
    for row in itertools.islice(itertools.cycle(range(4)), 400):
        for limiter in limiters[row:] + limiters[:row]:
            if limiter.running:
                for tick in range(4):
                    WorkerLimits(memory, tick).tick(0)
                request = next(iter(limiter._running))
                seen[request.flow] += 1
                limiter.release(request)
        for limiter in limiters:
            limiter.admit()
        if seen["modest"] == 100:
            break
    assert seen["modest"] == 100
    assert seen["hostile"] == pytest.approx(100, abs=2 * workers)


def limiters_of(memory: LimitsMemory, *rows: int, waiting: int = 1000) -> list[ConcurrencyLimiter]:
    limit = ConcurrencyConfig(max_running=1, max_waiting=waiting)
    return [ConcurrencyLimiter(limit, lambda: 0.0, permits=WorkerPermits(memory, 0, row)) for row in rows]


def test_flows_of_different_priorities_have_no_tag_in_common():
    memory = LimitsMemory.create(1)
    limiter = limiters_of(memory, 0)[0]
    for name in range(1000):
        for priority in range(10):
            place = limiter._lane(limiter._flow(f"flow-{name}"), priority)._at - HIGHEST - 1
            assert place // 2 % 10 == priority
            assert 0 <= place < len(memory.tags(0)) - HIGHEST - 2


def test_a_removed_queue_changes_no_tags_of_the_queue_that_gets_its_memory():
    memory = LimitsMemory.create(1)
    old = limiters_of(memory, 0)[0]
    running, waiting = QueuedRequest(0, "a", 1_000_000), QueuedRequest(0, "a", 1_000_000)
    old.acquire(running)
    old.acquire(waiting)
    old.remove_limit()
    before = list(memory.tags(0))
    for request in (running, waiting):
        old.release(request, (1_000_000, 5_000_000))
    assert list(memory.tags(0)) == before


def test_a_worker_may_use_its_part_of_a_queue_that_others_have_filled():
    memory = LimitsMemory.create(4)
    here, there = limiters_of(memory, 0, 1, waiting=100)
    for _ in range(200):
        there.acquire(QueuedRequest(0, "hostile", 100))
    modest = [QueuedRequest(0, "modest", 100) for _ in range(26)]
    for request in modest:
        here.acquire(request)
    assert (here.waiting, there.waiting) == (25, 100)
    assert [len(request.events) for request in modest] == [0] * 25 + [1]


def test_usage_that_cannot_be_true_stops_no_flow():
    memory = LimitsMemory.create(2)
    limiter = limiters_of(memory, 0)[0]
    for _ in range(3):
        request = QueuedRequest(9, "a", 100)
        WorkerLimits(memory, 1).tick(0)
        assert limiter.acquire(request)
        limiter.release(request, (100, 2 * 10**15))


def test_idle_workers_forgive_what_any_of_them_has_charged():
    memory = LimitsMemory.create(2)
    here, there = limiters_of(memory, 0, 1)
    for limiter, name in ((here, "a"), (there, "b")):
        request = QueuedRequest(0, name, 100)
        limiter.acquire(request)
        limiter.release(request, (100_000 if name == "a" else 100, 0))
    here.acquire(QueuedRequest())
    for _ in range(100):
        here.acquire(QueuedRequest(0, "b", 100))
    here.acquire(QueuedRequest(0, "a", 100))
    assert "a" in [end_oldest(here).flow for _ in range(4)]


def _take_and_give(fd: int, row: int, rounds: int) -> None:
    places = WorkerPermits(LimitsMemory(fd, 4), QUEUES - 1, row)
    for _ in range(rounds):
        while not places.acquire(2, 1.0):
            os.sched_yield()
        assert places.running <= 2
        places.release()


@pytest.mark.plain_python(reason="It starts processes of the plain interpreter.")
def test_concurrent_processes_never_hold_more_permits_than_the_limit():
    memory = LimitsMemory.create(4)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_take_and_give, args=(memory.fd, row, 3000)) for row in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert WorkerPermits(memory, QUEUES - 1, 0).running == 0
