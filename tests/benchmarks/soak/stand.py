"""A router process and its memory, open files and tasks."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
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
    name: str

    @property
    def url(self) -> str: ...


class Figures(NamedTuple):
    rss_kib: int
    fds: int
    tasks: int


class RouterProcess:
    def __init__(self, popen: subprocess.Popen[str], port: int, admin_port: int) -> None:
        self.port = port
        self.admin_port = admin_port
        self.popen = popen
        self.log = deque[str](maxlen=1000)  # the latest lines
        self.proc = Path(f"/proc/{popen.pid}")

    @property
    def rss_kib(self) -> int:
        return resident_kib(self.proc)

    @property
    def fds(self) -> int:
        return len(list((self.proc / "fd").iterdir()))

    @property
    def cpu_s(self) -> float:
        fields = (self.proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def metric(self, name: str) -> float:
        return (await self.counts(name)).total()

    async def counts(self, name: str, label: str = "") -> Counter[str]:
        """The values of a metric by a label."""
        url = f"http://127.0.0.1:{self.admin_port}/metrics"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            text = await response.text()
        counts = Counter[str]()
        for labels, value in re.findall(rf"^warmpath_router_{name}({{[^}}]*}})? (\S+)$", text, re.MULTILINE):
            counts[dict(re.findall(r'(\w+)="([^"]*)"', labels)).get(label, "")] += float(value)
        return counts

    async def figures(self) -> Figures:
        """Current resource use; memory is the median of several samples."""
        samples = []
        for _ in range(5):
            samples.append(self.rss_kib)
            await asyncio.sleep(0.05)
        return Figures(int(median(samples)), self.fds, int(await self.metric("tasks")))

    async def until_idle(self, within_s: float = 30.0) -> None:
        async with asyncio.timeout(within_s):
            while await self.metric("in_flight"):
                await asyncio.sleep(0.05)

    def judge(self, verdict: Verdict, before: Figures, after: Figures) -> None:
        verdict.check_memory(before.rss_kib, after.rss_kib)
        self.judge_handles(verdict, before, after)

    def judge_handles(self, verdict: Verdict, before: Figures, after: Figures) -> None:
        """Check that open files and tasks did not grow."""
        verdict.check_growth("open files", before.fds, after.fds, slack=SLACK)
        verdict.check_growth("tasks", before.tasks, after.tasks, slack=SLACK)


def resident_kib(proc: Path = Path("/proc/self")) -> int:
    match = re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())
    return int(match[1]) if match else 0


def pool_of(
    replicas: Iterable[Named],
    *,
    settings: Settings | None = None,
    breaker: BreakerConfig | None = None,
    health: HealthCheck | None = None,
    concurrency: ConcurrencyConfig | None = None,
    limits: Limits | None = None,
) -> RouterConfig:
    pool = PoolConfig(
        name="soak",
        policy=PolicyConfig(name="soak", revision=1, settings=settings or LowestCostSettings()),
        replicas=tuple(ReplicaConfig(name=replica.name, url=replica.url) for replica in replicas),
        breaker=breaker or BreakerConfig(),
        health=health or HealthCheck(interval_s=0.5),
        concurrency=concurrency,
    )
    return RouterConfig(hash_secret="0" * 32, pools=(pool,), limits=limits or Limits())


@asynccontextmanager
async def router_process(
    config: RouterConfig | None, *options: str, command: str = "serve", environment: Mapping[str, str] = os.environ
) -> AsyncIterator[RouterProcess]:
    """A router (``command``: or a picker) with this configuration; without one, ``options`` must name its source."""
    with tempfile.TemporaryDirectory() as folder:
        if config is not None:
            file = Path(folder) / "config.json"
            file.write_bytes(dump_snapshot(config, 1).document)
            options = ("--config", str(file), "--state-dir", folder, *options)
        async with started(options, command, environment) as router:
            yield router


@asynccontextmanager
async def started(
    options: Sequence[str], command: str = "serve", environment: Mapping[str, str] = os.environ
) -> AsyncIterator[RouterProcess]:
    """Run ``python -m routing serve`` or ``picker`` for the length of a block."""
    arguments = [sys.executable, "-m", "routing", command, "--port=0", "--admin-port=0", *options]
    popen = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment)
    draining = None
    try:
        async with asyncio.timeout(START_S):
            port, admin_port = await asyncio.to_thread(_ports, popen)
        router = RouterProcess(popen, port, admin_port)
        draining = asyncio.create_task(asyncio.to_thread(_drain_log, router))
        yield router
    finally:
        popen.kill()
        popen.wait()
        if draining is not None:
            await asyncio.wait([draining], timeout=10)
        if popen.stderr:
            popen.stderr.close()


def _ports(popen: subprocess.Popen[str]) -> tuple[int, int]:
    assert popen.stderr
    for line in popen.stderr:
        if found := READY.search(line):
            return int(found[1]), int(found[2])
    raise RuntimeError("the router did not start")


def _drain_log(router: RouterProcess) -> None:
    """Read the router's log, so that its pipe never fills up."""
    assert router.popen.stderr
    for line in router.popen.stderr:
        router.log.append(line)


def allow_files(count: int) -> None:
    """Raise the limit of open files; ValueError if the system does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
