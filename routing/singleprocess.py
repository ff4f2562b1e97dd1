"""The data plane of a router in one process: opens, drains and closes its data port."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from routing.admin.api import RouterView
from routing.http.sockets import bind, close_listeners, divert_new_connections
from routing.log import event
from routing.observability.span_export import open_span_export
from routing.process import backlog
from routing.proxy.client_connection import ClientConnection
from routing.proxy.router import Router
from routing.proxy.saved_residency import SavedResidency
from routing.proxy.shutdown import LINGER_S, drain

logger = logging.getLogger(__name__)


class SingleProcess:
    """The router and its listening sockets."""

    def __init__(self, router: Router, version: str, state_dir: Path) -> None:
        self.router = router
        self._saved_residency = SavedResidency(router.balancer, state_dir)
        self.view = RouterView(router, version)
        self._spans = open_span_export(router.name, router.boot, version)
        router.services.tracer = None if self._spans is None else self._spans.tracer
        self.port = 0  # the bound port, once open
        self._servers: list[asyncio.Server] = []
        self._shared: list[socket.socket] = []  # copies of the sockets of a port that other processes share

    async def start(self, document: bytes | None) -> None:
        """Activate the newest valid configuration, ``document`` or the last known good one, and the saved residency."""
        await self.router.store.start(document)
        await self._saved_residency.restore()
        self._saved_residency.start()

    async def open(self, host: str, port: int, *, reuse_port: bool) -> None:
        """Accept requests; OSError if the port is taken."""
        if reuse_port:
            [self._shared] = await bind(host, port, count=1, reuse_port=True)
            for shared in self._shared:
                self._servers.append(await self._serve(sock=shared.dup()))
        else:
            self._servers.append(await self._serve(host=host, port=port))
        self.port = self._servers[0].sockets[0].getsockname()[1]

    def reload(self) -> None:
        """Read the certificate again, if there is one."""
        self.router.tls.reload()

    async def drain(self) -> None:
        """Stop accepting connections, and wait for the requests in flight."""
        self.router.begin_draining()  # not ready from now on, though new connections are still accepted for a moment
        event(logger, "draining", in_flight=self.router.services.in_flight, limit_s=self.router.limits.drain_timeout_s)
        await asyncio.gather(*(divert_new_connections([shared]) for shared in self._shared))
        linger_s = LINGER_S if self._shared else 0.0
        self._stop_accepting()
        await drain(self.router, linger_s)
        await self._saved_residency.save()

    async def close(self) -> None:
        """Abort the requests that remain."""
        self._stop_accepting()
        self._saved_residency.close()
        self.router.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        await self.router.services.all_response_caches.close()

    async def _serve(self, **address: object) -> asyncio.Server:
        router = self.router
        tls = {"ssl": router.tls.server_context, "ssl_handshake_timeout": router.tls.handshake_s}
        return await router.loop.create_server(lambda: ClientConnection(router), backlog=backlog(), **tls, **address)  # type: ignore[call-overload,no-any-return]

    def _stop_accepting(self) -> None:
        for server in self._servers:
            server.close()
        close_listeners(self._shared)
        self._shared = []
