"""A mistake in one round of a loop ends that round, and no later one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from routing.admin import announce
from routing.admin.announce import reachable_url
from routing.admin.views import RouterView
from routing.health import checks
from routing.health.circuit_breaker import CircuitBreakers
from routing.http import tasks
from routing.http.tasks import FIRST_PAUSE_S, LAST_PAUSE_S, Background, Periodic, failures, pause_s, run_until_cancelled
from routing.schema import HealthCheck
from routing.server import Server, running
from routing.settings import read_settings
from tests.fakes.control_plane import control_plane
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import DEADLINE_S, config, routed

SECRET_TEXT = "what the client wrote"


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tasks, "_logged", set())


class Failing:
    """Fails at each of the first calls, then does what it stands for."""

    def __init__(self, real: Callable[..., Any], times: int = 3) -> None:
        self.calls = 0
        self._real = real
        self._times = times

    def __get__(self, instance: object, _: type | None = None) -> Callable[..., Any]:
        return self if instance is None else lambda *what, **more: self(instance, *what, **more)

    def __call__(self, *what: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls <= self._times:
            raise KeyError(SECRET_TEXT)
        return self._real(*what, **more)


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, f"waited {DEADLINE_S} s for {what}"
        await asyncio.sleep(0.005)


async def test_work_that_fails_is_begun_anew_and_said_once_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    before, rounds = failures()[Background.EVENTS], iter([KeyError, KeyError, OSError, KeyError, None])

    async def work() -> None:
        if (error := next(rounds)) is not None:
            raise error(SECRET_TEXT)

    async with asyncio.timeout(DEADLINE_S):
        await run_until_cancelled(Background.EVENTS, work)
    assert failures()[Background.EVENTS] == before + 4
    told = [record.message for record in caplog.records if record.message.startswith("defect")]
    assert [line.split()[-2] for line in told] == ["error=KeyError", "error=OSError"]
    assert SECRET_TEXT not in caplog.text


async def test_a_loop_that_is_cancelled_has_ended(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_ticks_go_on_and_end_when_they_are_stopped() -> None:
    done = Failing(lambda: None)
    ticks = Periodic(Background.LOADS, 0.001, done)
    ticks.start()
    ticks.start()
    await until(lambda: done.calls > 5, "ticks after those that failed")
    ticks.stop()
    calls = done.calls
    await asyncio.sleep(0.01)
    assert done.calls == calls


def test_pauses_grow_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", FIRST_PAUSE_S)
    pauses = [pause_s(number) for number in (1, 2, 3, 50, 10_000)]
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, LAST_PAUSE_S, LAST_PAUSE_S]


async def test_health_is_asked_on(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Failing(checks.check_once)
    monkeypatch.setattr(checks, "check_once", probe)
    async with routed(config([replica], health=HealthCheck(interval_s=0.01))) as harness:
        await until(lambda: harness.router.services.checks.status(replica.name).is_up is True, "a finding")
        _, text = await harness.admin("GET", "/metrics")
    assert f'warmpath_router_loop_failures_total{{loop="health"}} {failures()[Background.HEALTH]}' in text
    assert failures()[Background.HEALTH] >= 3


@pytest.mark.plain_python(reason="It puts a mistake into an object of the router.")
async def test_replicas_are_watched_on(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Failing(CircuitBreakers.admit_due_probes)
    monkeypatch.setattr(CircuitBreakers, "admit_due_probes", advance)
    async with routed(config([replica])):
        await until(lambda: advance.calls > 4, "ticks after those that failed")


@asynccontextmanager
async def announced(folder: Path) -> AsyncIterator[tuple[Server, list[dict[str, Any]]]]:
    """A router and what its control plane hears."""
    async with control_plane([200]) as (url, heard):
        options = [f"--control-plane={url.rstrip('/')}", "--port=0", "--admin-port=0", f"--state-dir={folder}"]
        async with running(read_settings(options, {})) as server:
            yield server, heard


async def test_a_router_announces_itself_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "reachable_url", Failing(reachable_url))
    async with announced(tmp_path) as (server, heard):
        await until(lambda: bool(heard), "an announcement")
        assert heard[0]["name"] == server.settings.name


async def test_what_happens_is_noticed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Failing(RouterView.replicas)
    monkeypatch.setattr(RouterView, "replicas", replicas)
    async with announced(tmp_path):
        await until(lambda: replicas.calls > 3, "a look after those that failed")
