"""Programming errors: no client waits for ever and no load remains, whatever fails in the router."""

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


async def test_an_error_while_placing_gets_500(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Placement, "decide", _fails)
    async with routed(config([replica])) as harness:
        response = await harness.chat()
        assert (response.status, response.error["message"]) == (500, "internal error")
        await harness.at_rest()
    assert "where=exchange error=KeyError at=test_internal_errors.py:" in caplog.text
    assert SECRET_TEXT not in caplog.text


async def test_an_error_in_a_pipelined_request_gets_500(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    real_decide = Placement.decide
    calls = iter(range(9))
    monkeypatch.setattr(Placement, "decide", lambda *args: real_decide(*args) if next(calls) == 0 else _fails())
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT) + post(CHAT) + post(CHAT))
        assert [(await client.read_response()).status for _ in range(2)] == [200, 500]
        assert await client.read_all() == b""
        await harness.at_rest()


async def test_an_error_before_placing_gets_500(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router, "open", _fails)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(get(b"/v1/models"))
        assert (await client.read_response()).status == 500
        assert await client.read_all() == b""


async def test_an_error_while_connecting_elsewhere_gets_500(
    two: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    two[0].kill()
    two[1].kill()
    async with routed(config(two)) as harness:
        monkeypatch.setattr(harness.router.services.metrics, "count_retry", _fails)
        assert (await harness.chat()).status == 500
        await harness.at_rest()


async def test_an_error_after_a_reset_gets_500(two: list[FakeReplica], monkeypatch: pytest.MonkeyPatch) -> None:
    two[0].script = two[1].script = resetting
    async with routed(config(two)) as harness:
        monkeypatch.setattr(harness.router.services.metrics, "count_retry", _fails)
        assert (await harness.chat()).status == 500
        await harness.at_rest()


@pytest.mark.parametrize("step", ["send_head", "usage", "outcome"])
async def test_an_error_after_the_first_byte_resets_the_connection(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(ResponseRelay, step, _fails)
    async with routed(config([replica])) as harness, harness.connect() as client:
        await client.send(post(CHAT))
        await client.read_all()
        await harness.at_rest()
        await harness.until(lambda: not harness.router.clients, "the client's connection to end")


async def test_an_error_in_the_counters_fails_no_request(replica: FakeReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    async with routed(config([replica])) as harness, harness.connect() as client:
        monkeypatch.setattr(harness.router.services.metrics, "count_placed", _fails)
        for _ in range(3):
            await client.send(post(CHAT))
            assert (await client.read_response()).status == 200
        await harness.at_rest()


async def test_content_parts_of_any_type_are_forwarded(replica: FakeReplica) -> None:
    body = (
        b'{"model":"tiny","messages":[{"role":"user","content":[{"type":["text"],"text":"x"},{"type":{},"text":"y"}]}]}'
    )
    async with routed(config([replica])) as harness:
        assert (await harness.chat(body)).status == 200
    assert replica.calls[0].body == body


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
async def test_a_host_name_that_cannot_be_resolved_is_unreachable(host: str) -> None:
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


async def test_a_failing_deadline_stops_no_other() -> None:
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
