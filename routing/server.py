"""A router from start to end: binds, serves and drains; in one process, or as the parent of several.

It is ready once it has a configuration and both ports. The first SIGTERM or SIGINT turns readiness off, closes the data
port to new connections and waits for requests in flight, up to the configured limit. A second signal, or one before the
router is ready, stops it immediately. SIGHUP replaces the workers one after the other; a single process reads its
certificates again.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import uvloop

from routing import __version__
from routing.admin import api
from routing.admin.announce import Announcement, announce_forever
from routing.admin.api import AdminPort, View
from routing.admin.events import EventSpool, StateObserver
from routing.http.tasks import Background, run_until_cancelled
from routing.http.tls import Tls
from routing.log import event, log_to_stderr
from routing.process import (
    few_files,
    notify_supervisor,
    raise_file_limit,
    return_large_blocks,
    signal_handlers,
    tune_garbage_collector,
)
from routing.proxy.config_store import LastKnownGood, NackError, RetryLaterError, Signatures
from routing.proxy.router import Router
from routing.settings import ServeSettings, SettingsError, cache_store, read_settings, state_exchange
from routing.singleprocess import SingleProcess

logger = logging.getLogger(__name__)


class DataPlane(Protocol):
    """The processes that serve the data port."""

    port: int  # the bound port; 0 before ``open``

    @property
    def view(self) -> View:
        """The state of these processes that the admin port shows."""
        ...

    async def start(self, document: bytes | None) -> None:
        """Load the newest valid configuration: ``document`` or the last known good one."""
        ...

    async def open(self, host: str, port: int, *, reuse_port: bool) -> None:
        """Accept requests; OSError if the port is taken. ``reuse_port``: another router may share it."""
        ...

    def reload(self) -> None:
        """Start to replace worker processes, or read the certificate again."""
        ...

    async def drain(self) -> None:
        """Stop accepting connections, and wait for the requests in flight."""
        ...

    async def close(self) -> None:
        """Close all remaining connections and tasks."""
        ...


class Server:
    """A router with its two ports and its announcements to the control plane."""

    def __init__(self, settings: ServeSettings, data: DataPlane) -> None:
        self.settings = settings
        self.data = data
        self._admin = AdminPort(data.view)
        self._admin_tls = Tls(settings.admin_tls)
        self._announcing: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Load the configuration and bind both ports; NackError, RetryLaterError or OSError if that fails."""
        settings = self.settings
        document = await asyncio.to_thread(settings.config_file.read_bytes) if settings.config_file else None
        await self.data.start(document)
        tls = self._admin_tls.server_context
        await self._admin.open(settings.admin_host, settings.admin_port, settings.admin_token, tls)
        await self.data.open(settings.host, settings.port, reuse_port=settings.reuse_port)
        if settings.control_plane_url:
            self._start_announcing(settings.control_plane_url)

    def _start_announcing(self, control_plane_url: str) -> None:
        view, token = self.data.view, self.settings.admin_token
        announcement = Announcement(control_plane_url, self.admin_url, self.data_url, __version__, token)
        spool = EventSpool(self.settings.state_dir, view.boot)
        loops = (
            run_until_cancelled(Background.EVENTS, StateObserver(view, spool, __version__).observe_forever),
            run_until_cancelled(Background.ANNOUNCING, partial(announce_forever, view, announcement, spool)),
        )
        self._announcing = set(map(asyncio.create_task, loops))

    @property
    def data_port(self) -> int:
        """The bound port."""
        return self.data.port

    @property
    def data_url(self) -> str:
        """URL to which clients send requests."""
        return _url(self.settings.host, self.data_port, "https" if self.settings.tls.certificate else "http")

    @property
    def admin_url(self) -> str:
        """URL to which the control plane sends configurations."""
        return _url(self.settings.admin_host, self._admin.port, "https" if self._admin_tls.server_context else "http")

    def reload(self) -> None:
        """Start to replace worker processes, or read certificates again."""
        settings = self.settings
        if settings.workers == 1 and not settings.tls.certificate and not settings.admin_tls.certificate:
            event(logger, "nothing_to_reload")
        self._admin_tls.reload()
        self.data.reload()

    async def close(self) -> None:
        """Close all remaining connections and tasks."""
        for task in self._announcing:
            task.cancel()
        if self._announcing:
            await asyncio.wait(self._announcing)
        await self.data.close()
        await self._admin.close()


