"""Replicas are killed, stopped and shut down while they stream: another replica continues each stream.

Eight stand-in replicas, 50 streams at a time. One replica after another is killed (SIGKILL), hangs (SIGSTOP) or shuts
down, which ends its streams with ``abort`` as vLLM does (SIGTERM); then it is back. Each client compares its text, its
usage and its finish reason with those of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from itertools import count, cycle
from typing import Any

import aiohttp

from routing.schema import BreakerConfig, HealthCheck, Limits
from tests.benchmarks.proxy import free_port
from tests.benchmarks.soak.stand import RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import Verdict

REPLICAS = 8
STREAMS = 50  # at a time
TOKENS = 300  # of a text, at 100 a second
EVERY_S = 20.0  # between two faults
AWAY_S = 5.0  # how long a replica is away
READY_S = 60.0
FAULTS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
PROMPTS = 40
Seen = tuple[str, str | None, tuple[int, int] | None]  # text, finish reason, tokens of prompt and completion


class StandIn:
    """A replica process that is started again at its port."""

    def __init__(self, number: int) -> None:
        self.name = f"replica-{number}"
        self.port = free_port()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        command = [sys.executable, "-m", "routing.standin.server", "--port", str(self.port), "--prefill-rate", "100000"]
        self._process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert self._process.stdout
        async with asyncio.timeout(READY_S):
            await self._process.stdout.readline()

    async def fail(self, fault: signal.Signals) -> None:
        """Be away for a while."""
        assert self._process
        self._process.send_signal(fault)
        await asyncio.sleep(AWAY_S)
        if fault is signal.SIGSTOP:
            self._process.send_signal(signal.SIGCONT)
        else:
            await self._process.wait()
            await self.start()

    async def stop(self) -> None:
        if self._process and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def _request(number: int) -> tuple[str, dict[str, Any]]:
    """A chat or a completion; every second one asks for its usage."""
    options = {"stream_options": {"include_usage": True}} if number // 2 % 2 else {}
    common = {"model": "warmpath-demo", "stream": True, "max_tokens": TOKENS, "temperature": 0, **options}
    text = f"Question {number}: what does a prefix cache keep?"
    if number % 2:
        return "/v1/completions", {**common, "prompt": text}
    return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}]}


async def _stream(http: aiohttp.ClientSession, url: str, number: int) -> Seen | str:
    """What a client sees; a text if the stream is broken."""
    path, body = _request(number)
    parts, reasons, usage, ids = [], [], None, set()
    async with http.post(url + path, json=body) as response:
        if response.status != 200:
            return f"status {response.status}"
        lines = (await response.read()).decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    if not events or events[-1] != "[DONE]":
        return "broken"
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            return "broken"
        ids.add(event["id"])
        for choice in event["choices"]:
            parts.append(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        if event.get("usage"):
            usage = event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]
    return ("".join(parts), reasons[0], usage) if len(ids) == len(reasons) == 1 else "two streams"


async def measure(verdict: Verdict, seconds: float) -> None:
    replicas = [StandIn(number) for number in range(REPLICAS)]
    outcomes, faults = Counter[str](), Counter[str]()
    breaker = BreakerConfig(open_s=1.0, slow_start_s=0, successes=1)
    health = HealthCheck(interval_s=0.5, timeout_s=2.0)
    config = pool_of(replicas, breaker=breaker, health=health, limits=Limits(idle_timeout_s=10.0))
    try:
        await asyncio.gather(*(replica.start() for replica in replicas))
        timeout = aiohttp.ClientTimeout(total=120)
        async with router_process(config) as router, aiohttp.ClientSession(timeout=timeout) as http:
            expected = await asyncio.gather(*(_stream(http, replicas[0].url, number) for number in range(PROMPTS)))
            clients = [
                asyncio.create_task(_clients(http, router, expected, outcomes, first)) for first in range(STREAMS)
            ]
            loop = asyncio.get_running_loop()
            end = loop.time() + seconds
            for replica, fault in zip(cycle(replicas), cycle(FAULTS), strict=False):
                if loop.time() + AWAY_S > end:
                    break
                before = await router.metric("stream_failures_total")
                await replica.fail(fault)
                faults[fault.name] += round(await router.metric("stream_failures_total") - before)
                await asyncio.sleep(max(0.0, min(EVERY_S, seconds / 6) - AWAY_S))
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            verdict.check("clients", "all ran", all(client.cancelled() for client in clients))
            results = await router.counts("stream_failures_total", "result")
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas))
    verdict.report("streams per fault", str(dict(faults)))
    verdict.check("continued", str(dict(results)), set(results) == {"continued"} and min(faults.values()) > 0)
    verdict.check("streams", str(dict(outcomes)), set(outcomes) == {"same"})


async def _clients(
    http: aiohttp.ClientSession, router: RouterProcess, expected: list[Seen | str], outcomes: Counter[str], first: int
) -> None:
    """Send one stream after the other until cancelled."""
    for number in count(first):
        try:
            seen = await _stream(http, f"http://127.0.0.1:{router.port}", number % PROMPTS)
        except (aiohttp.ClientError, TimeoutError, LookupError, ValueError) as error:  # the last two: garbled events
            seen = type(error).__name__
        outcomes["same" if seen == expected[number % PROMPTS] else seen if isinstance(seen, str) else "another"] += 1
