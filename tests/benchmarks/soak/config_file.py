"""R2: the last known good configuration, written by processes that are killed at random moments.

Each kill is a SIGKILL of a process that writes one revision after another and reports each one written. The newest
complete file must hold at least the last reported revision, byte for byte. Now and then a real router starts from the
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
from tests.benchmarks.soak.prompts import on_connected, request
from tests.benchmarks.soak.stand import pool_of, started
from tests.benchmarks.soak.verdict import Verdict
from tests.fakes.replica import fake_replicas

SERVES_S = 2.0  # (R2)
MOMENT_S = 0.02  # within which a writer is killed: some writes long
EVERY = 50  # kills, a router is started
NOWHERE = "http://127.0.0.1:9"  # a control plane that is down


class Served(NamedTuple):
    wall_s: float
    cpu_s: float


def write_until_killed(config: RouterConfig, folder: Path, first: int, said: int) -> None:
    """Write revisions, reporting each to a pipe."""
    files = LastKnownGood(folder)
    for revision in range(first, 1 << 30):
        files.save(dump_snapshot(config, revision).document)
        os.write(said, revision.to_bytes(4, "big"))


def kill_a_writer(config: RouterConfig, folder: Path, first: int, after_s: float) -> int:
    """The last revision reported before the kill; ``first - 1`` for none."""
    hears, says = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            write_until_killed(config, folder, first, says)
        finally:
            os._exit(1)
    os.close(says)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(hears, "rb") as pipe:
        heard = pipe.read()
    return int.from_bytes(heard[-4:], "big") if heard else first - 1


def kept(folder: Path) -> LoadedSnapshot | None:
    documents = LastKnownGood(folder).load()
    return load_snapshot(documents[0]) if documents else None


async def measure(verdict: Verdict, kills: int, seed: int) -> None:
    chance, seen, served = random.Random(seed), Counter[str](), list[Served]()
    async with fake_replicas(1) as replicas:
        config = pool_of(replicas)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            revision = 0
            for number in range(kills):
                written = kill_a_writer(config, folder, revision + 1, chance.random() * MOMENT_S)
                found = kept(folder)
                if found is None:
                    seen["nothing yet" if not written else "LOST"] += 1
                    continue
                whole = found.document == dump_snapshot(config, found.revision).document
                seen[_kind(folder, found.revision, written) if whole else "TORN"] += 1
                revision = max(found.revision, written)
                if number % EVERY == EVERY - 1:
                    served.append(await _serves(folder, config, revision + 1, chance))
    lost = {kind for kind in seen if kind.isupper()}
    verdict.holds("writers killed", f"{kills}: {dict(seen)}", not lost)
    if served:
        times_s, longest = sorted(it.wall_s for it in served), max(served)
        took = f"{times_s[len(times_s) // 2]:.2f} s at the median, {longest.wall_s:.2f} at most, of {SERVES_S:g}"
        text = f"{len(served)} routers, first answer after {took}; {longest.cpu_s:.2f} s of it on a core"
        verdict.holds("serves without", text, longest.wall_s <= SERVES_S)


def _kind(folder: Path, found: int, written: int) -> str:
    if found < written:
        return "LOST"
    return "in a write" if list(folder.glob("*.new")) else "between two"


async def _serves(folder: Path, config: RouterConfig, revision: int, chance: random.Random) -> Served:
    """Seconds from a router's start to its first response; then kill it while it accepts a revision."""
    begun = time.perf_counter()
    async with started(("--control-plane", NOWHERE, "--state-dir", str(folder))) as router:
        async with on_connected(router.port) as client:
            status, _ = await client.ask(request(0))
        took = Served(time.perf_counter() - begun if status == 200 else float("inf"), router.cpu_s)
        url = f"http://127.0.0.1:{router.admin_port}/admin/config"
        async with aiohttp.ClientSession() as http:
            pushing = asyncio.create_task(_push(http, url, dump_snapshot(config, revision).document))
            await asyncio.wait([pushing], timeout=chance.random() * MOMENT_S)
            router.popen.kill()
            await pushing
    return took


async def _push(http: aiohttp.ClientSession, url: str, document: bytes) -> None:
    with suppress(aiohttp.ClientError):
        async with http.put(url, data=document):
            pass
