"""How many source files one request, one push and one scrape pass through: ``python -m tests.benchmarks files``.

A reader who follows a request has to open these files. Calls and changes of file are counted with ``sys.setprofile``,
in ``routing/`` only; a file counts if each of several runs enters it, because periodic tasks may run in between.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

import aiohttp
import uvloop

import routing
from routing.schema import LowestCostSettings, PolicyConfig, PoolConfig, ReplicaConfig, RouterConfig, dump_snapshot
from routing.server import running
from routing.settings import ServeSettings
from tests.benchmarks.load import SESSIONS
from tests.benchmarks.mock_upstream import PLAIN_RESPONSE
from tests.benchmarks.path import Bench, started_router

LIMITS = {"request": 26, "push": 21, "scrape": 20}  # files
MAX_CALLS = 180  # of a request
COLD_RESPONSE = PLAIN_RESPONSE.replace(b":2032", b":   0")  # to the first prompt of a session
REPEATS = 10
PACKAGE = str(Path(routing.__file__).parent)


class CallPath:
    """Records the file of every call inside the ``with`` block."""

    def __init__(self) -> None:
        self.files: list[str] = []  # of each call, in order

    def __enter__(self) -> Self:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.files.append(frame.f_code.co_filename[len(PACKAGE) + 1 :])

    @property
    def changes(self) -> int:
        """Number of calls that enter another file than the previous call."""
        return sum(file != following for file, following in zip(self.files, self.files[1:], strict=False))


async def request_path() -> CallPath:
    """A plain chat request of a known session through a warm router, from its first byte to its accounting."""
    router = await started_router(LowestCostSettings())
    bench = Bench(router)
    for response in (COLD_RESPONSE, PLAIN_RESPONSE):
        for _ in range(SESSIONS):
            _one_request(bench, response)
    requests = [_one_request(bench) for _ in range(REPEATS)]
    router.deadlines.close()
    return _common(requests)


def _one_request(bench: Bench, response: bytes = PLAIN_RESPONSE) -> CallPath:
    client, data = bench.next_request()
    with CallPath() as path:
        bench.send(client, data).data_received(response)
        bench._flush()
    return path


async def admin_paths() -> dict[str, CallPath]:
    """One accepted configuration and one scrape of ``/metrics``, at a running router's admin port."""
    with tempfile.TemporaryDirectory(prefix="wpb-") as name:
        settings = ServeSettings("bench", None, None, "127.0.0.1", 0, "127.0.0.1", 0, Path(name), None)
        async with running(settings) as server, aiohttp.ClientSession() as http:
            url = server.admin_url
            pushes = [await _push_path(http, url, number) for number in range(1, REPEATS + 1)]
            scrapes = [await _scrape_path(http, url) for _ in range(REPEATS)]
    return {"push": _common(pushes[1:]), "scrape": _common(scrapes)}


def _common(paths: Sequence[CallPath]) -> CallPath:
    """The shortest path, in the files that all of them enter."""
    shortest = min(paths, key=lambda path: len(path.files))
    common = set.intersection(*(set(path.files) for path in paths))
    shortest.files = [file for file in shortest.files if file in common]
    return shortest


async def _push_path(http: aiohttp.ClientSession, url: str, number: int) -> CallPath:
    policy = PolicyConfig(name="bench", revision=number, settings=LowestCostSettings())
    replicas = (ReplicaConfig(name="replica-1", url="http://127.0.0.1:1"),)
    config = RouterConfig(hash_secret="0" * 32, pools=(PoolConfig(name="bench", policy=policy, replicas=replicas),))
    document = dump_snapshot(config, number).document
    with CallPath() as path:
        async with http.put(f"{url}/admin/config", data=document) as response:
            response.raise_for_status()
    return path


async def _scrape_path(http: aiohttp.ClientSession, url: str) -> CallPath:
    with CallPath() as path:
        async with http.get(f"{url}/metrics") as response:
            response.raise_for_status()
    return path


async def paths() -> dict[str, CallPath]:
    """The three paths by name, of the router in plain Python."""
    return {"request": await request_path(), **await admin_paths()}


def main() -> None:
    """Print the table, and each path's files in order of first entry."""
    measured = uvloop.run(paths())
    print("path      files  at most  calls  changes of file")
    for name, path in measured.items():
        print(f"{name:8}  {len(set(path.files)):5}  {LIMITS[name]:7}  {len(path.files):5}  {path.changes:15}")
    for name, path in measured.items():
        print(f"\n{name}: {', '.join(dict.fromkeys(path.files))}")
