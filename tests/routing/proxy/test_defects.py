"""Mistakes of our own: whatever fails inside the router, no client waits for ever and no load stays in the books."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from routing.balancing.placement import Placement
from routing.http.loop import NEVER, NO_BUCKET, Deadlines
from routing.proxy.response_relay import ResponseRelay
from routing.proxy.router import Router
from routing.schema import HealthCheck
from tests.fakes.replica import FakeReplica, resetting
from tests.routing.proxy.harness import CHAT, config, get, post, routed

pytestmark = pytest.mark.plain_python(reason="They put mistakes into objects of the router.")

SECRET_TEXT = "what the client wrote"


def _fails(*_: object, **__: object) -> None:
    raise KeyError(SECRET_TEXT)


async def test_a_failure_while_placing_is_answered_with_a_500(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Placement, "decide", _fails)
    async with routed(config([replica])) as harness:
        answer = await harness.chat()
        assert (answer.status, answer.error["message"]) == (500, "internal error")
        await harness.at_rest()
    assert "where=exchange error=KeyError at=test_defects.py:" in caplog.text
    assert SECRET_TEXT not in caplog.text


async def test_a_failure_behind_a_pipelined_request_is_answered_too(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Placement.decide
    calls = iter(range(9))
    monkeypatch.setattr(Placement, "decide", lambda *args: place(*args) if next(calls) == 0 else _fails())
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT) + post(CHAT) + post(CHAT))
        assert [(await client.answer()).status for _ in range(2)] == [200, 500]
        assert await client.read_all() == b""
        await harness.at_rest()


async def test_a_failure_before_placing_is_answered_with_a_500(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Router, "open", _fails)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(get(b"/v1/models"))
        assert (await client.answer()).status == 500
        assert await client.read_all() == b""


async def test_a_failure_while_connecting_elsewhere_is_answered_with_a_500(
    two: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    two[0].kill()
    two[1].kill()
    async with routed(config(two)) as harness:
        monkeypatch.setattr(harness.router.services.metrics, "count_retry", _fails)
        assert (await harness.chat()).status == 500
        await harness.at_rest()


async def test_a_failure_after_a_reset_is_answered_with_a_500(
    two: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    two[0].script = two[1].script = resetting
    async with routed(config(two)) as harness:
        monkeypatch.setattr(harness.router.services.metrics, "count_retry", _fails)
        assert (await harness.chat()).status == 500
        await harness.at_rest()


@pytest.mark.parametrize("step", ["begin", "usage", "outcome"])
async def test_a_failure_after_the_first_byte_cuts_the_connection(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(ResponseRelay, step, _fails)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await client.read_all()
        await harness.at_rest()
        await harness.until(lambda: not harness.router.clients, "the client's connection to end")


async def test_a_failure_of_the_counters_costs_no_answer(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        monkeypatch.setattr(harness.router.services.metrics, "count_placed", _fails)
        for _ in range(3):
            await client.send(post(CHAT))
            assert (await client.answer()).status == 200
        await harness.at_rest()


async def test_a_part_of_any_type_is_for_the_replica_to_judge(replica: FakeReplica) -> None:
    body = (
        b'{"model":"tiny","messages":[{"role":"user","content":[{"type":["text"],"text":"x"},{"type":{},"text":"y"}]}]}'
    )
    async with routed(config([replica])) as harness:
        assert (await harness.chat(body)).status == 200
    assert replica.calls[0].body == body


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
async def test_a_host_name_that_no_resolver_takes_counts_as_unreachable(host: str) -> None:
    @dataclass
    class Nowhere:
        name = "nowhere"
        url = f"http://{host}:9"

    snapshot = config([Nowhere()], health=HealthCheck(failures=100, interval_s=60))  # type: ignore[list-item]
    async with routed(snapshot) as harness:
        answer = await harness.chat()
        assert (answer.status, answer.error["message"]) == (
            502,
            "replica 'nowhere' cannot be reached: its host name cannot be resolved",
        )
        await harness.at_rest()


async def test_a_deadline_that_fails_stops_no_other_one() -> None:
    class Waiter:
        def __init__(self, action: object) -> None:
            self.deadline, self.bucket = NEVER, NO_BUCKET
            self.on_deadline = action

    wheel = Deadlines(asyncio.get_running_loop())
    events = [asyncio.Event() for _ in range(20)]
    for event in events:
        wheel.arm(Waiter(_fails), 0.06)  # type: ignore[arg-type]
        wheel.arm(Waiter(event.set), 0.06)  # type: ignore[arg-type]
    async with asyncio.timeout(5):
        await asyncio.gather(*(event.wait() for event in events))
    assert len(wheel) == 0
    wheel.close()
