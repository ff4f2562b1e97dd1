"""One worker process: a router that accepts from its part of the data port, controlled by its parent.

It has no admin port, and writes no file except its residency index. When its parent ends, it accepts nothing more,
completes the requests in flight and exits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from routing import __version__
from routing.admin.api import RouterView
from routing.http.response import RejectedRequestError
from routing.http.tasks import Background, Periodic, run_in_slices
from routing.http.tls import Tls
from routing.log import event, log_to_stderr
from routing.observability.decision_log import MAX_BYTES, MAX_RECORDS, DecisionRing
from routing.observability.span_export import open_span_export
from routing.process import backlog, return_large_blocks, tune_garbage_collector
from routing.proxy.client_connection import ClientConnection
from routing.proxy.config_store import Swap
from routing.proxy.router import Router
from routing.proxy.saved_residency import SavedResidency
from routing.proxy.shutdown import drain
from routing.schema import CachePurge, ConfigError, load_snapshot
from routing.settings import cache_store, state_exchange
from routing.sharing.exchange import Exchange
from routing.sharing.transports import WorkerTransport
from routing.sharing.view import SILENT_S
from routing.workers.messages import CallRejectedError, Channel, Preparation, WorkerOptions, WorkerStatus, as_plain
from routing.workers.shared_limits import TICK_S, WAITING_TICK_S, LimitsMemory, WorkerLimits

logger = logging.getLogger(__name__)


class Worker:
    """A worker and the methods that its parent calls."""

    def __init__(self, options: WorkerOptions) -> None:
        memory = LimitsMemory(options.memory_fd, options.rows)
        exchange = _exchange(options, memory)
        self.router = Router(options.name, None, Tls(options.tls), cache_store=cache_store(), state_exchange=exchange)
        services = self.router.services
        services.decisions = DecisionRing(MAX_RECORDS // options.workers, MAX_BYTES // options.workers)
        services.all_admission_queues.share = 1 / options.workers
        services.all_warm_ups.part, services.all_warm_ups.parts = options.number, options.workers
        self._spans = open_span_export(options.name, self.router.boot, __version__)
        services.tracer = None if self._spans is None else self._spans.tracer
        self._options = options
        self._view = RouterView(self.router, "")
        self._limits = self.router.shared_limits = WorkerLimits(memory, options.row)
        self._ticks = Periodic(Background.LIMITS, TICK_S, self._tick)
        self._saved_residency = SavedResidency(self.router.balancer, Path(options.state_dir), options.number)
        self._is_restored = False
        self._prepared: tuple[Swap, Preparation] | None = None
        self._preparing = asyncio.Lock()  # preparations complete in the order of their calls
        self._listening: dict[int, list[asyncio.Server]] = {}
        self._inherited = list(chain(*options.listening_fds))
        self._methods: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "prepare": self._prepare,
            "commit": self._commit,
            "listen": self._listen,
            "poll": self._poll,
            "decisions": self._decisions,
            "explain": self._explain,
            "forget_responses": self._forget_responses,
            "purge_store": self._purge_store,
            "stop_accepting": self._stop_accepting,
            "drain": self._drain,
        }

    async def run(self) -> None:
        """Execute the parent's calls until it closes the channel or ends."""
        channel = await Channel.open(socket.socket(fileno=self._options.channel_fd), self.handle)
        return_large_blocks()
        tune_garbage_collector()
        await channel.run()
        if not self.router.is_draining:
            event(logger, "parent_gone", level=logging.WARNING, in_flight=self.router.services.in_flight)
        await self._drain(0.0)
        self._saved_residency.close()
        self._ticks.stop()
        self.router.close()
        if self._spans is not None:
            self._spans.close()
        await self.router.services.all_response_caches.close()

    def _tick(self) -> None:
        """Show that this worker runs, and admit waiting requests to permits that other workers have released."""
        services = self.router.services
        self._limits.tick(services.in_flight)
        is_waiting = services.admission_queues is not None and services.admission_queues.admit()
        self._ticks.period_s = WAITING_TICK_S if is_waiting else TICK_S

    async def handle(self, method: str, content: Any) -> Any:
        """The result of one call; CallRejectedError if it is rejected."""
        return await self._methods[method](content)

    async def _prepare(self, content: Any) -> None:
        """Prepare a configuration beside the active one."""
        preparation = msgspec.convert(content, Preparation)
        try:
            async with self._preparing:
                loaded = await asyncio.to_thread(load_snapshot, preparation.document)
                self._limits.configure(preparation.rates, preparation.queues)
                self._prepared = await self.router.prepare(loaded), preparation
        except ConfigError as error:
            raise CallRejectedError(reason=error.reason, path=error.path) from None
        except (ValueError, OSError) as error:
            raise CallRejectedError(reason=str(error), path="$") from None

    async def _commit(self, _: Any) -> None:
        """Activate the configuration that was prepared last."""
        if self._prepared is None:
            raise CallRejectedError(reason="nothing is prepared")
        (swap, preparation), self._prepared = self._prepared, None
        self._limits.configure(preparation.rates, preparation.queues)
        self._ticks.start()
        await swap()
        if not self._is_restored:
            self._is_restored = True
            await self._saved_residency.restore()
            self._saved_residency.start()

    async def _listen(self, slots: list[int]) -> None:
        """Accept from the sockets of these slots, and of no others."""
        for slot in self._listening.keys() - set(slots):
            for server in self._listening.pop(slot):
                server.close()
        for slot in slots:
            if slot not in self._listening:
                self._listening[slot] = [await self._accept(fd) for fd in self._options.listening_fds[slot]]

    async def _accept(self, fd: int) -> asyncio.Server:
        """Accept from a copy of the socket: closing it leaves the socket and its queue to others."""
        router, tls = self.router, self.router.tls
        return await router.loop.create_server(
            lambda: ClientConnection(router),
            sock=socket.socket(fileno=os.dup(fd)),
            backlog=backlog(),
            ssl=tls.server_context,
            ssl_handshake_timeout=tls.handshake_s,
        )

    async def _poll(self, _: Any) -> Any:
        """The state of this worker."""
        rows = await self._view.replicas()
        text = "\n".join(await run_in_slices(self._view.metric_lines(rows, all_buckets=True)))
        decisions = self.router.services.decisions
        return as_plain(WorkerStatus(text, rows, self.router.services.in_flight, decisions.first, decisions.last))

    async def _decisions(self, content: Any) -> list[dict[str, Any]]:
        """The available decisions from one number to another, or the first page of them."""
        first, last, ratio = content
        page = (await self._view.decisions(first - 1, last - first + 1, ratio))["decisions"]
        rows: list[dict[str, Any]] = msgspec.to_builtins([row for row in page if row["seq"] <= last])
        return rows

    async def _explain(self, request: bytes) -> Any:
        """The decision that a request would get here now."""
        try:
            return msgspec.to_builtins(await self._view.explain(request))
        except RejectedRequestError as error:
            raise CallRejectedError(status=error.status, message=error.message) from None

    async def _forget_responses(self, content: Any) -> int:
        """Remove entries of response caches from this process's memory; their number."""
        return await self.router.services.all_response_caches.forget(msgspec.convert(content, CachePurge))

    async def _purge_store(self, content: Any) -> Any:
        """Remove entries of response caches from the store; None without a store."""
        purge = msgspec.convert(content, CachePurge)
        return await self.router.services.all_response_caches.purge_store(purge)

    async def _stop_accepting(self, _: Any) -> None:
        """Close all listening sockets, also those that this worker does not accept from."""
        await self._listen([])
        while self._inherited:
            os.close(self._inherited.pop())

    async def _drain(self, linger_s: float) -> None:
        """Stop accepting and wait for requests in flight; idle connections may send another within ``linger_s``."""
        await self._stop_accepting(None)
        await drain(self.router, linger_s)
        await self._saved_residency.save()


def _exchange(options: WorkerOptions, memory: LimitsMemory) -> Exchange | None:
    """The exchange of state with other workers, and with other routers if there is a server for it."""
    if options.receiving_fd is None:
        return state_exchange(router=options.boot)
    receiving, *sending = [socket.socket(fileno=fd) for fd in (options.receiving_fd, *options.sending_fds)]
    transport = WorkerTransport(receiving, sending, lambda row: memory.ticks_since(row, SILENT_S))
    return Exchange(transport, options.boot)


def main() -> None:
    """Run a worker with the options on its command line. The parent handles signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    options = msgspec.json.decode(sys.argv[1], type=WorkerOptions)
    log_to_stderr(worker=options.number)
    uvloop.run(_run(options))


async def _run(options: WorkerOptions) -> None:
    await Worker(options).run()


if __name__ == "__main__":
    main()
