"""Envoy with a picker beside the router alone: ``python -m tests.benchmarks picker``.

The same seeded conversations go through a router, and through Envoy with a picker, each before new stand-in replicas
whose caches are smaller than the conversations, several times with other conversations, because one run differs from
the next by a point; then plain requests and streams to measure CPU. ``hit``: cached tokens of all prompt tokens, as
responses report, without the first part, which fills the caches; the mean of all runs. CPU is user and system time of
all threads. ``--minutes M`` runs a soak instead: replicas are killed and started again while requests,
streams, and streams whose clients disconnect go through Envoy. Needs ``envoy`` on PATH or in the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
import uvloop

from routing.observability.decision_log import CANDIDATE_BYTES, RECORD_BYTES
from tests.benchmarks.proxy import Proxy
from tests.benchmarks.soak.stand import RouterProcess, pool_of, router_process
from tests.benchmarks.soak.verdict import SLACK_KIB, Verdict
from tests.fakes.envoy import running as running_envoy
from tests.routing.picker.test_envoy import documented

REPLICAS = 3
ENGINE = ("--blocks", "1501", "--prefill-rate", "100000", "--step-s", "0.002", "--max-model-len", "16384")
REQUESTS = 600
SKIP = 0.4  # of the requests, from the start, that is not counted
CONCURRENCY = 6
CPU_REQUESTS, CPU_STREAMS, STREAM_TOKENS = 400, 100, 100
ROUNDS = 6
GOAL_POINTS = 1.0
KILL_EVERY_S, DOWN_S = 5.0, 1.0
DISCONNECT_RATIO = 0.1
PROMPTS = 60  # of each client of the soak
SEED = 7
CONVERSATIONS, SYSTEMS, SYSTEM_BYTES, TURN_BYTES, MAX_BYTES = 60, 4, 2000, (200, 1000), 5000

Messages = list[dict[str, str]]


class Conversations:
    """Conversations that grow turn by turn, some often and most rarely; one that is too long starts anew."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._words = ["".join(self._random.choices("etaoinshrdlu", k=self._random.randint(2, 9))) for _ in range(500)]
        self._systems = [self._passage(SYSTEM_BYTES) for _ in range(SYSTEMS)]
        self._idle = {number: self._new(number) for number in range(CONVERSATIONS)}
        self._busy: dict[int, int] = {}  # number of a conversation, by the id of its messages

    def _passage(self, size: int) -> str:
        """Words of different lengths, so that tokens per byte vary."""
        return " ".join(self._random.choices(self._words, k=size // 3))[:size]

    def _new(self, number: int) -> Messages:
        return [{"role": "system", "content": self._systems[number % SYSTEMS]}]

    def next(self) -> Messages:
        """The next messages of a client."""
        (number,) = self._random.choices(list(self._idle), [(1 + number) ** -0.6 for number in self._idle])
        messages = self._idle.pop(number)
        if sum(len(message["content"]) for message in messages) > SYSTEM_BYTES + MAX_BYTES:
            messages = self._new(number)
        messages.append({"role": "user", "content": self._passage(self._random.randint(*TURN_BYTES))})
        self._busy[id(messages)] = number
        return messages

    def on_response(self, messages: Messages, text: str) -> None:
        messages.append({"role": "assistant", "content": text})
        self._idle[self._busy.pop(id(messages))] = messages


class Replica:
    """A stand-in replica that can be killed and started again at its port."""

    def __init__(self, number: int) -> None:
        self.name = f"replica-{number}"
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "routing.standin.server", "--port", str(self.port), "--model", "tiny"]
        self._process = subprocess.Popen([*command, *ENGINE], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().rsplit(":", 1)[1])

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@dataclass
class Side:
    """A way to the replicas: the port of clients, and the processes by what they are."""

    port: int
    processes: dict[str, Proxy]
    router: RouterProcess
    hit_ratio: float = 0.0
    cpu_us: dict[str, tuple[float, float]] = field(default_factory=dict)  # of a request, and of a streamed token

    def cpu_s(self) -> dict[str, float]:
        return {name: process.cpu_s() for name, process in self.processes.items()}


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks picker")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--minutes", type=float, help="run the soak for so long")
    options = parser.parse_args(arguments)
    verdict = Verdict("picker")
    if options.minutes is None:
        uvloop.run(compare(options.requests, verdict))
    else:
        uvloop.run(soak(options.minutes * 60, verdict))
    if verdict.failures:
        sys.exit("\n".join(verdict.failures))


