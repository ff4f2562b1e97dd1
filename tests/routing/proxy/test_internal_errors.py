"""Programming errors and background loops: no client waits for ever, no load remains, and long work runs in slices."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from routing.balancing.placement import Placement
from routing.health import checks
from routing.health.circuit_breaker import CircuitBreakers
from routing.http import tasks
from routing.http.loop import NEVER, NO_BUCKET, Deadlines
from routing.http.tasks import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    Background,
    Periodic,
    failures,
    pause_s,
    run_in_slices,
    run_until_cancelled,
)
from routing.observability.metrics import Outcome
from routing.proxy.response_relay import ResponseRelay
from routing.proxy.router import Router
from routing.schema import HealthCheck, ReplicaConfig
from tests.fakes.replica import FakeReplica, resetting
from tests.routing.proxy.harness import CHAT, DEADLINE_S, config, decision_page, get, post, routed

pytestmark = pytest.mark.plain_python(reason="They put mistakes into objects of the router.")
SECRET_TEXT = "what the client wrote"


def _fails(*_: object, **__: object) -> None:
    raise KeyError(SECRET_TEXT)


async def test_an_error_while_placing_gets_500(replica, monkeypatch, caplog):
    monkeypatch.setattr(Placement, "decide", _fails)
    async with routed(config([replica])) as harness:
        response = await harness.chat()
        assert (response.status, response.error["message"]) == (500, "internal error")
        await harness.at_rest()
    assert "where=exchange error=KeyError at=test_internal_errors.py:" in caplog.text
    assert SECRET_TEXT not in caplog.text


async def test_an_error_in_a_pipelined_request_gets_500(replica, monkeypatch):
    real_decide = Placement.decide
    calls = iter(range(9))
    monkeypatch.setattr(Placement, "decide", lambda *args: real_decide(*args) if next(calls) == 0 else _fails())
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT) + post(CHAT) + post(CHAT))
        assert [(await client.read_response()).status for _ in range(2)] == [200, 500]
        assert await client.read_all() == b""
        await harness.at_rest()


async def test_an_error_before_placing_gets_500(replica, monkeypatch):
    monkeypatch.setattr(Router, "open", _fails)
    async with routed(config([replica])) as harness, harness.connect() as client:
        assert (await client.ask(get(b"/v1/models"))).status == 500
        assert await client.read_all() == b""


@pytest.mark.parametrize("fails", [FakeReplica.kill, lambda replica: setattr(replica, "script", resetting)])
async def test_an_error_while_a_request_goes_elsewhere_gets_500(fails, two, monkeypatch):
    for replica in two:
        fails(replica)
    async with routed(config(two)) as harness:
        monkeypatch.setattr(harness.router.services.metrics, "count_retry", _fails)
        assert (await harness.chat()).status == 500
        await harness.at_rest()


@pytest.mark.parametrize("step", ["send_head", "usage", "outcome"])
async def test_an_error_after_the_first_byte_resets_the_connection(replica, monkeypatch, step):
    monkeypatch.setattr(ResponseRelay, step, _fails)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await client.read_all()
        await harness.at_rest()
        await harness.until(lambda: not harness.router.clients, "the client's connection to end")


async def test_an_error_in_the_counters_fails_no_request(replica, monkeypatch):
    async with routed(config([replica])) as harness, harness.connect() as client:
        monkeypatch.setattr(harness.router.services.metrics, "count_placed", _fails)
        for _ in range(3):
            assert (await client.ask(post(CHAT))).status == 200
        await harness.at_rest()


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
async def test_a_host_name_that_cannot_be_resolved_is_unreachable(host):
    @dataclass
    class Nowhere:
        name = "nowhere"
        url = f"http://{host}:9"

    snapshot = config([Nowhere()], health=HealthCheck(failures=100, interval_s=60))  # type: ignore[list-item]
    async with routed(snapshot) as harness:
        response = await harness.chat()
        assert (response.status, response.error["message"]) == (
            502,
            "replica 'nowhere' cannot be reached: its host name cannot be resolved",
        )
        await harness.at_rest()


async def test_a_failing_deadline_stops_no_other():
    class Waiter:
        def __init__(self, action: object) -> None:
            self.deadline, self.bucket = NEVER, NO_BUCKET
            self.on_deadline = action

    wheel = Deadlines(asyncio.get_running_loop())
    events = [asyncio.Event() for _ in range(20)]
    for event in events:
        wheel.arm(Waiter(_fails), 0.06)  # type: ignore[arg-type]
        wheel.arm(Waiter(event.set), 0.06)  # type: ignore[arg-type]
    async with asyncio.timeout(15):
        await asyncio.gather(*(event.wait() for event in events))
    assert len(wheel) == 0
    wheel.close()


# --- Background loops survive errors, long work runs in slices, and freed memory returns to the system ---


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tasks, "_logged", set())


class Failing:
    """Fails at the first calls, then calls the real function."""

    def __init__(self, real: Callable[..., Any], times: int = 3) -> None:
        self.calls = 0
        self._real = real
        self._times = times

    def __get__(self, instance: object, _: type | None = None) -> Callable[..., Any]:
        return self if instance is None else lambda *arguments, **more: self(instance, *arguments, **more)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls <= self._times:
            raise KeyError(SECRET_TEXT)
        return self._real(*arguments, **more)


async def test_failing_work_restarts_and_is_logged_once_for_each_kind(caplog):
    before, rounds = failures()[Background.EVENTS], iter([KeyError, KeyError, OSError, KeyError, None])

    async def work() -> None:
        if (error := next(rounds)) is not None:
            raise error(SECRET_TEXT)

    async with asyncio.timeout(DEADLINE_S):
        await run_until_cancelled(Background.EVENTS, work)
    assert failures()[Background.EVENTS] == before + 4
    decision_page = [record.message for record in caplog.records if record.message.startswith("defect")]
    assert [line.split()[-2] for line in decision_page] == ["error=KeyError", "error=OSError"]
    assert SECRET_TEXT not in caplog.text


async def test_a_cancelled_loop_ends(caplog):
    before, began = failures(), asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    going = asyncio.create_task(run_until_cancelled(Background.HEALTH, work))
    await began.wait()
    going.cancel()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait([going])
    assert going.cancelled()
    assert (failures(), caplog.text) == (before, "")


async def test_ticks_continue_after_errors_and_end_when_stopped():
    done = Failing(lambda: None)
    ticks = Periodic(Background.LIMITS, 0.001, done)
    ticks.start()
    ticks.start()
    async with asyncio.timeout(DEADLINE_S):
        while done.calls <= 5:
            await asyncio.sleep(0.005)
    ticks.stop()
    calls = done.calls
    await asyncio.sleep(0.01)
    assert done.calls == calls


def test_pauses_grow_and_are_bounded(monkeypatch):
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", FIRST_PAUSE_S)
    pauses = [pause_s(number) for number in (1, 2, 3, 50, 10_000)]
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, LAST_PAUSE_S, LAST_PAUSE_S]


async def test_health_checks_continue_after_errors(replica, monkeypatch):
    probe = Failing(checks.check_once)
    monkeypatch.setattr(checks, "check_once", probe)
    async with routed(config([replica], health=HealthCheck(interval_s=0.01))) as harness:
        await harness.until(lambda: harness.router.services.checks.status(replica.name).is_up is True, "a finding")
        _, text = await harness.admin("GET", "/metrics")
    assert f'warmpath_router_loop_failures_total{{loop="health"}} {failures()[Background.HEALTH]}' in text
    assert failures()[Background.HEALTH] >= 3


@pytest.mark.plain_python(reason="It puts a mistake into an object of the router.")
async def test_housekeeping_continues_after_errors(replica, monkeypatch):
    advance = Failing(CircuitBreakers.admit_due_probes)
    monkeypatch.setattr(CircuitBreakers, "admit_due_probes", advance)
    async with routed(config([replica])) as harness:
        await harness.until(lambda: advance.calls > 4, "ticks after those that failed")


async def test_other_tasks_run_after_each_slice(monkeypatch):
    iterations: list[int] = []

    async def work(slice_s: float) -> int:
        """Iterations of the event loop during the work."""
        monkeypatch.setattr(tasks, "SLICE_S", slice_s)
        iterations.clear()
        other_task = asyncio.create_task(keep_seeing())
        assert await run_in_slices(iter(range(100))) == list(range(100))
        other_task.cancel()
        return len(iterations)

    async def keep_seeing() -> None:
        while True:
            iterations.append(1)
            await asyncio.sleep(0)

    assert await work(0.0) >= 99
    assert await work(60.0) == 0


async def test_figures_may_change_between_two_lines(replica, monkeypatch):
    monkeypatch.setattr(tasks, "SLICE_S", 0.0)
    async with routed(config([replica])) as harness:
        await harness.chat()
        metrics, view = harness.router.services.metrics, harness.server.data.view
        scrape = asyncio.create_task(view.metrics())
        (series,) = metrics._series.values()
        for name in map("group-{}".format, count()):
            metrics.count_unplaced(Outcome.OK, "chat", name)
            series.count(name, "ok")
            if scrape.done():
                break
            await asyncio.sleep(0)
        text = await scrape
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert "warmpath_router_requests" in families
    assert families["warmpath_router_latency_seconds"].samples[-1].value == 1


async def test_requests_continue_while_decisions_and_replicas_are_written(replica, monkeypatch):
    monkeypatch.setattr(tasks, "SLICE_S", 0.0)
    async with routed(config([replica])) as harness:
        for _ in range(5):
            await harness.chat()
        view, ring = harness.server.data.view, harness.router.services.decisions
        assert await iterations_of(view.replicas()) >= 2
        assert await iterations_of(view.decisions(0, 10, 1.0)) >= 5
        assert await view.decisions(1, 3, 0.5) == decision_page(ring, 1, 3, 0.5)


async def test_requests_continue_while_many_replicas_are_written(replica, monkeypatch):
    monkeypatch.setattr(tasks, "SLICE_S", 0.0)
    whole = config([replica])
    members = tuple(ReplicaConfig(f"r{number}", "http://127.0.0.1:1") for number in range(50))
    async with routed(replace(whole, pools=(replace(whole.pools[0], replicas=members),))) as harness:
        view = harness.server.data.view
        lines = len((await view.metrics()).splitlines())
        assert await iterations_of(view.metrics()) >= lines + len(members)


async def iterations_of(work: Coroutine[Any, Any, object]) -> int:
    """Iterations of the event loop until the work is done."""
    task, iterations = asyncio.create_task(work), 0
    while not task.done():
        await asyncio.sleep(0)
        iterations += 1
    await task
    return iterations


# The first free raises glibc's threshold: later large blocks come from the heap, with small ones behind them.
PROGRAM = """
import sys
from pathlib import Path
from routing.process import return_large_blocks
if sys.argv[1] == "told":
    return_large_blocks()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
first = bytes([1]) * (30 << 20)
del first
before = resident()
pairs = [(bytes([2]) * (3 << 19), bytes([3]) * 5000) for _ in range(20)]
small = [pair[1] for pair in pairs]
del pairs
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
def test_freed_large_blocks_leave_the_process():
    def growth(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout)

    assert growth("told") < 2 << 20
    assert growth("not told") > 20 << 20, "or there is nothing to tell any more"
