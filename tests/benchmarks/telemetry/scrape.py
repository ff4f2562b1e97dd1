"""1,000 replicas every 10 s by one worker on one core: cost per scrape and regularity."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.benchmarks.telemetry.stand import Stand, stand_in_replicas

REPLICAS = 1000
INTERVAL_S = 10
TICKS = 4  # measured, after the warm-up of the worker
JITTER_GOAL = 0.10  # of the interval
CACHE = {"block_tokens": 32, "capacity_blocks": 2048}  # as the replicas report it, so that no scrape changes it


@dataclass(frozen=True, slots=True)
class Measured:
    cpu_s: float  # of the worker, all of it
    wall_s: float
    scrapes: int
    jitters: list[float]  # |time between two scrapes of a replica - interval| / interval, ascending
    missed: int
    failures: int
    worker_mb: float  # with beat, shared pages divided
    broker_mb: float  # all that the broker holds
    broker_peak_mb: float


def main(stand: Stand) -> None:
    with stand_in_replicas() as port:
        _fleet(port)
        measured = _measure(stand, port)
    print("\n".join(table(measured)))


def table(measured: Measured) -> list[str]:
    jitters = measured.jitters
    p50, p99, maximum = (jitters[min(len(jitters) - 1, int(q * len(jitters)))] for q in (0.5, 0.99, 1.0))
    core = measured.cpu_s / measured.wall_s
    each_ms = 1000 * measured.cpu_s / max(measured.scrapes, 1)
    return [
        f"{REPLICAS} replicas (64 kB each) every {INTERVAL_S} s, one worker on one core, {measured.wall_s:.0f} s",
        f"  worker, all its tasks     {each_ms:5.2f} ms of CPU per scrape, {100 * core:4.0f} % of a core",
        f"  jitter of a replica       p50 {p50:6.1%}  p99 {p99:6.1%}  max {maximum:6.1%}  goal under {JITTER_GOAL:.0%}",
        f"  ticks missed {measured.missed}, scrapes failed {measured.failures}, scrapes {measured.scrapes}",
        f"  memory: worker and beat {measured.worker_mb:.0f} MB, broker {measured.broker_mb:.1f} MB"
        f" (peak {measured.broker_peak_mb:.1f})",
    ]


def _measure(stand: Stand, port: int) -> Measured:
    with _worker(stand) as worker:
        _until(lambda: _min_scrapes(port) >= 2, 60)
        before, cpu_s, started = _arrivals(port), _cpu_s(worker), time.monotonic()
        time.sleep(TICKS * INTERVAL_S)
        after, cpu_s, wall_s = _arrivals(port), _cpu_s(worker) - cpu_s, time.monotonic() - started
        memory = (_memory_mb(worker), *_broker_mb(stand))
    from telemetry.models import Reading, ScrapeShard

    measured = {address: times[len(before[address]) - 1 :] for address, times in after.items()}
    return Measured(
        cpu_s,
        wall_s,
        sum(len(times) - 1 for times in measured.values()),
        sorted(abs(b - a - INTERVAL_S) / INTERVAL_S for times in measured.values() for a, b in pairwise(times)),
        sum(ScrapeShard.objects.values_list("missed", flat=True)),
        Reading.objects.filter(state="stale").count(),
        *memory,
    )


def _fleet(port: int) -> None:
    from controlplane.models import Pool, Replica
    from controlplane.services.fleet.pools import create_pool

    create_pool("default")
    pool = Pool.objects.get()
    Replica.objects.bulk_create(
        Replica(pool=pool, name=f"r{n}", url=f"http://127.0.{1 + n // 250}.{1 + n % 250}:{port}", **CACHE)
        for n in range(REPLICAS)
    )


@contextmanager
def _worker(stand: Stand) -> Iterator[int]:
    """``make run``'s worker on the first available core; its pid."""
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "celery", "--quiet", "-A", "controlplane.celery", "worker", "--beat"]
    command += [
        "--pool",
        "threads",
        "--concurrency",
        "8",
        "--without-gossip",
        "--without-mingle",
        "--loglevel",
        "ERROR",
    ]
    command += ["--schedule", str(stand.folder / "schedule")]
    own = {"WARMPATH_SCRAPE_INTERVAL_S": str(INTERVAL_S), "PYTHONWARNINGS": "ignore"}
    environment = {**os.environ, **stand.environment, **own}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    os.sched_setaffinity(process.pid, {core})  # before it has threads or children, which inherit it
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cpu_s(group: int) -> float:
    """CPU of the worker and its beat process."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory_mb(group: int) -> float:
    """Memory of the worker and its beat process: pages of several processes are divided among them."""
    kilobytes = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                rollup = (stat.parent / "smaps_rollup").read_text()
                kilobytes += int(rollup.partition("\nPss:")[2].split()[0])
    return kilobytes / 1000


def _broker_mb(stand: Stand) -> tuple[float, float]:
    """Memory of the broker's data and buffers, now and at most."""
    from redis import Redis

    with Redis(unix_socket_path=str(stand.folder / "valkey" / "socket")) as broker:
        info = broker.info("memory")
    return info["used_memory"] / 1e6, info["used_memory_peak"] / 1e6


def _arrivals(port: int) -> dict[str, list[float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/arrivals", timeout=20) as response:
        arrivals: dict[str, list[float]] = json.load(response)
        return arrivals


def _min_scrapes(port: int) -> int:
    arrivals = _arrivals(port)
    return min(map(len, arrivals.values())) if len(arrivals) == REPLICAS else 0


def _until(condition, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the worker scraped nothing")
        time.sleep(0.5)
