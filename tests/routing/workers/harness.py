"""Starts routers as processes, and load that notices every lost connection."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from routing.schema import RouterConfig, dump_snapshot
from tests.routing.proxy.harness import BODY, CHAT, RawClient, Response, connect, post

DEADLINE_S = 60.0
EXPLAIN = {"path": "/v1/completions", "body": {"prompt": "Say something."}}  # what /admin/explain is asked
_ready = re.compile(r" is ready: https?://[\d.]+:(\d+) \(admin (http://[\d.:]+)")


class Process:
    """A running ``python -m routing serve``."""

    def __init__(self, process: asyncio.subprocess.Process, http: aiohttp.ClientSession) -> None:
        self.process = process
        self.http = http
        self.lines: list[str] = []
        self.port = 0
        self.admin_url = ""
        self._has_ended = False
        self._arrived = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr
        async for line in self.process.stderr:
            self.lines.append(line.decode())
            async with self._arrived:
                self._arrived.notify_all()
        self._has_ended = True
        async with self._arrived:
            self._arrived.notify_all()

    async def line(self, part: str, count: int = 1) -> str:
        """Wait for ``count`` log lines that contain ``part``; the last of them."""
        try:
            async with asyncio.timeout(DEADLINE_S), self._arrived:
                await self._arrived.wait_for(lambda: self._has_ended or self._count(part) >= count)
        except TimeoutError:
            pass
        assert self._count(part) >= count, f"no {part!r} in\n" + "".join(self.lines)
        return [line for line in self.lines if part in line][count - 1]

    def _count(self, part: str) -> int:
        return sum(part in line for line in self.lines)

    async def ready(self) -> None:
        found = _ready.search(await self.line(" is ready: "))
        assert found
        self.port, self.admin_url = int(found[1]), found[2]

    @property
    def workers(self) -> list[int]:
        """Process ids of the workers; an exited one stays until its parent reaps it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children]

    async def admin(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with asyncio.timeout(DEADLINE_S), self.http.request(method, self.admin_url + path, **options) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def push(self, config: RouterConfig, revision: int) -> tuple[int, Any]:
        return await self.admin("PUT", "/admin/config", data=dump_snapshot(config, revision).document)

    async def chat(self, body: bytes = BODY, headers: Sequence[bytes] = ()) -> Response:
        """One request on a connection of its own."""
        async with connect(self.port) as client:
            return await client.ask(post(CHAT, body, headers))

    async def until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not await holds():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"waited {DEADLINE_S} s for {what}\n" + "".join(self.lines)) from None

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE_S):
            status = await self.process.wait()
            await self._reading
        return status


@asynccontextmanager
async def serving(*what: Any, **options: Any) -> AsyncIterator[Process]:
    """A ready router until the block ends; arguments as of ``begun``."""
    async with begun(*what, **options) as running:
        await running.ready()
        yield running


@asynccontextmanager
async def begun(
    folder: Path,
    config: RouterConfig | None,
    *options: str,
    revision: int = 1,
    port: int = 0,
    name: str = "tested",
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    open_files: int | None = None,
    subcommand: str = "serve",
) -> AsyncIterator[Process]:
    """A starting router with these options; ``environment`` and ``cwd`` default to this process's.

    ``open_files``: the process may raise its limit no further.
    """
    source = ["--control-plane=http://127.0.0.1:9"]
    if config is not None:
        file = folder / f"{name}.json"
        file.write_bytes(dump_snapshot(config, revision).document)
        source = [f"--config={file}"]
    ports = [f"--port={port}", "--admin-port=0", "--host=127.0.0.1", "--admin-host=127.0.0.1"]
    where = [f"--name={name}", f"--state-dir={folder / name}"]
    command = [python, "-m", "routing", subcommand, *source, *ports, *where, *options]
    if open_files is not None:
        command = ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh", *command]
    stderr = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stderr=stderr, env=environment, cwd=cwd)
    async with aiohttp.ClientSession() as http:
        running = Process(process, http)
        try:
            yield running
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await asyncio.wait([running._reading], timeout=DEADLINE_S)


def worker_of(answer: Response) -> str:
    """The worker that responded, by the prefix of its request ids."""
    return answer.headers["x-request-id"].partition("-")[0]


class Load:
    """Clients that count the outcomes of their requests.

    They open a connection for each request, or keep one until the router closes it.
    """

    def __init__(self, router: Process, clients: int = 4, *, keep: bool = False) -> None:
        self.clients = clients
        self.outcomes: Counter[str] = Counter()
        self.seen_workers: set[str] = set()
        self._router = router
        self._is_over = False
        self._keep = keep
        self._tasks = [asyncio.create_task(self._keep_asking()) for _ in range(clients)]

    async def _keep_asking(self) -> None:
        while not self._is_over:
            try:
                async with connect(self._router.port) as client:
                    await self._ask(client)
            except (OSError, asyncio.IncompleteReadError) as error:
                self.outcomes[type(error).__name__] += 1

    async def _ask(self, client: RawClient) -> None:
        """One request, or as many as the connection allows."""
        while not self._is_over:
            answer = await client.ask(post(CHAT))
            self.outcomes[str(answer.status)] += 1
            self.seen_workers.add(worker_of(answer))
            if not self._keep or answer.headers.get("connection") == "close":
                return

    async def more(self, count: int = 200) -> None:
        """Wait until so many further requests have ended."""
        wanted = self.outcomes.total() + count
        async with asyncio.timeout(DEADLINE_S):
            while self.outcomes.total() < wanted:
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._is_over = True
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self._tasks)


@asynccontextmanager
async def loaded(router: Process, clients: int = 4, *, keep: bool = False) -> AsyncIterator[Load]:
    load = Load(router, clients, keep=keep)
    await load.more(20)
    try:
        yield load
    finally:
        await load.stop()
