"""The supervisor with real workers, for tests that change its timeouts or calls."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from routing.admin.events import EventSpool, StateObserver
from routing.http.sockets import bind
from routing.proxy.config_store import LastKnownGood, NackError, RetryLaterError, Source
from routing.schema import CachePurge, HealthCheck, ReplicaConfig, dump_snapshot
from routing.workers.messages import CallRejectedError, Channel, ChannelClosedError, Preparation
from routing.workers.metrics import MergedMetrics
from routing.workers.multiprocess import WorkersView
from routing.workers.process import (
    MAX_MISSED_POLLS,
    MAX_POLL_S,
    POLL_S,
    POLL_SHARE,
    POLL_TIMEOUT_S,
    WorkerProcess,
    pause_after,
)
from routing.workers.supervisor import Supervisor
from tests.routing.building import until
from tests.routing.proxy.harness import CHAT, config, connect, post

DEADLINE_S = 60.0


@pytest.mark.parametrize("took_s", [0.0, 0.001, POLL_S * POLL_SHARE, 0.05, 0.09])
def test_polling_takes_at_most_its_share_of_the_time(took_s):
    assert took_s <= POLL_SHARE * pause_after(took_s)
    assert pause_after(took_s) == POLL_S or took_s > POLL_S * POLL_SHARE


def test_a_silent_worker_is_detected_in_seconds_and_killed_within_about_a_minute():
    assert POLL_TIMEOUT_S + POLL_S < 5
    assert MAX_MISSED_POLLS * (POLL_TIMEOUT_S + POLL_S) < MAX_MISSED_POLLS * (POLL_TIMEOUT_S + MAX_POLL_S) < 70
    assert pause_after(60.0) == MAX_POLL_S


@asynccontextmanager
async def supervised(folder: Path, document: bytes | None, workers: int = 2) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor("tested", LastKnownGood(folder), workers)
    try:
        await supervisor.open(await bind("127.0.0.1", 0, count=workers, reuse_port=False), document)
        yield supervisor
    finally:
        await supervisor.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other at once; a worker that is well has time enough all the same."""
    monkeypatch.setattr("routing.workers.process.POLL_S", 0.01)
    monkeypatch.setattr("routing.workers.process.POLL_TIMEOUT_S", 2.0)


async def test_another_worker_accepts_for_a_silent_one_until_that_responds(replica, tmp_path, impatient, caplog):
    async with supervised(tmp_path, dump_snapshot(config([replica]), 1).document) as supervisor:
        silent, other = supervisor.ready
        port = supervisor._sockets[0][0].getsockname()[1]
        await until(lambda: other.listening == [1], "each to have its own sockets")
        os.kill(silent.process.pid, signal.SIGSTOP)
        try:
            await until(lambda: other.listening == [0, 1], "the other one to accept for both")
            assert supervisor.responsive == [other]
            assert silent in supervisor.ready  # slow, perhaps
            for _ in range(8):
                async with connect(port) as client:
                    assert (await client.ask(post(CHAT))).status == 200
            with pytest.raises(RetryLaterError, match="does not respond"):
                await supervisor.store.apply(dump_snapshot(config([replica]), 2).document, Source.PUSH)
            assert "warmpath_router_workers 1" in await WorkersView(supervisor, "1.0").metrics()
        finally:
            os.kill(silent.process.pid, signal.SIGCONT)
        await until(lambda: other.listening == [1] and silent.listening == [0], "each to have its own again")
        await supervisor.store.apply(dump_snapshot(config([replica]), 2).document, Source.PUSH)
        assert supervisor.restarts == 0
    assert caplog.text.count("worker_silent") == caplog.text.count("worker_responds") == 1


async def test_replica_events_need_no_additional_polls_of_workers(replica, tmp_path, monkeypatch):
    monkeypatch.setattr("routing.workers.process.POLL_S", 3600.0)
    polls, poll = 0, WorkerProcess.poll

    async def count(self: WorkerProcess, **options: Any) -> None:
        nonlocal polls
        polls += 1
        await poll(self, **options)

    quick = config([replica], health=HealthCheck(interval_s=0.05))
    async with supervised(tmp_path, dump_snapshot(quick, 1).document) as supervisor:
        view, spool = WorkersView(supervisor, "1.0"), EventSpool(tmp_path / "events", "b1")
        observer = StateObserver(view, spool, "1.0")
        replica.kill()
        async with asyncio.timeout(DEADLINE_S):
            while not all(row["health"] == "down" for row in await view.replicas()):
                await asyncio.sleep(0.01)
        monkeypatch.setattr(WorkerProcess, "poll", count)
        await observer.observe()
        assert [happening.kind for happening in spool.oldest(9)][2:] == ["replica_unreachable"]
    assert polls == 0


