"""A router in a process of its own, and what it takes: memory, open files, tasks."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

import aiohttp

from routing.schema import (
    BreakerConfig,
    ConcurrencyConfig,
    HealthCheck,
    Limits,
    LowestCostSettings,
    PolicyConfig,
    PoolConfig,
    ReplicaConfig,
    RouterConfig,
    Settings,
    dump_snapshot,
)
from tests.benchmarks.soak.verdict import SLACK, Verdict

READY = re.compile(r"is ready: http://127\.0\.0\.1:(\d+) \(admin http://127\.0\.0\.1:(\d+)")
START_S = 20.0


class Named(Protocol):
    """A replica."""

    name: str

    @property
    def url(self) -> str:
        """Where it listens."""
        ...


class Figures(NamedTuple):
    """What a process takes at a moment."""

    rss_kib: int
    fds: int
    tasks: int


class RouterProcess:
    """A running router."""

    def __init__(self, popen: subprocess.Popen[str], port: int, admin_port: int) -> None:
        self.port = port
        self.admin_port = admin_port
        self.popen = popen
        self.proc = Path(f"/proc/{popen.pid}")

    @property
    def rss_kib(self) -> int:
        """Resident memory."""
        return resident_kib(self.proc)

    @property
    def fds(self) -> int:
        """Open files, sockets among them."""
        return len(list((self.proc / "fd").iterdir()))

    @property
    def cpu_s(self) -> float:
        """What it has taken of a core."""
        fields = (self.proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        url = f"http://127.0.0.1:{self.admin_port}/metrics"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            text = await response.text()
        found = re.findall(rf"^warmpath_router_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    async def figures(self) -> Figures:
        """What it takes now; of memory the median of some looks."""
        looks = []
        for _ in range(5):
            looks.append(self.rss_kib)
            await asyncio.sleep(0.05)
        return Figures(int(median(looks)), self.fds, int(await self.metric("tasks")))

    async def at_rest(self, within_s: float = 30.0) -> None:
        """Wait until no request is under way."""
        async with asyncio.timeout(within_s):
            while await self.metric("in_flight"):
                await asyncio.sleep(0.05)

    def judge(self, verdict: Verdict, before: Figures, after: Figures) -> None:
        """Memory, files and tasks have not grown."""
        verdict.memory(before.rss_kib, after.rss_kib)
        verdict.flat("open files", before.fds, after.fds, slack=SLACK)
        verdict.flat("tasks", before.tasks, after.tasks, slack=SLACK)


def resident_kib(proc: Path = Path("/proc/self")) -> int:
    """A process's resident memory."""
    found = re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())
    return int(found[1]) if found else 0


def pool_of(
    replicas: Iterable[Named],
    *,
    settings: Settings | None = None,
    breaker: BreakerConfig | None = None,
    health: HealthCheck | None = None,
    concurrency: ConcurrencyConfig | None = None,
    limits: Limits | None = None,
) -> RouterConfig:
    """One pool of these replicas."""
    pool = PoolConfig(
        name="soak",
        policy=PolicyConfig(name="soak", revision=1, settings=settings or LowestCostSettings()),
        replicas=tuple(ReplicaConfig(name=it.name, url=it.url) for it in replicas),
        breaker=breaker or BreakerConfig(),
        health=health or HealthCheck(interval_s=0.5),
        concurrency=concurrency,
    )
    return RouterConfig(hash_secret="0" * 32, pools=(pool,), limits=limits or Limits())


@asynccontextmanager
async def router_process(config: RouterConfig | None, *options: str) -> AsyncIterator[RouterProcess]:
    """A router that serves this configuration; without one, ``options`` must say where it comes from."""
    with tempfile.TemporaryDirectory() as folder:
        if config is not None:
            file = Path(folder) / "config.json"
            file.write_bytes(dump_snapshot(config, 1).document)
            options = ("--config", str(file), "--state-dir", folder, *options)
        async with started(options) as router:
            yield router


@asynccontextmanager
async def started(options: Sequence[str]) -> AsyncIterator[RouterProcess]:
    """``python -m routing serve`` with these options, until the end of the block."""
    command = [sys.executable, "-m", "routing", "serve", "--port=0", "--admin-port=0", *options]
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    drinking = None
    try:
        async with asyncio.timeout(START_S):
            port, admin_port = await asyncio.to_thread(_ports, popen)
        drinking = asyncio.create_task(asyncio.to_thread(_drink, popen))
        yield RouterProcess(popen, port, admin_port)
    finally:
        popen.kill()
        popen.wait()
        if drinking is not None:
            await asyncio.wait([drinking], timeout=10)
        if popen.stderr:
            popen.stderr.close()


def _ports(popen: subprocess.Popen[str]) -> tuple[int, int]:
    assert popen.stderr
    for line in popen.stderr:
        if found := READY.search(line):
            return int(found[1]), int(found[2])
    raise RuntimeError("the router did not start")


def _drink(popen: subprocess.Popen[str]) -> None:
    """Read its log, so that it can go on writing."""
    assert popen.stderr
    for _ in popen.stderr:
        pass


def allow_files(count: int) -> None:
    """Let this process and those it starts have so many files open; ValueError where the system does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
