"""Heartbeats to the control plane, and the event spool on disk."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from routing.admin import announce
from routing.admin.announce import Announcement, announce_forever
from routing.admin.events import FILE, EventSpool, StateObserver
from routing.schema import HealthCheck
from tests.fakes.control_plane import control_plane
from tests.fakes.control_plane import serving as serving_control_plane
from tests.pace import examples
from tests.routing.proxy.harness import Harness, config, routed


async def test_a_router_announces_itself_until_accepted_and_then_sends_heartbeats(replica, monkeypatch, tmp_path):
    monkeypatch.setattr(announce, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(announce, "FIRST_PAUSE_S", 0.01)
    async with routed(config([replica]), revision=4) as harness, control_plane([503, 401, 200]) as (url, heard):
        with announcing(harness, url, EventSpool(tmp_path, harness.router.boot)):
            await harness.until(lambda: len(heard) >= 5, "five announcements")
        assert (await harness.chat()).status == 200
    router = harness.router
    assert abs(heard[-1].pop("sent_at") - time.time()) < 60
    assert heard[-1] == {
        "signature": {"expires_at": None, "key": None, "state": "unchecked"},
        "events": [],
        "name": "tested",
        "boot": router.boot,
        "version": "1.0",
        "admin_url": "http://admin",
        "data_url": "http://data",
        "revision": 4,
        "sha256": router.store.applied.snapshot.sha256,
        "authorization": "Bearer token",
    }


@contextmanager
def announcing(harness: Harness, url: str, spool: EventSpool | None = None) -> Iterator[asyncio.Task[None]]:
    announcement = Announcement(url, "http://admin", "http://data", "1.0", "token")
    spool = EventSpool(Path("/nonexistent"), "boot") if spool is None else spool
    task = asyncio.create_task(announce_forever(harness.server.data.view, announcement, spool))
    try:
        yield task
    finally:
        task.cancel()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://a..b"])
async def test_an_unavailable_control_plane_changes_nothing(url, replica, monkeypatch, caplog):
    attempts: list[int] = []
    monkeypatch.setattr(announce, "_pause_s", lambda failures: attempts.append(failures) or 0.01)
    async with routed(config([replica])) as harness:
        with announcing(harness, url) as task:
            await harness.until(lambda: len(attempts) >= 4, "four attempts")
            before = harness.router.store.applied
            for _ in range(20):
                assert (await harness.chat()).status == 200
            assert harness.router.store.applied is before
            assert not task.done()
    problems = re.findall(
        r"control_plane_unreachable problem=(\w+)", caplog.text
    )  # on a busy machine there are timeouts too
    assert 1 <= len(problems) == len(set(problems)) < len(attempts)


async def test_each_problem_and_its_end_are_logged_once(replica, monkeypatch, caplog):
    for name in ("HEARTBEAT_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(announce, name, 0.01)
    statuses = [503, 401, 503, 503, 200, 200, 503, 200]
    async with routed(config([replica])) as harness, control_plane(statuses) as (url, heard):
        with announcing(harness, url):
            await harness.until(lambda: len(heard) > 9, "ten announcements")
    lines = [record.message.partition(" ")[2] for record in caplog.records if "control_plane" in record.message]
    assert lines == [
        'problem="status 503"',
        'problem="status 401"',
        "after_failures=4",
        'problem="status 503"',
        "after_failures=1",
    ]


@pytest.mark.parametrize(
    "says", [b"<html>", b"x" * 100_000, b"[" * 50_000, b"7", b'{"acknowledged_events": "all"}', b"\xff"]
)
async def test_a_malformed_response_acknowledges_no_event_and_stops_nothing(says, replica, monkeypatch, tmp_path):
    monkeypatch.setattr(announce, "_pause_s", lambda _: 0.01)
    monkeypatch.setattr(announce, "MIN_PAUSE_S", 0.01)
    heard = 0

    async def listen(_: web.Request) -> web.Response:
        nonlocal heard
        heard += 1
        return web.Response(body=says)

    async with serving_control_plane(listen) as url, routed(config([replica])) as harness:
        spool = EventSpool(tmp_path, "boot")
        spool.add("x")
        with announcing(harness, url, spool) as task:
            await harness.until(lambda: heard > 2, "three announcements")
            assert not task.done()
            assert len(spool) == 1


async def test_new_events_are_sent_without_waiting_for_a_heartbeat(replica, monkeypatch, tmp_path):
    monkeypatch.setattr(announce, "HEARTBEAT_S", 600.0)
    monkeypatch.setattr(announce, "MIN_PAUSE_S", 0.01)
    spool = EventSpool(tmp_path, "boot")
    heard: list[list[str]] = []

    async def listen(request: web.Request) -> web.Response:
        events = (await request.json())["events"]
        heard.append([happened["kind"] for happened in events])
        if len(heard) == 1:
            spool.add("meanwhile")
        return web.json_response({"acknowledged_events": len(events)})

    async with serving_control_plane(listen) as url, routed(config([replica])) as harness:
        with announcing(harness, url, spool):
            await harness.until(lambda: len(heard) == 2, "a second announcement")
    assert heard == [[], ["meanwhile"]]


@pytest.mark.parametrize(
    ("url", "control_plane_url", "reported"),
    [
        ("http://0.0.0.0:8081", "http://127.0.0.1:8000", "http://127.0.0.1:8081"),
        ("https://[::]:8443", "http://127.0.0.1", "https://127.0.0.1:8443"),
        ("http://10.1.2.3:8081", "http://nowhere.invalid", "http://10.1.2.3:8081"),
        ("http://router.example:8081", "http://nowhere.invalid", "http://router.example:8081"),
    ],
)
async def test_a_router_on_all_addresses_announces_one_that_is_reachable(url, control_plane_url, reported):
    assert await announce.reachable_url(url, control_plane_url) == reported


@pytest.fixture
def spool(tmp_path: Path) -> EventSpool:
    return EventSpool(tmp_path, "b1")


def names(spool: EventSpool) -> list[tuple[str, int]]:
    return [(happening.boot, happening.seq) for happening in spool.oldest(10_000)]


def test_events_are_kept_in_order_until_acknowledged(spool):
    for number in range(5):
        spool.add("replica_ejected", replica=f"r{number}", reason=None)
    spool.acknowledge(spool.oldest(2))
    assert names(spool) == [("b1", 3), ("b1", 4), ("b1", 5)]
    assert spool.oldest(1)[0].facts == {"replica": "r2"}


def test_events_survive_a_restart(spool, tmp_path):
    for _ in range(3):
        spool.add("x")
    spool.acknowledge(spool.oldest(1))
    after = EventSpool(tmp_path, "b2")
    after.add("router_started")
    assert names(after) == [("b1", 2), ("b1", 3), ("b2", 1)]


def test_the_oldest_events_are_dropped_and_the_file_is_bounded(tmp_path):
    spool = EventSpool(tmp_path, "b1", capacity=10)
    for number in range(1, 1001):
        spool.add("x", text="y" * 1000)
        assert (tmp_path / FILE).stat().st_size < 2 * 10 * 700 + 700
        assert len(spool) == min(number, 10)
    assert names(spool)[0] == ("b1", 991)
    assert names(EventSpool(tmp_path, "b2", capacity=10)) == [("b1", seq) for seq in range(991, 1001)]


@pytest.mark.parametrize("seed", range(5))
def test_damaged_lines_are_skipped_and_the_others_read(tmp_path, seed):
    chance = random.Random(seed)
    spool = EventSpool(tmp_path, "b1")
    for number in range(20):
        spool.add("x", text=f"fact {number}")
    whole = (tmp_path / FILE).read_bytes()
    for _ in range(50):
        at = chance.randrange(len(whole))
        damaged = bytearray(whole[: chance.randrange(at, len(whole) + 1)])
        if at < len(damaged):
            damaged[at] ^= 1 << chance.randrange(8)
        (tmp_path / FILE).write_bytes(damaged)
        read = EventSpool(tmp_path, "b2").oldest(100)
        assert all(happening.facts == {"text": f"fact {happening.seq - 1}"} for happening in read)
        assert len(read) >= damaged.count(b"\n") - 2


def test_a_torn_event_damages_no_other_event(tmp_path):
    """A process or disk that fails in the middle of an event loses at most that one."""
    before = EventSpool(tmp_path, "b1")
    before.add("x")
    begin = (tmp_path / FILE).stat().st_size
    before.add("x")
    whole = (tmp_path / FILE).read_bytes()
    for cut in range(begin, len(whole) + 1):
        (tmp_path / FILE).write_bytes(whole[:cut])
        after = EventSpool(tmp_path, "b2")
        after.add("x")
        left = [("b1", 1), ("b1", 2)] if cut == len(whole) else [("b1", 1)]
        assert names(after) == names(EventSpool(tmp_path, "b3")) == [*left, ("b2", 1)]


def test_events_are_written_once_a_full_disk_has_space(tmp_path):
    (tmp_path / "state").touch()
    spool = EventSpool(tmp_path / "state", "b1")
    spool.add("x")
    (tmp_path / "state").unlink()
    spool.add("x")
    assert names(EventSpool(tmp_path / "state", "b2")) == [("b1", 1), ("b1", 2)]


def test_a_failing_disk_does_not_stop_events(tmp_path):
    (tmp_path / "file").touch()
    spool = EventSpool(tmp_path / "file", "b1")
    spool.add("x")
    spool.acknowledge(spool.oldest(0))
    assert names(spool) == [("b1", 1)]


@pytest.mark.generated
def test_kills_lose_no_event(tmp_path):
    """The process is killed at any time; a later process reports every event that was added."""
    chance = random.Random(1)
    added: list[str] = []
    reported: set[str] = set()
    for run in range(examples(50)):
        hears, says = os.pipe()
        pid = os.fork()
        if not pid:
            live_and_say(tmp_path, f"b{run}", says)
        os.close(says)
        with os.fdopen(hears, "rb") as pipe:
            heard = pipe.read(chance.randrange(1, 2000))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            heard += pipe.read()
        reported |= {word[1:] for word in heard.decode().split() if word[0] == "T"}
        added += [word[1:] for word in heard.decode().split() if word[0] == "A"]
    left = {f"{boot}/{seq}" for boot, seq in names(EventSpool(tmp_path, "last", capacity=1 << 20))}
    assert len(added) > 200
    assert set(added) <= reported | left


def live_and_say(folder: Path, boot: str, says: int) -> None:
    """Add events and acknowledge some, until the process is killed; each line follows its action."""
    try:
        spool = EventSpool(folder, boot, capacity=1 << 20)
        for number in range(1, 1 << 20):
            spool.add("x")
            os.write(says, f"A{boot}/{number} ".encode())
            if number % 7 == 0:
                oldest = spool.oldest(9)
                os.write(says, "".join(f"T{item.boot}/{item.seq} " for item in oldest).encode())
                spool.acknowledge(oldest)
    finally:
        os._exit(1)


@pytest.fixture
def noticing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routing.admin.events.PERIOD_S", 0.02)


async def test_a_lost_and_recovered_replica_is_reported_once(noticing, two, spool):
    seldom = HealthCheck(interval_s=60)  # no check changes what the test sets
    async with routed(config(two, health=seldom), revision=4) as harness:
        observer = StateObserver(harness.server.data.view, spool, "1.0")
        looking = asyncio.create_task(observer.observe_forever())
        router, name = harness.router, two[0].name
        await harness.until(lambda: router.services.checks.status(name).is_up, "the first and last look at its health")
        router.balancer.health.mark(name, up=False)
        router.services.checks.status(name).is_up = False
        router.services.checks.status(name).reason = "connection refused"
        await harness.until(lambda: len(spool) >= 3, "the replica's loss to be noticed")
        router.services.checks.status(name).is_up = True
        router.balancer.health.mark(name, up=True)
        await harness.until(lambda: len(spool) >= 4, "its return")
        looking.cancel()
    reported = [(happening.kind, happening.facts.get("replica")) for happening in spool.oldest(9)]
    assert reported == [
        ("router_started", None),
        ("config_loaded", None),
        ("replica_unreachable", name),
        ("replica_reachable", name),
    ]