MakeDataPlane = Callable[[ServeSettings], DataPlane]


def data_plane(settings: ServeSettings) -> DataPlane:
    """The processes of a router."""
    if settings.workers == 1:
        return SingleProcess(new_router(settings), __version__, settings.state_dir)
    from routing.workers.multiprocess import MultiProcess  # noqa: PLC0415 - most routers do not need it

    files, signatures = LastKnownGood(settings.state_dir), Signatures(settings.config_keys)
    return MultiProcess(settings.name, files, __version__, settings.workers, settings.tls, signatures=signatures)


def new_router(settings: ServeSettings) -> Router:
    """The router of a single process."""
    files, signatures = LastKnownGood(settings.state_dir), Signatures(settings.config_keys)
    return Router(settings.name, files, Tls(settings.tls), signatures, cache_store(), state_exchange())


@asynccontextmanager
async def running(settings: ServeSettings, make: MakeDataPlane = data_plane) -> AsyncIterator[Server]:
    """A server that has loaded its configuration and opened its ports."""
    server = Server(settings, make(settings))
    try:
        await server.open()
        yield server
    finally:
        await server.close()


async def serve(settings: ServeSettings, make: MakeDataPlane = data_plane) -> None:
    """Run until a signal stops the router."""
    server = Server(settings, make(settings))
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_stop() -> None:
        (stop_now if stop.is_set() else stop).set()

    with signal_handlers(asyncio.get_running_loop(), stop=on_stop, reload=server.reload):
        try:
            if await _run_unless(stop, server.open()):
                return_large_blocks()
                tune_garbage_collector()
                event(logger, "serving", **api.build_info(__version__))
                if (text := few_files()) is not None:
                    event(logger, "few_open_files", level=logging.WARNING, reason=text)
                _print_ready(server)
                notify_supervisor("READY=1")
                await stop.wait()
                notify_supervisor("STOPPING=1")
                await _run_unless(stop_now, server.data.drain())
        finally:
            await server.close()
        event(logger, "stopped")


async def _run_unless(cancel: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work``, or cancel it when the event is set; whether ``work`` finished. Raises the errors of ``work``."""
    task, waiting = asyncio.create_task(work), asyncio.create_task(cancel.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        is_finished = task.done()
    finally:
        for pending in (task, waiting):
            pending.cancel()
        await asyncio.wait({task, waiting})
    if not task.cancelled():
        task.result()
    return is_finished


def main(argv: Sequence[str]) -> int:
    """The ``serve`` command."""
    return run(argv, read_settings, data_plane)


def run(argv: Sequence[str], read: Callable[[Sequence[str]], ServeSettings], make: MakeDataPlane) -> int:
    """Serve until a signal; 2 for wrong settings or a rejected configuration, 1 for other failures."""
    log_to_stderr()
    raise_file_limit()
    try:
        uvloop.run(serve(read(argv), make))
    except (SettingsError, NackError) as error:
        path = f"{error.path}: " if isinstance(error, NackError) else ""
        sys.stderr.write(f"warmpath router: {path}{error}\n")
        return 2
    except (OSError, RetryLaterError) as error:
        sys.stderr.write(f"warmpath router: {error}\n")
        return 1
    return 0


def _print_ready(server: Server) -> None:
    revision = server.data.view.store.revision
    state = "no configuration yet" if revision is None else f"revision {revision}"
    line = f"Router {server.settings.name} is ready: {server.data_url} (admin {server.admin_url}, {state})"
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _url(host: str, port: int, scheme: str) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