async def compare(requests: int, verdict: Verdict) -> dict[str, Side]:
    """Measure both ways in turn; their figures by name."""
    sides: dict[str, Side] = {}
    for seed in range(SEED, SEED + ROUNDS):
        for name in ("router", "picker"):
            async with before_replicas(name) as (side, _):
                first = sides.setdefault(name, side)  # collects the mean of all rounds
                first.hit_ratio += await hit_ratio(side.port, requests, seed) / ROUNDS
                if first is side:
                    await measure_cpu(side)
    for name, side in sides.items():
        verdict.report(name, f"{100 * side.hit_ratio:.2f} % hit")
        for process, (request_us, token_us) in side.cpu_us.items():
            verdict.report(f"{name}: {process}", f"{request_us:.0f} us a request, {token_us:.1f} us a streamed token")
    points = 100 * (sides["picker"].hit_ratio - sides["router"].hit_ratio)
    verdict.check("difference", f"{points:+.2f} points", abs(points) <= GOAL_POINTS)
    return sides


@asynccontextmanager
async def before_replicas(name: str) -> AsyncIterator[tuple[Side, list[Replica]]]:
    """A router, or Envoy with a picker, before new replicas, and these."""
    async with AsyncExitStack() as stack:
        replicas = [Replica(number) for number in range(REPLICAS)]
        for replica in replicas:
            stack.callback(replica.kill)
            await asyncio.to_thread(replica.start)
        config = pool_of(replicas)
        if name == "router":
            router = await stack.enter_async_context(router_process(config))
            yield Side(router.port, {"router": Proxy("router", router.port, router.popen.pid)}, router), replicas
            return
        router = await stack.enter_async_context(router_process(config, command="picker"))
        ports, pid = await stack.enter_async_context(running_envoy(documented(replicas, router.port)))
        envoy = Proxy("envoy", ports["clients"], pid)
        picker = Proxy("picker", router.port, router.popen.pid)
        yield Side(ports["clients"], {"picker": picker, "envoy": envoy}, router), replicas


async def hit_ratio(port: int, requests: int, seed: int) -> float:
    """Send the seeded conversations; cached tokens of all prompt tokens that are counted."""
    workload = Conversations(seed)
    usages: list[dict[str, Any]] = []

    async def client(http: aiohttp.ClientSession, count: int) -> None:
        for _ in range(count):
            messages = workload.next()
            answer = await chat(http, port, messages)
            usages.append(answer["usage"])
            workload.on_response(messages, answer["choices"][0]["message"]["content"])

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(client(http, requests // CONCURRENCY) for _ in range(CONCURRENCY)))
    counted = usages[int(SKIP * len(usages)) :]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in counted)
    return cached / sum(usage["prompt_tokens"] for usage in counted)


async def chat(http: aiohttp.ClientSession, port: int, messages: Any, max_tokens: int = 16) -> Any:
    body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens}
    async with http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        return await response.json()


async def stream(http: aiohttp.ClientSession, port: int, messages: Any, *, disconnects: bool = False) -> bool:
    """Read a stream, or its beginning; whether it was complete."""
    body = {"model": "tiny", "messages": messages, "max_tokens": STREAM_TOKENS, "stream": True}
    data = b""
    async with http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for piece in response.content.iter_any():
            data = data[-64:] + piece
            if disconnects:
                response.close()
                return True
    return data.endswith(b"data: [DONE]\n\n")


