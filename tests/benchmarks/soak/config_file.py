"""The last known good configuration, written by processes that are killed at random moments.

Each kill is a SIGKILL of a process that writes one revision after another and reports each one written. The newest
complete file must hold at least the last reported revision, byte for byte. Sometimes a real router starts from the
remaining files without a control plane: its first response is timed from its start; then it is killed while it
accepts another revision.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import aiohttp

from routing.proxy.config_store import LastKnownGood
from routing.schema import LoadedSnapshot, RouterConfig, dump_snapshot, load_snapshot
from tests.benchmarks.soak.prompts import connected, request
from tests.benchmarks.soak.stand import pool_of, started
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.replica import fake_replicas

SERVES_S = 2.0
KILL_WITHIN_S = 0.02  # the time of a few writes
ROUTER_EVERY = 50  # kills between two starts of a router
NO_CONTROL_PLANE = "http://127.0.0.1:9"  # a control plane that is down


class Served(NamedTuple):
    wall_s: float
    cpu_s: float


def write_until_killed(config: RouterConfig, folder: Path, first: int, pipe: int) -> None:
    """Write revisions, reporting each to a pipe."""
    files = LastKnownGood(folder)
    for revision in range(first, 1 << 30):
        files.save(dump_snapshot(config, revision).document)
        os.write(pipe, revision.to_bytes(4, "big"))


def kill_a_writer(config: RouterConfig, folder: Path, first: int, after_s: float) -> int:
    """The last revision reported before the kill; ``first - 1`` for none."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            write_until_killed(config, folder, first, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(read_end, "rb") as pipe:
        reported = pipe.read()
    return int.from_bytes(reported[-4:], "big") if reported else first - 1


def load_newest(folder: Path) -> LoadedSnapshot | None:
    documents = LastKnownGood(folder).load()
    return load_snapshot(documents[0]) if documents else None


async def measure(verdict: Verdict, kills: int, seed: int) -> None:
    chance, outcomes, served = random.Random(seed), Counter[str](), list[Served]()
    async with fake_replicas(1) as replicas:
        config = pool_of(replicas)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            revision = 0
            for number in range(kills):
                written = kill_a_writer(config, folder, revision + 1, chance.random() * KILL_WITHIN_S)
                loaded = load_newest(folder)
                if loaded is None:
                    outcomes["no file yet" if not written else "LOST"] += 1
                    continue
                is_complete = loaded.document == dump_snapshot(config, loaded.revision).document
                outcomes[_kind(folder, loaded.revision, written) if is_complete else "TORN"] += 1
                revision = max(loaded.revision, written)
                if number % ROUTER_EVERY == ROUTER_EVERY - 1:
                    served.append(await _start_and_kill(folder, config, revision + 1, chance))
    lost = {kind for kind in outcomes if kind.isupper()}
    verdict.check("writers killed", f"{kills}: {dict(outcomes)}", not lost)
    if served:
        times_s, longest = sorted(start.wall_s for start in served), max(served)
        took = f"{times_s[len(times_s) // 2]:.2f} s at the median, {longest.wall_s:.2f} at most, limit {SERVES_S:g}"
        text = f"{len(served)} routers, first response after {took}; {longest.cpu_s:.2f} s of CPU"
        verdict.check("serves without a control plane", text, longest.wall_s <= SERVES_S)


def _kind(folder: Path, loaded: int, written: int) -> str:
    if loaded < written:
        return "LOST"
    return "during a write" if list(folder.glob("*.new")) else "between writes"


async def _start_and_kill(folder: Path, config: RouterConfig, revision: int, chance: random.Random) -> Served:
    """Seconds from a router's start to its first response; then kill it while it accepts a revision."""
    started_at = time.perf_counter()
    async with started(("--control-plane", NO_CONTROL_PLANE, "--state-dir", str(folder))) as router:
        async with connected(router.port) as client:
            status, _ = await client.request(request(0))
        start = Served(time.perf_counter() - started_at if status == 200 else float("inf"), router.cpu_s)
        url = f"http://127.0.0.1:{router.admin_port}/admin/config"
        async with aiohttp.ClientSession() as http:
            pushing = asyncio.create_task(_push(http, url, dump_snapshot(config, revision).document))
            await asyncio.wait([pushing], timeout=chance.random() * KILL_WITHIN_S)
            router.popen.kill()
            await pushing
    return start


async def _push(http: aiohttp.ClientSession, url: str, document: bytes) -> None:
    with suppress(aiohttp.ClientError):
        async with http.put(url, data=document):
            pass