async def test_a_worker_that_is_silent_for_too_long_is_replaced(tmp_path, impatient, monkeypatch):
    monkeypatch.setattr("routing.workers.process.POLL_TIMEOUT_S", 0.5)
    async with supervised(tmp_path, None) as supervisor:
        stopped = supervisor.ready[0]
        os.kill(stopped.process.pid, signal.SIGSTOP)
        await until(lambda: stopped not in supervisor.processes, "the silent worker to be killed")
        await until(lambda: len(supervisor.ready) == 2, "its successor")


async def test_the_port_of_a_draining_router_closes_although_a_worker_does_not_respond(tmp_path):
    """A second after the signal no new request is accepted."""
    async with supervised(tmp_path, None) as supervisor:
        port = supervisor._sockets[0][0].getsockname()[1]
        stopped = supervisor.ready[0]
        os.kill(stopped.process.pid, signal.SIGSTOP)
        draining = asyncio.create_task(supervisor.drain(to_others=False))

        def refuses() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED

        await until(refuses, "the port to close")
        assert stopped in supervisor.processes
        draining.cancel()


async def test_a_configuration_that_one_worker_rejects_is_activated_in_none(four, tmp_path, monkeypatch):
    async with supervised(tmp_path, dump_snapshot(config(four[:1]), 1).document) as supervisor:
        prepare = WorkerProcess.prepare

        async def refuse_in_one(self: WorkerProcess, snapshot: Any) -> None:
            await prepare(self, snapshot)
            if self.number == 1:
                raise CallRejectedError(reason="no room", path="$.pools")

        monkeypatch.setattr(WorkerProcess, "prepare", refuse_in_one)
        with pytest.raises(NackError) as refused:
            await supervisor.store.apply(dump_snapshot(config(four[1:2]), 2).document, Source.PUSH)
        assert (refused.value.reason, refused.value.path, refused.value.revision) == ("no room", "$.pools", 2)
        monkeypatch.undo()
        await supervisor.poller.poll(DEADLINE_S)
        assert {row["name"] for worker in supervisor.processes for row in worker.replica_rows} == {"replica-0"}
        await supervisor.store.apply(dump_snapshot(config(four[2:3]), 3).document, Source.PUSH)
        await supervisor.poller.poll(DEADLINE_S)
        assert {row["name"] for worker in supervisor.processes for row in worker.replica_rows} == {"replica-2"}


async def test_a_worker_that_dies_before_it_commits_is_replaced_by_one_with_the_new_configuration(
    four, tmp_path, monkeypatch
):
    async with supervised(tmp_path, dump_snapshot(config(four[:1]), 1).document) as supervisor:
        commit = WorkerProcess.commit
        victim = supervisor.ready[0]

        async def die_in_one(self: WorkerProcess) -> None:
            if self is victim:
                self.kill()
                await self.process.wait()
            await commit(self)

        monkeypatch.setattr(WorkerProcess, "commit", die_in_one)
        applied = await supervisor.store.apply(dump_snapshot(config(four[1:2]), 2).document, Source.PUSH)
        assert applied.snapshot.revision == 2
        await until(lambda: victim not in supervisor.processes and len(supervisor.ready) == 2, "a successor")
        await supervisor.poller.poll(DEADLINE_S)
        assert [row["name"] for worker in supervisor.ready for row in worker.replica_rows] == ["replica-1"] * 2


async def test_without_a_worker_a_configuration_is_to_be_retried_and_not_rejected(replica, tmp_path, monkeypatch):
    document = dump_snapshot(config([replica]), 1).document
    async with supervised(tmp_path, None, workers=1) as supervisor:
        view = WorkersView(supervisor, "1.0")

        async def fails(*_: object) -> WorkerProcess:
            raise OSError("no process")

        monkeypatch.setattr(WorkerProcess, "start", fails)
        supervisor.ready[0].kill()
        await until(lambda: not supervisor.ready, "the worker's end")
        with pytest.raises(RetryLaterError, match="no worker is running"):
            await supervisor.store.apply(document, Source.PUSH)
        monkeypatch.setattr("routing.workers.multiprocess.WORKERS_TIMEOUT_S", 0.05)
        with pytest.raises(RetryLaterError, match="no worker is running"):
            await view.apply_config(document)
        assert supervisor.store.last_nack is None
        monkeypatch.undo()
        monkeypatch.setattr("routing.workers.multiprocess.WORKERS_TIMEOUT_S", DEADLINE_S)
        assert (await view.apply_config(document)).snapshot.revision == 1


