"""A router from start to end: bind, serve, drain; in one process, or as the parent of several.

It is ready once it has a configuration and both ports. The first SIGTERM or SIGINT turns readiness off, closes the
data port to new connections and lets running answers finish, up to the configured limit; a second one ends it at once,
as the first one does where it is not ready yet. SIGHUP replaces the workers, where there are any, one after the other;
a single process reads its certificates anew.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
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
from routing.process import return_large_blocks, signal_handlers, tune_garbage_collector
from routing.proxy.config_store import LastKnownGood, NackError, RetryLaterError, Signatures
from routing.proxy.router import Router
from routing.settings import ServeSettings, SettingsError, read_settings
from routing.singleprocess import SingleProcess

logger = logging.getLogger(__name__)


class DataSide(Protocol):
    """Whatever serves the data port."""

    port: int  # the real one, once open

    @property
    def view(self) -> View:
        """What the admin port shows of it."""
        ...

    async def start(self, document: bytes | None) -> None:
        """Take the configuration that there is."""
        ...

    async def open(self, host: str, port: int, *, reuse_port: bool) -> None:
        """Accept requests; OSError where the port is taken. ``reuse_port``: another router may have it too."""
        ...

    def reload(self) -> None:
        """Begin to put new processes in the place of old ones, or read the certificate anew."""
        ...

    async def drain(self) -> None:
        """Accept nothing more, and let what runs finish."""
        ...

    async def close(self) -> None:
        """End everything that is left."""
        ...


class Server:
    """A router with its two ports, and what it tells the control plane."""

    def __init__(self, settings: ServeSettings, data: DataSide) -> None:
        self.settings = settings
        self.data = data
        self._admin = AdminPort(data.view)
        self._admin_tls = Tls(settings.admin_tls)
        self._telling: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Take the configuration, and bind both ports; NackError, RetryLaterError or OSError where that fails."""
        settings = self.settings
        await self.data.start(await asyncio.to_thread(_document, settings.config_file))
        listening = self._admin_tls.server_context
        await self._admin.open(settings.admin_host, settings.admin_port, settings.admin_token, listening)
        await self.data.open(settings.host, settings.port, reuse_port=settings.reuse_port)
        if settings.control_plane_url:
            self._tell(settings.control_plane_url)

    def _tell(self, control_plane_url: str) -> None:
        """Begin to announce what runs and what happens here."""
        view, token = self.data.view, self.settings.admin_token
        what = Announcement(control_plane_url, self.admin_url, self.data_url, __version__, token)
        spool = EventSpool(self.settings.state_dir, view.boot)
        loops = (
            run_until_cancelled(Background.EVENTS, StateObserver(view, spool, __version__).observe_forever),
            run_until_cancelled(Background.ANNOUNCING, partial(announce_forever, view, what, spool)),
        )
        self._telling = set(map(asyncio.create_task, loops))

    @property
    def data_port(self) -> int:
        """The real port."""
        return self.data.port

    @property
    def data_url(self) -> str:
        """Where clients send requests."""
        return _url(self.settings.host, self.data_port, "https" if self.settings.tls.certificate else "http")

    @property
    def admin_url(self) -> str:
        """Where the control plane sends configurations."""
        return _url(self.settings.admin_host, self._admin.port, "https" if self._admin_tls.server_context else "http")

    def reload(self) -> None:
        """Begin to put new processes in the place of old ones, or read certificates anew; whichever there are."""
        settings = self.settings
        if settings.workers == 1 and not settings.tls.certificate and not settings.admin_tls.certificate:
            event(logger, "nothing_to_reload")
        self._admin_tls.reload()
        self.data.reload()

    async def drain(self) -> None:
        """Accept nothing more, and let what runs finish."""
        await self.data.drain()

    async def close(self) -> None:
        """End everything that is left."""
        for task in self._telling:
            task.cancel()
        if self._telling:
            await asyncio.wait(self._telling)
        await self.data.close()
        await self._admin.close()


@asynccontextmanager
async def running(settings: ServeSettings) -> AsyncIterator[Server]:
    """A server that has loaded what configuration it can and has opened its ports."""
    server = Server(settings, _data_side(settings))
    try:
        await server.open()
        yield server
    finally:
        await server.close()


def _data_side(settings: ServeSettings) -> DataSide:
    files, signatures = LastKnownGood(settings.state_dir), Signatures(settings.config_keys)
    if settings.workers == 1:
        return SingleProcess(Router(settings.name, files, Tls(settings.tls), signatures), __version__)
    from routing.workers.multiprocess import MultiProcess  # noqa: PLC0415 - most routers need nothing of it

    return MultiProcess(settings.name, files, __version__, settings.workers, settings.tls, signatures=signatures)


async def serve(settings: ServeSettings) -> None:
    """Run until a signal says otherwise."""
    server = Server(settings, _data_side(settings))
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def stop_asked() -> None:
        (stop_now if stop.is_set() else stop).set()

    with signal_handlers(asyncio.get_running_loop(), stop=stop_asked, reload=server.reload):
        try:
            if await _finished(server.open(), unless=stop):
                return_large_blocks()
                tune_garbage_collector()
                event(logger, "serving", **api.build_info(__version__))
                _say_ready(server)
                await stop.wait()
                await _finished(server.drain(), unless=stop_now)
        finally:
            await server.close()
        event(logger, "stopped")


async def _finished(work: Coroutine[Any, Any, None], *, unless: asyncio.Event) -> bool:
    """Whether it came to its end before the event; if not, it is given up. Raises what went wrong."""
    doing, waiting = asyncio.create_task(work), asyncio.create_task(unless.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        is_finished = doing.done()
    finally:
        for task in (doing, waiting):
            task.cancel()
        await asyncio.wait({doing, waiting})
    if not doing.cancelled():
        doing.result()
    return is_finished


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
    except (OSError, RetryLaterError) as error:
        sys.stderr.write(f"warmpath router: {error}\n")
        return 1
    return 0


def _document(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()


def _say_ready(server: Server) -> None:
    revision = server.data.view.store.revision
    state = "no configuration yet" if revision is None else f"revision {revision}"
    line = f"Router {server.settings.name} is ready: {server.data_url} (admin {server.admin_url}, {state})"
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
