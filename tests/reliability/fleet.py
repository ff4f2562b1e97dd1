"""Sixteen real routers in this process, each with its own sockets and folder, reached through fault proxies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from controlplane.models import Router
from controlplane.push.client import Signature
from controlplane.services.routers import announce
from routing.server import Server, running
from routing.settings import read_settings
from tests.fakes.fault_proxy import Fault, FaultProxy

TOKEN, KEYS = "WARMPATH_ROUTER_ADMIN_TOKEN", "WARMPATH_ROUTER_CONFIG_KEYS"


@dataclass(frozen=True)
class ReachableRouter:
    """A router and its announced address."""

    server: Server
    proxy: FaultProxy

    @property
    def name(self) -> str:
        return self.server.settings.name

    @property
    def revision(self) -> int | None:
        """The revision of the configuration that the router runs."""
        return self.server.data.view.store.revision

    def announce(self) -> Router:
        """Announce the router at the proxy's address."""
        view = self.server.data.view
        applied = view.store.applied
        return announce(
            name=self.name,
            boot=view.boot,
            admin_url=self.proxy.url,
            revision=applied.snapshot.revision if applied else None,
            sha256=applied.snapshot.sha256 if applied else None,
            signature=Signature(**state) if (state := view.store.signature) else None,
        )

    def put(self, document: bytes) -> httpx.Response:
        """Push a document to the router's admin port."""
        headers = {"Authorization": f"Bearer {self.server.settings.admin_token}"}
        url = f"http://127.0.0.1:{self.proxy._replica.port}/admin/config"
        return httpx.put(url, content=document, headers=headers, timeout=30, trust_env=False)


@contextmanager
def fleet(
    folder: Path,
    count: int,
    token: str,
    *,
    faults: Sequence[Fault] = (Fault.NONE,),
    seed: int = 1,
    keys: str = "",
) -> Iterator[list[ReachableRouter]]:
    """Routers on an event loop in a thread, for the length of a block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = AsyncExitStack()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout=60)

    try:
        yield [
            run(_start(stack, folder / f"router-{n:02}", {TOKEN: token, KEYS: keys}, list(faults), seed + n))
            for n in range(count)
        ]
    finally:
        run(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
        loop.close()


async def _start(
    stack: AsyncExitStack, folder: Path, environment: dict[str, str], faults: list[Fault], seed: int
) -> ReachableRouter:
    options = ["--name", folder.name, "--port", "0", "--admin-port", "0", "--state-dir", str(folder)]
    settings = read_settings([*options, "--control-plane", "http://127.0.0.1:9"], environment)
    server = await stack.enter_async_context(running(settings))
    target = SimpleNamespace(name=settings.name, port=server._admin.port)
    proxy = FaultProxy(target, seed, faults, 300, again=False)  # a fault may begin at any byte of an acknowledgement
    await proxy.start()
    stack.push_async_callback(proxy.stop)
    return ReachableRouter(server, proxy)
