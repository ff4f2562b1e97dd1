"""Whoever was let in before a router stopped is answered."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from routing.proxy.single import SingleProcess
from routing.server import serve
from routing.settings import read_settings
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import CHAT, config, get, post, routed


async def test_a_connection_that_was_just_accepted_is_answered_and_closed(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect() as fresh, harness.connect() as half:
        await half.send(post(CHAT)[:-5])
        await harness.until(lambda: len(harness.router.clients) == 2, "both connections")
        await harness.until(lambda: any(client._head for client in harness.router.clients), "half a request")
        draining = asyncio.create_task(harness.server.drain())
        await harness.until(lambda: harness.router.is_draining, "the drain")
        await fresh.send(post(CHAT))
        await half.send(post(CHAT)[-5:])
        for client in (fresh, half):
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await client.read_all() == b""
        async with asyncio.timeout(5):
            await draining
        await harness.at_rest()


async def test_an_idle_connection_may_bring_one_more_request_where_another_process_goes_on(
    replica: FakeReplica,
) -> None:
    async with routed(config([replica])) as harness, harness.connect() as idle, harness.connect() as silent:
        for client in (idle, silent):
            await client.send(get(b"/health"))
            await client.answer()
        draining = asyncio.create_task(harness.router.drain(linger_s=0.2))
        await harness.until(lambda: harness.router.is_draining, "the drain")
        await idle.send(post(CHAT))
        answer = await idle.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await silent.read_all() == b""
        async with asyncio.timeout(5):
            await draining


async def test_a_connection_that_brings_nothing_holds_nobody_up(replica: FakeReplica) -> None:
    async with routed(config([replica])) as harness, harness.connect():
        await harness.until(lambda: bool(harness.router.clients), "the connection")
        async with asyncio.timeout(5):
            await harness.server.drain()


async def test_what_goes_wrong_while_draining_is_not_taken_for_a_good_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(SingleProcess, "drain", fail)
    monkeypatch.setattr("routing.server.spare_the_collector", lambda: None)
    settings = read_settings(
        ["--control-plane=http://127.0.0.1:1", "--port=0", "--admin-port=0", f"--state-dir={tmp_path}"], {}
    )
    running = asyncio.create_task(serve(settings))
    ready = asyncio.Event()
    monkeypatch.setattr("routing.server._say_ready", lambda _: ready.set())
    async with asyncio.timeout(20):
        await ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(RuntimeError, match="a mistake of ours"):
            await running
