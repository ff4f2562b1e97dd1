"""A router tells its control plane that it exists, and serves whether or not anybody listens."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from routing.admin import announce
from routing.admin.announce import Announcement, announce_forever
from routing.admin.events import EventSpool
from tests.fakes.control_plane import answering, control_plane
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import Harness, config, routed


async def test_it_announces_until_accepted_and_then_as_a_heartbeat(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(announce, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(announce, "FIRST_PAUSE_S", 0.01)
    async with routed(config([replica]), revision=4) as harness, control_plane([503, 401, 200]) as (url, heard):
        what = Announcement(url, "http://admin", "http://data", "1.0", "token")
        view, spool = harness.server.data.view, EventSpool(tmp_path, harness.router.boot)
        task = asyncio.create_task(announce_forever(view, what, spool))
        await harness.until(lambda: len(heard) >= 5, "five announcements")
        task.cancel()
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
def announcing(harness: Harness, url: str) -> Iterator[asyncio.Task[None]]:
    what, spool = Announcement(url, "a", "d", "1.0", "token"), EventSpool(Path("/nonexistent"), "boot")
    task = asyncio.create_task(announce_forever(harness.server.data.view, what, spool))
    try:
        yield task
    finally:
        task.cancel()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://a..b"])
async def test_a_control_plane_that_is_away_changes_nothing(
    url: str, replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R1 in short."""
    asked: list[int] = []
    monkeypatch.setattr(announce, "_pause_s", lambda failures: asked.append(failures) or 0.01)
    async with routed(config([replica])) as harness:
        with announcing(harness, url) as task:
            await harness.until(lambda: len(asked) >= 4, "four attempts")
            before = harness.router.store.applied
            for _ in range(200):
                assert (await harness.chat()).status == 200
            assert harness.router.store.applied is before
            assert not task.done()
    said = re.findall(r"control_plane_unreachable problem=(\w+)", caplog.text)  # on a busy machine time runs out too
    assert 1 <= len(said) == len(set(said)) < len(asked)


async def test_each_kind_of_problem_and_its_end_is_said_once(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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


@pytest.mark.parametrize("says", [b"<html>", b"x" * 100_000, b"[" * 50_000, b"7", b'{"events_taken": "all"}', b"\xff"])
async def test_an_answer_that_no_control_plane_gives_takes_no_event_and_ends_nothing(
    says: bytes, replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(announce, "_pause_s", lambda _: 0.01)
    monkeypatch.setattr(announce, "MIN_PAUSE_S", 0.01)
    heard = 0

    async def listen(_: web.Request) -> web.Response:
        nonlocal heard
        heard += 1
        return web.Response(body=says)

    async with answering(listen) as url, routed(config([replica])) as harness:
        spool = EventSpool(tmp_path, "boot")
        spool.add("x")
        task = asyncio.create_task(
            announce_forever(harness.server.data.view, Announcement(url, "a", "d", "1.0", None), spool)
        )
        await harness.until(lambda: heard > 2, "three announcements")
        assert not task.done()
        assert len(spool) == 1
        task.cancel()


async def test_what_happens_during_an_announcement_waits_for_no_heartbeat(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(announce, "HEARTBEAT_S", 600.0)
    monkeypatch.setattr(announce, "MIN_PAUSE_S", 0.01)
    spool = EventSpool(tmp_path, "boot")
    heard: list[list[str]] = []

    async def listen(request: web.Request) -> web.Response:
        events = (await request.json())["events"]
        heard.append([happened["kind"] for happened in events])
        if len(heard) == 1:
            spool.add("meanwhile")
        return web.json_response({"events_taken": len(events)})

    async with answering(listen) as url, routed(config([replica])) as harness:
        what = Announcement(url, "a", "d", "1.0", None)
        task = asyncio.create_task(announce_forever(harness.server.data.view, what, spool))
        await harness.until(lambda: len(heard) == 2, "a second announcement")
        task.cancel()
    assert heard == [[], ["meanwhile"]]


def test_pauses_grow_to_a_heartbeat_and_no_further() -> None:
    pauses = [announce._pause_s(failures) for failures in (1, 2, 3, 50, 0)]
    assert pauses[0] < 1
    assert pauses[0] < pauses[2] < announce.HEARTBEAT_S
    assert all(pause <= announce.HEARTBEAT_S * 1.2 for pause in pauses)


@pytest.mark.parametrize(
    ("url", "control_plane_url", "told"),
    [
        ("http://0.0.0.0:8081", "http://127.0.0.1:8000", "http://127.0.0.1:8081"),
        ("https://[::]:8443", "http://127.0.0.1", "https://127.0.0.1:8443"),
        ("http://10.1.2.3:8081", "http://nowhere.invalid", "http://10.1.2.3:8081"),
        ("http://router.example:8081", "http://nowhere.invalid", "http://router.example:8081"),
    ],
)
async def test_a_router_on_all_addresses_tells_the_one_that_reaches_the_control_plane(
    url: str, control_plane_url: str, told: str
) -> None:
    assert await announce.reachable_url(url, control_plane_url) == told