async def test_a_configuration_pushed_while_workers_start_is_activated_after_the_initial_one(
    replica, tmp_path, monkeypatch
):
    monkeypatch.setattr("routing.workers.multiprocess.WORKERS_TIMEOUT_S", DEADLINE_S)
    old, new = (dump_snapshot(config([replica]), revision).document for revision in (5, 6))
    supervisor = Supervisor("tested", LastKnownGood(tmp_path), 2)
    taking = asyncio.create_task(WorkersView(supervisor, "1.0").apply_config(new))
    try:
        await supervisor.open(await bind("127.0.0.1", 0, count=2, reuse_port=False), old)
        assert (await taking).snapshot.revision == 6
    finally:
        await supervisor.close()


async def test_a_worker_that_does_not_respond_causes_no_rejection_and_an_incomplete_purge(
    replica, tmp_path, monkeypatch
):
    monkeypatch.setattr("routing.workers.process.FORGET_S", 0.3)
    async with supervised(tmp_path, dump_snapshot(config([replica]), 1).document) as supervisor:
        os.kill(supervisor.ready[0].process.pid, signal.SIGSTOP)
        monkeypatch.setattr("routing.workers.process.PREPARE_S", 0.2)
        with pytest.raises(RetryLaterError, match="does not respond"):
            await supervisor.store.apply(dump_snapshot(config([replica]), 2).document, Source.PUSH)
        assert supervisor.store.last_nack is None
        result = await WorkersView(supervisor, "1.0").purge_responses(CachePurge("chat", "faq"))
    assert result.problem == "1 of 2 worker processes did not respond"


async def test_a_late_worker_activates_the_latest_configuration(replica, tmp_path):
    """What it was asked first takes long to prepare, and nobody waits for that any more."""
    configs = [ReplicaConfig(f"r{number}", "http://127.0.0.1:1") for number in range(2000)]
    small = config([replica])
    big = structs.replace(small, pools=(structs.replace(small.pools[0], replicas=tuple(configs)),))
    async with supervised(tmp_path, None, workers=1) as supervisor:
        (worker,) = supervisor.ready
        late, latest = (Preparation(dump_snapshot(it, 1).document, {}, {}) for it in (big, small))
        await asyncio.gather(worker.prepare(late), worker.prepare(latest))
        await worker.commit()
        await worker.poll()
        assert [row["name"] for row in worker.replica_rows] == [replica.name]


