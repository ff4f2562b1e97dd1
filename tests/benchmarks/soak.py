"""Failures for as long as you like: ``python -m tests.benchmarks soak --seconds 7200``, three minutes unless said.

A router in a process of its own, four replicas in this one, 100 streams a second. All the time one replica after the
other hangs, dies with what it holds, or is behind a network that cuts and tears; every tenth client goes away in the
middle. Each stream is checked byte by byte. Once a second memory and open files are read; what they were after a
quarter of the time is compared with the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import uvloop

from routing.schema import (
    BreakerConfig,
    HealthCheck,
    Limits,
    LowestCostSettings,
    PolicyConfig,
    PoolConfig,
    ReplicaConfig,
    RouterConfig,
    dump_snapshot,
)
from tests.fakes.fault_proxy import Fault, FaultProxy
from tests.fakes.replica import LAST_CHUNK, STREAM_HEAD, Call, FakeReplica, Script, chunk, sse

REPLICAS = 4
RATE = 100  # streams a second
EVENTS = 20
SICK_S, WELL_S = 6.0, 6.0  # how long a replica is sick, and all are well after it
ILLNESSES = ("hang", "kill", "cut")
CUT = (Fault.RESET, Fault.CLOSE, Fault.DELAY, Fault.TEAR, Fault.REFUSE)
PROMPT = "Say something that nobody has said before. " * 40


class Soak:
    """One run."""

    def __init__(self, port: int, proc: Path) -> None:
        self.seen: Counter[str] = Counter()  # what became of streams
        self.slow: list[float] = []  # seconds to the first byte, of those over one
        self.figures: list[tuple[int, int]] = []  # KiB resident, open files
        self._port = port
        self._proc = proc
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float, chance: random.Random) -> None:
        loop = asyncio.get_running_loop()
        begun, looked = loop.time(), 0.0
        for number in range(int(seconds * RATE)):
            await asyncio.sleep(max(0.0, begun + number / RATE - loop.time()))
            task = asyncio.create_task(self._ask(number, leaves=chance.random() < 0.1))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if loop.time() - looked > 1.0:
                looked = loop.time()
                self.figures.append((_resident_kib(self._proc), len(list((self._proc / "fd").iterdir()))))
        await asyncio.wait(self._tasks, timeout=90)
        self.seen["never ended"] = len(self._tasks)

    async def _ask(self, number: int, *, leaves: bool) -> None:
        begun = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            self.seen["not connected"] += 1
            return
        try:
            writer.write(_request(number))
            head = await reader.readuntil(b"\r\n\r\n")
            if (waited := time.perf_counter() - begun) > 1.0:
                self.slow.append(waited)
            if leaves:
                self.seen["left"] += 1
                return
            self.seen[_verdict(head, await reader.read(-1), number)] += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            self.seen["no answer"] += 1
        finally:
            writer.transport.abort()


class Ward:
    """The replicas, and their illnesses, one after the other."""

    def __init__(self, chance: random.Random) -> None:
        self.replicas = [FakeReplica(f"replica-{number}", self._stream) for number in range(REPLICAS)]
        self.relays = [
            FaultProxy(it, number, [Fault.NONE], 4000, again=True) for number, it in enumerate(self.replicas)
        ]
        self.illnesses: Counter[str] = Counter()
        self._chance = chance
        self._runs = {replica.name: asyncio.Event() for replica in self.replicas}

    async def open(self) -> None:
        for replica, relay in zip(self.replicas, self.relays, strict=True):
            self._runs[replica.name].set()
            replica.script = self._script(replica)
            await replica.start()
            await relay.start()

    async def sicken(self) -> None:
        while True:
            place, illness = self._chance.randrange(REPLICAS), self._chance.choice(ILLNESSES)
            replica, relay = self.replicas[place], self.relays[place]
            self.illnesses[illness] += 1
            if illness == "hang":
                self._runs[replica.name].clear()
            elif illness == "kill":
                replica.kill()
            else:
                relay.faults = list(CUT)
            await asyncio.sleep(SICK_S)
            relay.faults = [Fault.NONE]
            self._runs[replica.name].set()
            if illness == "kill":
                await replica.start()
            await asyncio.sleep(WELL_S)

    def _script(self, replica: FakeReplica) -> Script:
        async def script(call: Call) -> None:
            replica.calls.clear()  # or this process grows instead
            await self._stream(call, self._runs[replica.name])

        return script

    async def _stream(self, call: Call, runs: asyncio.Event | None = None) -> None:
        await call.send(STREAM_HEAD)
        for event in _events(int(json.loads(call.body)["user"])):
            if runs is not None:
                await runs.wait()
            await asyncio.sleep(0.01)
            if call.writer.is_closing():
                return
            await call.send(chunk(event))
        await call.send(LAST_CHUNK)


def _events(number: int) -> list[bytes]:
    return [sse({"of": number, "event": event}) for event in range(EVENTS)]


def _request(number: int) -> bytes:
    messages = [{"role": "user", "content": f"{number} {PROMPT}"}]  # every prompt a new one
    body = json.dumps({"model": "tiny", "stream": True, "user": str(number), "messages": messages}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def _verdict(head: bytes, framed: bytes, number: int) -> str:
    """``whole``, ``cut`` as promised, a status, or ``WRONG``."""
    status = head.split(b" ", 2)[1].decode()
    if status != "200":
        return f"status {status}"
    body = _unchunked(framed)
    whole = b"".join(_events(number))
    if body == whole:
        return "whole"
    part, mark, _ = body.partition(b'data: {"error"')
    return "cut" if mark and whole.startswith(part.removesuffix(b"\n\n")) else "WRONG"


def _unchunked(framed: bytes) -> bytes:
    body, at = b"", 0
    while (end := framed.find(b"\r\n", at)) > 0 and (size := int(framed[at:end], 16)):
        body += framed[end + 2 : end + 2 + size]
        at = end + 4 + size
    return body


def _resident_kib(proc: Path) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())
    return int(found[1]) if found else 0


def _config(ward: Ward) -> RouterConfig:
    members = tuple(ReplicaConfig(name=it.name, url=it.url) for it in ward.relays)
    policy = PolicyConfig(name="soak", revision=1, settings=LowestCostSettings())
    breaker = BreakerConfig(open_s=3.0, slow_start_s=3.0)
    pool = PoolConfig(name="soak", policy=policy, replicas=members, health=HealthCheck(interval_s=0.5), breaker=breaker)
    return RouterConfig(hash_secret="0" * 32, pools=(pool,), limits=Limits(idle_timeout_s=20.0))


async def measure(seconds: float, seed: int) -> int:
    """Run, print, and say whether anything was wrong: 1 if so."""
    ward = Ward(random.Random(seed))
    await ward.open()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_bytes(dump_snapshot(_config(ward), 1).document)
        command = [sys.executable, "-m", "routing", "serve", "--port=0", "--admin-port=0", "--config", str(file)]
        router = subprocess.Popen([*command, "--state-dir", folder], stderr=subprocess.PIPE, text=True)
        try:
            port = await asyncio.to_thread(_port, router)
            drinking = asyncio.create_task(asyncio.to_thread(_drink, router))
            soak = Soak(port, Path(f"/proc/{router.pid}"))
            sickening = asyncio.create_task(ward.sicken())
            await soak.run(seconds, random.Random(seed + 1))
            sickening.cancel()
        finally:
            router.terminate()
            await asyncio.wait([drinking], timeout=40)
            router.kill()
            router.wait()
    return _report(soak, ward)


def _report(soak: Soak, ward: Ward) -> int:
    quarter, end = soak.figures[len(soak.figures) // 4], soak.figures[-1]
    print(f"illnesses   {dict(ward.illnesses)}")
    print(f"streams     {dict(soak.seen)}")
    print(
        f"slow        {len(soak.slow)} waited over 1 s for a first byte, the longest {max(soak.slow, default=0):.1f} s"
    )
    print(
        f"resident    {quarter[0]} KiB after a quarter, {end[0]} at the end: {100 * (end[0] / quarter[0] - 1):+.1f} %"
    )
    print(f"open files  {quarter[1]} after a quarter, {end[1]} at the end, at most {max(it[1] for it in soak.figures)}")
    wrong = sum(count for what, count in soak.seen.items() if what not in {"whole", "cut", "left"})
    print(f"wrong       {wrong}")
    return 1 if wrong else 0


def _port(router: subprocess.Popen[str]) -> int:
    assert router.stderr
    for line in router.stderr:
        if " is ready: http://127.0.0.1:" in line:
            return int(line.split("http://127.0.0.1:")[1].split()[0])
    raise RuntimeError("the router did not start")


def _drink(router: subprocess.Popen[str]) -> None:
    """Read its log, so that it can go on writing."""
    assert router.stderr
    for _ in router.stderr:
        pass


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks soak")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long to go on (default: 180)")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    if uvloop.run(measure(given.seconds, given.seed)):
        sys.exit(1)
