"""A router tells its control plane that it exists, and serves whether or not anybody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from routing.proxy import announce
from routing.proxy.announce import Announcement, keep_announcing
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import config, routed


@asynccontextmanager
async def control_plane(statuses: list[int]) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """Answers with these statuses, the last one for ever."""
    heard: list[dict[str, object]] = []

    async def listen(request: web.Request) -> web.Response:
        heard.append({**await request.json(), "authorization": request.headers.get("Authorization")})
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        return web.json_response({"desired_revision": None}, status=status)

    app = web.Application()
    app.router.add_post("/api/v1/routers/announce", listen)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/", heard
    finally:
        await runner.cleanup()


async def test_it_announces_until_accepted_and_then_as_a_heartbeat(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announce, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(announce, "FIRST_PAUSE_S", 0.01)
    async with routed(config([replica]), revision=4) as harness, control_plane([503, 401, 200]) as (url, heard):
        what = Announcement(url, "http://admin", "http://data", "1.0", "token")
        task = asyncio.create_task(keep_announcing(harness.router, what))
        await harness.until(lambda: len(heard) >= 5, "five announcements")
        task.cancel()
        assert (await harness.chat()).status == 200
    router = harness.router
    assert heard[-1] == {
        "name": "tested",
        "boot": router.boot,
        "version": "1.0",
        "admin_url": "http://admin",
        "data_url": "http://data",
        "revision": 4,
        "sha256": router.store.applied.snapshot.sha256,
        "authorization": "Bearer token",
    }


async def test_a_control_plane_that_is_away_changes_nothing(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announce, "FIRST_PAUSE_S", 0.01)
    async with routed(config([replica])) as harness:
        nowhere = Announcement("http://127.0.0.1:1", "a", "d", "1.0", None)
        task = asyncio.create_task(keep_announcing(harness.router, nowhere))
        await harness.until(lambda: "control_plane_unreachable" in caplog.text, "a line in the log")
        assert (await harness.chat()).status == 200
        task.cancel()
    assert caplog.text.count("control_plane_unreachable") <= 2


def test_pauses_grow_to_a_heartbeat_and_no_further() -> None:
    pauses = [announce._pause_s(failures) for failures in (1, 2, 3, 50, 0)]
    assert pauses[0] < 1
    assert pauses[0] < pauses[2] < announce.HEARTBEAT_S
    assert all(pause <= announce.HEARTBEAT_S * 1.2 for pause in pauses)