async def test_polling_and_replacement_continue_after_an_internal_error(tmp_path, monkeypatch):
    monkeypatch.setattr("routing.http.tasks.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("routing.workers.process.POLL_S", 0.01)
    poll, add_exited, share = WorkerProcess.poll, MergedMetrics.add_exited, Supervisor._share_sockets
    failed: list[str] = []

    def fail_once(name: str) -> None:
        if name not in failed:
            failed.append(name)
            raise KeyError(name)

    async def poll_badly(self: WorkerProcess, **options: Any) -> None:
        fail_once("poll")
        await poll(self, **options)

    def bury_badly(self: MergedMetrics, *what: Any) -> None:
        fail_once("add_exited")
        add_exited(self, *what)

    async def share_badly(self: Supervisor) -> None:
        fail_once("share")
        await share(self)

    async with supervised(tmp_path, None) as supervisor:
        monkeypatch.setattr(WorkerProcess, "poll", poll_badly)
        await until(lambda: failed == ["poll"], "a poll that fails")
        worker = supervisor.ready[0]
        worker.metrics = {}
        await until(lambda: worker.metrics != {}, "a poll after the one that failed")
        monkeypatch.setattr(MergedMetrics, "add_exited", bury_badly)
        monkeypatch.setattr(Supervisor, "_share_sockets", share_badly)
        worker.kill()
        await until(lambda: supervisor.restarts == 1 and len(supervisor.ready) == 2, "a successor")
        assert len(supervisor._free_rows) == 2
    assert failed == ["poll", "add_exited", "share"]


async def test_only_two_workers_per_core_start_at_a_time(tmp_path, monkeypatch):
    """Sixty-four that share a core would all be late."""
    begin, starting, most = WorkerProcess.wait_until_started, 0, 0

    async def count(self: WorkerProcess) -> None:
        nonlocal starting, most
        starting += 1
        most = max(most, starting)
        await begin(self)
        starting -= 1

    monkeypatch.setattr(WorkerProcess, "wait_until_started", count)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    async with supervised(tmp_path, None, workers=4) as supervisor:
        assert len(supervisor.ready) == 4
    assert most == 2


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_rows_and_file_descriptors_are_released(tmp_path):
    async with supervised(tmp_path, None) as supervisor:
        before = open_files()
        for restarts in range(1, 4):
            supervisor.ready[0].kill()
            await until(lambda n=restarts: supervisor.restarts == n and len(supervisor.ready) == 2, "a successor")
        assert len(supervisor.processes) == 2
        assert len(supervisor._free_rows) == 2
        assert open_files() <= before


async def test_a_successor_that_dies_before_it_accepts_has_one_successor(tmp_path, monkeypatch):
    async with supervised(tmp_path, None) as supervisor:
        known, dead, started = set(supervisor.processes), [], []
        listen, start = WorkerProcess.listen, WorkerProcess.start

        async def die_once(self: WorkerProcess, slots: list[int]) -> None:
            if self not in known and not dead:
                dead.append(self)
                self.kill()
                await self.process.wait()
            await listen(self, slots)

        async def count(*what: Any) -> WorkerProcess:
            started.append(await start(*what))
            return started[-1]

        monkeypatch.setattr(WorkerProcess, "listen", die_once)
        monkeypatch.setattr(WorkerProcess, "start", count)
        supervisor.ready[0].kill()
        await until(lambda: supervisor.restarts == 2 and len(supervisor.ready) == 2, "a second successor")
        await supervisor.poller.poll(DEADLINE_S)
        await until(lambda: len(supervisor.processes) == 2 and len(supervisor._tasks) == 3, "nothing more to begin")
        assert len(started) == 2


async def test_a_successor_that_dies_during_a_configuration_change_has_one_successor(tmp_path):
    """It waits for the end of that, and where nothing comes of it there is nothing to ask it."""
    async with supervised(tmp_path, None) as supervisor:
        known = set(supervisor.processes)
        async with supervisor.store.lock:
            supervisor.ready[0].kill()
            await until(lambda: set(supervisor.processes) - known, "a successor")
            (successor,) = set(supervisor.processes) - known
            successor.kill()
            await until(lambda: successor not in supervisor.processes, "its end")
        await until(lambda: len(supervisor.ready) == 2, "a worker in each slot")
        await until(lambda: set(supervisor.ready) <= set(supervisor.processes), "workers that are there")


# --- Calls between a parent and a worker ---


async def test_a_channel_returns_results_and_reports_rejections_errors_timeouts_and_closing():
    async def answer(question: str, content: Any) -> Any:
        if question == "decline":
            raise CallRejectedError(reason="because", path="$")
        if question == "fail":
            raise ZeroDivisionError
        if question == "never":
            await asyncio.Event().wait()
        return content

    ends = socket.socketpair()
    mine, theirs = [await Channel.open(end, answer) for end in ends]
    running = [asyncio.create_task(channel.run()) for channel in (mine, theirs)]
    assert await mine.call("echo", {"a": [1, b"x"]}, timeout_s=5) == {"a": [1, b"x"]}
    big = b"x" * (8 << 20)
    assert await asyncio.gather(*(mine.call("echo", big, timeout_s=5), theirs.call("echo", 2, timeout_s=5))) == [big, 2]
    with pytest.raises(CallRejectedError) as declined:
        await mine.call("decline", timeout_s=5)
    assert declined.value.facts == {"reason": "because", "path": "$"}
    with pytest.raises(CallRejectedError) as failed:
        await mine.call("fail", timeout_s=5)
    assert failed.value.facts == {"reason": "internal error"}
    with pytest.raises(TimeoutError):
        await mine.call("never", timeout_s=0.01)
    waiting = asyncio.create_task(mine.call("never", timeout_s=5))
    await asyncio.sleep(0)
    theirs.close()
    with pytest.raises(ChannelClosedError):
        await waiting
    with pytest.raises(ChannelClosedError):
        await mine.call("echo", timeout_s=5)
    await asyncio.wait(running, timeout=5)
