"""The player: what it sends, what it measures, and how it behaves when things go wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from routing.traffic import player as player_module
from routing.traffic.client import ChatClient, Durations, Totals, summary_line, total
from routing.traffic.command import main
from routing.traffic.mix import Mix
from routing.traffic.player import PlayConfig, Player
from routing.traffic.trace import Job

DEADLINE_S = 60.0


@dataclass(eq=False)
class Script:
    """A session of short turns."""

    group: str = "g"
    session_id: str | None = "s"
    tools: Sequence[dict[str, Any]] = ()

    def messages(self, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"turn {turn} after {list(answers)}"}]


@dataclass
class Jobs:
    """A workload that is a list."""

    items: list[Job]

    def jobs(self) -> Iterator[Job]:
        return iter(self.items)


def single_requests(count: int, gap_s: float = 0.0) -> Jobs:
    return Jobs([Job(index * gap_s, Script(session_id=None), 0, 3) for index in range(count)])


def turns(count: int) -> Jobs:
    script = Script()
    return Jobs([Job(0.0, script, turn, 3, is_last=turn == count - 1) for turn in range(count)])


@dataclass
class FakeRouter:
    """Sends scripted responses and records requests."""

    answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    max_in_flight: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            return await self.answer(request)
        finally:
            self.in_flight -= 1


def event(document: object) -> bytes:
    return b"data: " + (document if isinstance(document, bytes) else json.dumps(document).encode()) + b"\n\n"


def content(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}},
}


def stream_of(*events: bytes, pause_s: float = 0.0) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(pause_s)
        for each in events:
            await response.write(each)
        return response

    return answer


GOOD = (event(content("one ")), event(content("two")), event(USAGE), event(b"[DONE]"))


@asynccontextmanager
async def serving(router: FakeRouter, port: int = 0) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", router.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
    finally:
        await runner.cleanup()


async def play(url: str, workload: Any, **limits: Any) -> Player:
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as http:
        player = Player(ChatClient(http, url), PlayConfig(**limits))
        await player.play(workload)
    return player


async def test_a_request_has_its_group_and_session_and_requests_usage():
    router = FakeRouter(stream_of(*GOOD))
    async with serving(router) as url:
        await play(url, turns(1), model="m")

    assert (router.headers[0]["X-Task-Group"], router.headers[0]["X-Session-ID"]) == ("g", "s")
    body = router.bodies[0]
    assert (body["model"], body["stream"], body["stream_options"]) == ("m", True, {"include_usage": True})


async def test_results_are_totalled_by_group():
    async with serving(FakeRouter(stream_of(*GOOD, pause_s=0.05))) as url:
        player = await play(url, single_requests(3))

    totals = player.totals["g"]
    assert (totals.requests, totals.ok, dict(totals.errors)) == (3, 3, {})
    assert (totals.prompt_tokens, totals.cached_tokens, totals.completion_tokens) == (300, 192, 9)
    assert totals.hit_rate == 0.64
    assert totals.ttft.count == 3
    assert (totals.ttft.quantile(0.5) or 0) >= 0.05


async def test_the_hit_rate_is_unknown_if_responses_report_no_cached_tokens():
    without_details = {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 3}}
    async with serving(FakeRouter(stream_of(event(without_details), event(b"[DONE]")))) as url:
        player = await play(url, single_requests(1))

    assert player.totals["g"].hit_rate is None
    assert player.report(1.0)["hit_rate"] is None


async def rejecting(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {}}, status=503)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (rejecting, "http_503"),
        (stream_of(event(content("one"))), "broken"),
        (stream_of(event({"error": {"message": "x"}}), event(b"[DONE]")), "stream_error"),
        (stream_of(event({"choices": [{"delta": {}, "finish_reason": "abort"}]}), event(b"[DONE]")), "abort"),
        (stream_of(event(b"{oh no")), "malformed"),
        (stream_of(event(b'{"choices":[{"delta":{"content":"\xff"}}]}')), "malformed"),
    ],
)
async def test_each_kind_of_failure_has_its_name(answer, kind):
    async with serving(FakeRouter(answer)) as url:
        player = await play(url, single_requests(1))

    assert dict(player.totals["g"].errors) == {kind: 1}
    assert player.totals["g"].ok == 0


async def silent(_request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def silent_after_a_byte(request: web.Request) -> web.StreamResponse:
    await stream_of(event(content("one")))(request)
    return await silent(request)


@pytest.mark.parametrize("answer", [silent, silent_after_a_byte])
async def test_a_router_that_stops_responding_is_a_timeout(answer):
    async with serving(FakeRouter(answer)) as url:
        assert await error_of(url, sock_read=0.1) == "timeout"
        assert await error_of(url, total=0.1) == "timeout"


async def test_a_router_that_accepts_no_connection_is_unreachable():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as others:
        for _ in range(3):  # fill the backlog, so that the next SYN is dropped
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/v1/chat/completions"

        assert await error_of(url, sock_connect=0.2) == "connect"


async def error_of(url: str, **limits_s: float) -> str | None:
    limits = aiohttp.ClientTimeout(**limits_s)
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(timeout=limits) as http:
        return (await ChatClient(http, url).send(b"{}", {"Content-Type": "application/json"})).error


async def test_a_turn_waits_for_the_previous_response_and_contains_it():
    router = FakeRouter(stream_of(*GOOD, pause_s=0.02))
    async with serving(router) as url:
        await play(url, turns(3))

    assert [body["messages"][0]["content"] for body in router.bodies] == [
        "turn 0 after []",
        "turn 1 after ['one two']",
        "turn 2 after ['one two', 'one two']",
    ]
    assert router.max_in_flight == 1


async def test_a_failed_turn_ends_its_session_and_the_rest_is_skipped():
    router = FakeRouter(rejecting)
    async with serving(router) as url:
        player = await play(url, turns(4))

    assert len(router.bodies) == 1
    assert player.skipped == 3


async def test_the_number_of_requests_in_flight_is_limited():
    router = FakeRouter(stream_of(*GOOD, pause_s=0.02))
    async with serving(router) as url:
        player = await play(url, single_requests(12), in_flight=3)

    assert router.max_in_flight == 3
    assert player.totals["g"].ok == 12


async def test_the_schedule_pauses_while_the_router_is_unreachable_and_continues_without_a_burst(monkeypatch):
    monkeypatch.setattr(player_module, "BACK_OFF_S", (0.05, 0.1))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    router = FakeRouter(stream_of(*GOOD))
    times: list[float] = []

    async def timed(request: web.Request) -> web.StreamResponse:
        times.append(asyncio.get_running_loop().time())
        return await stream_of(*GOOD)(request)

    router.answer = timed
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as http:
        player = Player(ChatClient(http, url), PlayConfig())
        playing = asyncio.create_task(player.play(single_requests(30, gap_s=0.02)))
        while player.totals["g"].errors["connect"] < 3:
            await asyncio.sleep(0)
        async with serving(router, port):
            await playing

    totals = player.totals["g"]
    assert 3 <= totals.errors["connect"] < 15  # it backed off
    assert totals.ok == 30 - totals.errors["connect"]
    assert times[-1] - times[0] >= 0.02 * (len(times) - 1) * 0.8  # and continued at the scheduled rate


async def test_a_request_limit_ends_an_endless_workload():
    async with serving(FakeRouter(stream_of(*GOOD))) as url:
        player = await play(url, Mix(1, rate=500.0), requests=20)

    assert total(player.totals).requests + player.skipped == 20


def test_an_unreadable_trace_is_reported(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text("{}\n")

    assert main(["--router", "http://127.0.0.1:1", "--trace", str(tmp_path / "t.jsonl")]) == 2
    assert main(["--router", "http://127.0.0.1:1", "--trace", str(tmp_path / "none.jsonl")]) == 2

    assert "line 1" in capsys.readouterr().err


def test_quantiles_are_accurate_to_five_percent_and_none_without_values():
    durations = Durations()
    assert durations.summary() == {"mean": None, "p50": None, "p95": None, "p99": None}
    for milliseconds in range(1, 1001):
        durations.add(milliseconds / 1000)

    assert durations.quantile(0.5) == pytest.approx(0.5, rel=0.05)
    assert durations.quantile(0.99) == pytest.approx(0.99, rel=0.05)
    assert summary_line(Totals(), 10.0) == "0.0 requests/s, 0 errors, hit rate -, TTFT p50 -, p95 -"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--requests", "-1"), ("--in-flight", "0"), ("--rate", "nan"), ("--rate", "inf"), ("--time-scale", "0")],
)
def test_options_that_would_never_end_are_rejected(option, value, capsys):
    with pytest.raises(SystemExit):
        main(["--router", "http://127.0.0.1:1", "--mix", "1", option, value])
    assert f"{option}: expected a finite number above 0" in capsys.readouterr().err
