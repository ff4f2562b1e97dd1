"""A router process from start to end: bind, serve, drain.

It is ready once it has a configuration and both ports. The first SIGTERM or SIGINT turns readiness off, closes the
data port to new connections and lets running answers finish, up to the configured limit; a second one ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import uvloop
from aiohttp import web

from routing import __version__
from routing.proxy.admin import Admin
from routing.proxy.announce import Announcement, keep_announcing
from routing.proxy.client import Client
from routing.proxy.config_store import NackError
from routing.proxy.last_known_good import LastKnownGood
from routing.proxy.log import event, log_to_stderr
from routing.proxy.router import Router
from routing.proxy.view import RouterView
from routing.settings import ServeSettings, SettingsError, read_settings

BACKLOG = 2048  # connections that the kernel may hold until they are accepted

logger = logging.getLogger(__name__)


class Server:
    """A router with its two ports open."""

    def __init__(self, settings: ServeSettings, router: Router) -> None:
        self.settings = settings
        self.router = router
        self.data_port = self.admin_port = 0  # the real ones, once open
        self._data: asyncio.Server | None = None
        self._admin: web.AppRunner | None = None

    async def open(self) -> None:
        """Bind both ports; OSError where one is taken."""
        settings, router = self.settings, self.router
        app = Admin(RouterView(router, __version__)).application(settings.admin_token)
        self._admin = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._admin.setup()
        await web.TCPSite(self._admin, settings.admin_host, settings.admin_port).start()
        self.admin_port = self._admin.addresses[0][1]
        self._data = await router.loop.create_server(
            lambda: Client(router), settings.host, settings.port, backlog=BACKLOG
        )
        self.data_port = self._data.sockets[0].getsockname()[1]

    @property
    def data_url(self) -> str:
        """Where clients send requests."""
        return _url(self.settings.host, self.data_port)

    @property
    def admin_url(self) -> str:
        """Where the control plane sends configurations."""
        return _url(self.settings.admin_host, self.admin_port)

    async def drain(self) -> None:
        """Accept nothing more, and let what runs finish."""
        event(logger, "draining", in_flight=self.router.in_flight, limit_s=self.router.limits.drain_timeout_s)
        if self._data is not None:
            self._data.close()
        await self.router.drain()

    async def close(self) -> None:
        """End everything that is left."""
        if self._data is not None:
            self._data.close()
        self.router.close()
        if self._admin is not None:
            await self._admin.cleanup()


@asynccontextmanager
async def running(settings: ServeSettings) -> AsyncIterator[Server]:
    """A server that has loaded what configuration it can and has opened its ports."""
    router = Router(settings.name, LastKnownGood(settings.state_dir))
    server = Server(settings, router)
    announcing: asyncio.Task[None] | None = None
    try:
        document = await asyncio.to_thread(_document, settings.config_file)
        await router.store.start(document)
        await server.open()
        if settings.control_plane_url:
            what = Announcement(
                settings.control_plane_url, server.admin_url, server.data_url, __version__, settings.admin_token
            )
            announcing = asyncio.create_task(keep_announcing(router, what))
        yield server
    finally:
        if announcing is not None:
            announcing.cancel()
            with suppress(asyncio.CancelledError):
                await announcing
        await server.close()


def spare_the_collector() -> None:
    """Let requests be freed by their reference counts: they form no cycles worth looking for every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


async def serve(settings: ServeSettings) -> None:
    """Run until a signal says otherwise."""
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    async with running(settings) as server:
        spare_the_collector()
        _say_ready(server)
        await stop.wait()
        waits = {asyncio.create_task(server.drain()), asyncio.create_task(stop_now.wait())}
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
    event(logger, "stopped")


def main(argv: Sequence[str]) -> int:
    """The ``serve`` command; 2 if it was asked for something that cannot be."""
    log_to_stderr()
    try:
        settings = read_settings(argv)
        uvloop.run(serve(settings))
    except (SettingsError, NackError) as error:
        path = f"{error.path}: " if isinstance(error, NackError) else ""
        sys.stderr.write(f"warmpath router: {path}{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"warmpath router: {error}\n")
        return 1
    return 0


def _document(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


def _say_ready(server: Server) -> None:
    revision = server.router.store.revision
    state = "no configuration yet" if revision is None else f"revision {revision}"
    line = f"Router {server.settings.name} is ready: {server.data_url} (admin {server.admin_url}, {state})"
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
