"""One worker: a router with its part of the data port, told what to do by its parent.

It has no admin port and no files. When its parent dies, it accepts no more, lets running answers finish and ends.
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
from typing import Any

import msgspec
import uvloop

from routing.admin.views import RouterView
from routing.http.response import RejectedRequestError
from routing.http.sockets import BACKLOG
from routing.http.tasks import Background, Periodic, run_in_slices
from routing.http.tls import Tls
from routing.log import event, log_to_stderr
from routing.observability.decision_log import MAX_BYTES, MAX_RECORDS, DecisionRing
from routing.process import return_large_blocks, tune_garbage_collector
from routing.proxy.client_connection import ClientConnection
from routing.proxy.config_store import Swap
from routing.proxy.router import Router
from routing.proxy.shutdown import drain
from routing.schema import ConfigError, load_snapshot
from routing.workers.messages import Channel, DeclinedError, Preparation, WorkerOrders, WorkerStatus, as_plain
from routing.workers.shared_loads import PERIOD_S, SharedLoads
from routing.workers.shared_state import SharedBoard, WorkerLimits

logger = logging.getLogger(__name__)

Answer = Callable[[Any], Awaitable[Any]]


class Worker:
    """What a worker answers its parent."""

    def __init__(self, orders: WorkerOrders) -> None:
        self.router = Router(orders.name, tls=Tls(orders.tls))
        self.router.services.decisions = DecisionRing(MAX_RECORDS // orders.workers, MAX_BYTES // orders.workers)
        self.router.services.all_admission_queues.share = 1 / orders.workers
        self.router.services.all_warm_ups.part, self.router.services.all_warm_ups.parts = orders.number, orders.workers
        self._orders = orders
        self._view = RouterView(self.router, "")
        board = SharedBoard(orders.board_fd, orders.rows)
        self._loads = SharedLoads(self.router, board, orders.row)
        self._limits = self.router.shared_limits = WorkerLimits(board.limits, orders.row)
        self._ticks = Periodic(Background.LIMITS, PERIOD_S, self._tick)
        self._prepared: tuple[Swap, Preparation] | None = None
        self._preparing = asyncio.Lock()  # in the order asked: what a slow one was asked before comes first
        self._listening: dict[int, list[asyncio.Server]] = {}
        self._inherited = list(chain(*orders.listening_fds))
        self._questions: dict[str, Answer] = {
            "prepare": self._prepare,
            "commit": self._commit,
            "listen": self._listen,
            "poll": self._poll,
            "decisions": self._decisions,
            "explain": self._explain,
            "leave": self._leave,
            "drain": self._drain,
        }

    async def run(self) -> None:
        """Answer the parent until it goes away or closes the channel."""
        channel = await Channel.open(socket.socket(fileno=self._orders.channel_fd), self.answer)
        self._loads.start()
        self._ticks.start()
        return_large_blocks()
        tune_garbage_collector()
        await channel.run()
        if not self.router.is_draining:
            event(logger, "parent_gone", level=logging.WARNING, in_flight=self.router.services.in_flight)
        await self._drain(0.0)
        self._loads.stop()
        self._ticks.stop()
        self.router.close()

    def _tick(self) -> None:
        """Go on with limits that are shared."""
        self._limits.tick()
        if self.router.services.admission_queues is not None:
            self.router.services.admission_queues.admit()

    async def answer(self, question: str, content: Any) -> Any:
        """The answer to one question; DeclinedError where there is none."""
        return await self._questions[question](content)

    async def _prepare(self, content: Any) -> None:
        """Make a configuration ready beside the one in force."""
        preparation = msgspec.convert(content, Preparation)
        try:
            async with self._preparing:
                loaded = await asyncio.to_thread(load_snapshot, preparation.document)
                self._limits.use(preparation.rates, preparation.gates)
                self._prepared = await self.router.prepare(loaded), preparation
        except ConfigError as error:
            raise DeclinedError(reason=error.reason, path=error.path) from None
        except (ValueError, OSError) as error:
            raise DeclinedError(reason=str(error), path="$") from None

    async def _commit(self, _: Any) -> None:
        """Put what was made ready last into force."""
        if self._prepared is None:
            raise DeclinedError(reason="nothing is prepared")
        (swap, preparation), self._prepared = self._prepared, None
        self._loads.use(preparation.columns)
        self._limits.use(preparation.rates, preparation.gates)
        await swap()

    async def _listen(self, slots: list[int]) -> None:
        """Accept from the sockets of these slots, and of no others."""
        for slot in self._listening.keys() - set(slots):
            for server in self._listening.pop(slot):
                server.close()
        for slot in slots:
            if slot not in self._listening:
                self._listening[slot] = [await self._accept(fd) for fd in self._orders.listening_fds[slot]]

    async def _accept(self, fd: int) -> asyncio.Server:
        """Accept from a copy: closing it leaves the socket and its queue to others."""
        copy = socket.socket(fileno=os.dup(fd))
        router, tls = self.router, self.router.tls
        return await router.loop.create_server(
            lambda: ClientConnection(router),
            sock=copy,
            backlog=BACKLOG,
            ssl=tls.server_context,
            ssl_handshake_timeout=tls.handshake_s,
        )

    async def _poll(self, _: Any) -> Any:
        """What there is to see."""
        rows = await self._view.replicas()
        text = "\n".join(await run_in_slices(self._view.metric_lines(rows, is_fine=True)))
        ring = self.router.services.decisions
        return as_plain(WorkerStatus(text, rows, self.router.services.in_flight, ring.first, ring.last))

    async def _decisions(self, content: Any) -> list[dict[str, Any]]:
        """Those from one number to another that are still there, or the first of them: a page."""
        first, last, ratio = content
        found = (await self._view.decisions(first - 1, last - first + 1, ratio))["decisions"]
        plain: list[dict[str, Any]] = msgspec.to_builtins([one for one in found if one["seq"] <= last])
        return plain

    async def _explain(self, asked: bytes) -> Any:
        """The decision that a request would get here now."""
        try:
            return msgspec.to_builtins(await self._view.explain(asked))
        except RejectedRequestError as error:
            raise DeclinedError(status=error.status, message=error.message) from None

    async def _leave(self, _: Any) -> None:
        """Accept nothing more, and hold no socket open that nobody accepts from."""
        await self._listen([])
        while self._inherited:
            os.close(self._inherited.pop())

    async def _drain(self, linger_s: float) -> None:
        """The same, and let what runs finish; ``linger_s``: meanwhile idle connections may bring another request."""
        await self._leave(None)
        await drain(self.router, linger_s)


def main() -> None:
    """Begin as the parent says; signals are the parent's business."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    orders = msgspec.json.decode(sys.argv[1], type=WorkerOrders)
    log_to_stderr(worker=orders.number)
    uvloop.run(_run(orders))


async def _run(orders: WorkerOrders) -> None:
    await Worker(orders).run()


if __name__ == "__main__":
    main()