async def measure_cpu(side: Side) -> None:
    """CPU of each process for a plain request of 8 KiB, and for a streamed token."""
    messages = [{"role": "user", "content": "A few words of a prompt. " * 320}]
    async with aiohttp.ClientSession() as http:
        start = side.cpu_s()
        for _ in range(CPU_REQUESTS // CONCURRENCY):
            await asyncio.gather(*(chat(http, side.port, messages, 1) for _ in range(CONCURRENCY)))
        middle = side.cpu_s()
        for _ in range(CPU_STREAMS // CONCURRENCY):
            await asyncio.gather(*(stream(http, side.port, messages) for _ in range(CONCURRENCY)))
        end = side.cpu_s()
    requests = CPU_REQUESTS // CONCURRENCY * CONCURRENCY
    streams = CPU_STREAMS // CONCURRENCY * CONCURRENCY
    for name in side.processes:
        request_us = 1e6 * (middle[name] - start[name]) / requests
        token_us = (1e6 * (end[name] - middle[name]) / streams - request_us) / STREAM_TOKENS
        side.cpu_us[name] = request_us, token_us


# --- the soak ---


class Counts:
    """How requests of the soak ended."""

    def __init__(self) -> None:
        self.complete = self.incomplete = self.errors = 0


async def soak(seconds: float, verdict: Verdict) -> None:
    """Kill replicas under traffic; nothing may remain, and memory may not grow."""
    counts, kills = Counts(), 0
    async with before_replicas("picker") as (side, replicas):
        until = time.monotonic() + seconds
        warm_up_s = seconds / 3
        clients = [asyncio.create_task(send(side.port, until, number, counts)) for number in range(CONCURRENCY)]
        await asyncio.sleep(warm_up_s)
        before, log_before_kib = await side.router.figures(), await decision_log_kib(side.router)
        while time.monotonic() + KILL_EVERY_S < until:
            await asyncio.sleep(KILL_EVERY_S - DOWN_S)
            replica = replicas[kills % REPLICAS]
            kills += 1
            await asyncio.to_thread(replica.kill)
            await asyncio.sleep(DOWN_S)
            await asyncio.to_thread(replica.start)
        await asyncio.gather(*clients)
        await side.router.until_idle()
        after, log_after_kib = await side.router.figures(), await decision_log_kib(side.router)
        waiting = await side.router.metric("waiting_tokens")
        retried = await side.router.metric("retries_total")
    verdict.report("traffic", f"{counts.complete} complete, {counts.incomplete} cut, {counts.errors} failed")
    verdict.report("kills", f"{kills}, {retried:.0f} requests served by a fallback")
    lost = counts.incomplete + counts.errors
    most = (kills + 1) * 2 * CONCURRENCY  # the streams of a killed replica, and what follows before it is known
    verdict.check("lost requests", f"{lost} of at most {most}", lost <= most)
    verdict.check("work left", f"{waiting:.0f} tokens", waiting == 0)
    verdict.report("decision log", f"{log_before_kib:,} KiB after the warm-up, {log_after_kib:,} KiB at the end")
    without_log = before.rss_kib - log_before_kib, after.rss_kib - log_after_kib
    slack = SLACK_KIB + (log_after_kib - log_before_kib) / 2  # the size of a record is a rough estimate
    verdict.check_growth("resident without log", *without_log, slack=slack, unit=" KiB")
    side.router.judge_handles(verdict, before, after)


async def decision_log_kib(router: RouterProcess) -> int:
    """Memory of the decision log, which is bounded and takes longer to fill than a soak."""
    url, after, total = f"http://127.0.0.1:{router.admin_port}/admin/decisions", 0, 0
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(url, params={"after": after, "blocks": 0}) as response:
                page = await response.json()
            if not page["decisions"]:
                return total >> 10
            for row in page["decisions"]:
                total += RECORD_BYTES + 8 * row["block_count"] + CANDIDATE_BYTES * len(row["candidates"])
            after = page["next"]


async def send(port: int, until: float, number: int, counts: Counts) -> None:
    """Send requests, streams and disconnecting streams until a time."""
    chance, prompts = Random(number), fixed_prompts(number)
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < until:
            messages = chance.choice(prompts)
            try:
                if chance.random() < 0.5:
                    await chat(http, port, messages)
                    is_complete = True
                else:
                    disconnects = chance.random() < DISCONNECT_RATIO
                    is_complete = await stream(http, port, messages, disconnects=disconnects)
            except aiohttp.ClientResponseError:
                counts.errors += 1
                await asyncio.sleep(0.1)
            except (aiohttp.ClientError, ValueError):
                counts.incomplete += 1
            else:
                counts.complete += is_complete
                counts.incomplete += not is_complete


def fixed_prompts(seed: int) -> list[Any]:
    """Prompts that recur, so that what the picker remembers of them stops growing in the warm-up."""
    workload, prompts = Conversations(seed), []
    for _ in range(PROMPTS):
        messages = workload.next()
        prompts.append(list(messages))
        workload.on_response(messages, "words of a response")
    return prompts
