"""The parent of all workers: starts, watches, restarts and drains them.

Theory of operation. The parent opens every worker's listening sockets and keeps them, so that a queue outlives the
worker that accepts from it. A slot is a worker's place with its sockets; the worker in it may change. Whenever one ends
unasked, another takes over accepting from its sockets until the slot has a worker again. A restart in good order starts
the new worker in a slot first, lets it accept from the same sockets, and then drains the old one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from routing.http.sockets import BACKLOG, close_listeners, divert_new_connections
from routing.http.tasks import Background, run_until_cancelled
from routing.http.tls import TlsFiles
from routing.log import defect, event
from routing.proxy.last_known_good import LastKnownGood, Signatures
from routing.proxy.shutdown import LINGER_S
from routing.workers.messages import DeclinedError, WorkerOrders
from routing.workers.metrics import MergedMetrics
from routing.workers.process import ANSWER_S, GONE, WorkerPoller, WorkerProcess, or_kill
from routing.workers.sequence import DecisionSequence
from routing.workers.shared_configuration import SharedConfiguration
from routing.workers.shared_state import SharedBoard

LEAVE_S = 1.0  # in which the port closes when all are to accept nothing more, whoever does not answer
FIRST_PAUSE_S = 0.1  # before a second attempt to start a worker, doubled up to LAST_PAUSE_S
LAST_PAUSE_S = 5.0
STABLE_S = 10.0  # a worker that lived longer than this is replaced without a pause

logger = logging.getLogger(__name__)


class Supervisor:
    """All workers of one router."""

    def __init__(
        self,
        name: str,
        files: LastKnownGood,
        workers: int,
        tls: TlsFiles | None = None,
        *,
        signatures: Signatures | None = None,
    ) -> None:
        self.name = name
        self._tls = tls or TlsFiles()
        self._board = SharedBoard.create(2 * workers)  # each slot may have a worker that drains beside its present one
        self.configuration = SharedConfiguration(lambda: self.ready, self._board, files, signatures)
        self.store = self.configuration.store
        self.counts = MergedMetrics()
        self.sequence = DecisionSequence()
        self.poller = WorkerPoller(lambda: self.processes, self.sequence, self._share_sockets)
        self.restarts = 0
        self.is_stopping = False  # not ready any more, though workers are still replaced and accept
        self.is_draining = False  # nor do they accept
        self._is_open = False  # whether workers may accept
        self.workers = workers
        self._sockets: list[list[socket.socket]] = [[] for _ in range(workers)]  # by slot, one for each address
        self._slots: list[WorkerProcess | None] = [None] * workers
        self._processes: set[WorkerProcess] = set()  # those that start or drain included
        self._rows = set(range(self._board.rows))  # free ones
        self._changed = asyncio.Condition()  # a row became free, or a worker ready
        self._tasks: set[asyncio.Task[None]] = set()
        self._sharing = asyncio.Lock()
        self._starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))  # or all would wait for each other's imports
        self._rolling: asyncio.Task[None] | None = None
        self._is_roll_due = False
        self._pauses_s = [0.0] * workers

    # --- what there is ---

    @property
    def processes(self) -> list[WorkerProcess]:
        """Workers whose figures count, those that drain included."""
        return [worker for worker in self._processes if worker.has_begun]

    @property
    def ready(self) -> list[WorkerProcess]:
        """Workers that accept, by slot."""
        return [worker for worker in self._slots if worker is not None and worker.is_ready]

    @property
    def awake(self) -> list[WorkerProcess]:
        """Of these, those that answer."""
        return [worker for worker in self.ready if not worker.is_silent]

    async def is_serving(self, within_s: float) -> bool:
        """Whether workers have begun to accept, and one is left; as soon as that is so."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: self._is_open and self.ready)
        return self._is_open and bool(self.ready)

    async def _note_change(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @property
    def in_flight(self) -> int:
        """Requests that had not ended when the workers were last seen."""
        return sum(worker.in_flight for worker in self._processes)

    # --- from start to end ---

    async def open(self, sockets: list[list[socket.socket]], document: bytes | None) -> None:
        """Start all workers, give them what configuration there is, and let them accept from these sockets."""
        self._sockets = sockets
        for listening in chain(*sockets):
            listening.listen(BACKLOG)
        await asyncio.gather(*(self._fill(slot) for slot in range(self.workers)))
        await self.store.start(document)
        self._is_open = True
        await self._note_change()
        await self._share_sockets()
        self._spawn(run_until_cancelled(Background.WORKERS, self.poller.keep_polling))
        self._begin_to_roll()

    def roll(self) -> None:
        """Replace every worker as soon as possible: those that start or are replaced just now may be of before."""
        if self.is_stopping:
            event(logger, "roll_ignored", level=logging.WARNING)
        else:
            self._is_roll_due = True
            self._begin_to_roll()

    def _begin_to_roll(self) -> None:
        if self._is_open and self._is_roll_due and self._rolling is None:
            self._rolling = self._spawn(self._roll())

    async def _roll(self) -> None:
        try:
            while self._is_roll_due and not self.is_stopping:
                self._is_roll_due = False
                await self._replace_all()
        finally:
            self._rolling = None

    async def _replace_all(self) -> None:
        """One after the other, each once the one in its place accepts; the rest stay if one does not start."""
        try:
            for slot in range(self.workers):
                if self.is_stopping:
                    return
                await self._fill(slot)
        except OSError as error:
            event(logger, "roll_stopped", level=logging.ERROR, reason=str(error))
        else:
            event(logger, "workers_rolled", workers=self.workers)

    async def drain(self, *, to_others: bool) -> None:
        """Accept nothing more, and let what runs finish; ``to_others``: first send newcomers to another process."""
        self.is_stopping = True
        event(logger, "draining", in_flight=self.in_flight, limit_s=self.configuration.drain_timeout_s)
        if to_others:
            for sockets in zip(*self._sockets, strict=True):
                await divert_new_connections(sockets)
        self.is_draining = True
        for worker in self._processes:
            if not worker.is_ready:
                worker.kill()  # it holds the port open, and will not accept from it
        async with self._sharing:
            leaving = asyncio.gather(*(or_kill(worker, worker.leave) for worker in self.processes))
            await asyncio.wait([leaving], timeout=LEAVE_S)
            self._leave()
            await leaving
        linger_s, timeout_s = LINGER_S if to_others else 0.0, self.configuration.drain_timeout_s + ANSWER_S
        await asyncio.gather(*(worker.drain(linger_s, timeout_s=timeout_s) for worker in self.processes))

    async def close(self) -> None:
        """End everything that is left."""
        self.is_stopping = self.is_draining = True
        self._leave()
        for task in list(self._tasks):
            task.cancel()
        processes = list(self._processes)
        for worker in processes:
            worker.kill()
        await asyncio.gather(*(worker.end() for worker in processes))

    def _leave(self) -> None:
        close_listeners(list(chain(*self._sockets)))
        self._sockets = [[] for _ in self._sockets]

    # --- workers ---

    async def _fill(self, slot: int) -> None:
        """Put a new worker in a slot and drain the one that was there; OSError where the new one does not start."""
        worker = await self._begun(slot)
        try:
            async with self.store.lock:
                await self.configuration.bring_up_to_date(worker)
                self._check_needed()
                if worker not in self._processes:
                    raise OSError(f"worker {slot} ended before it could accept")
                worker.is_ready = True
                before, self._slots[slot] = self._slots[slot], worker
        except (*GONE, DeclinedError) as error:
            raise OSError(f"worker {slot} did not take the configuration: {error!r}") from None
        finally:
            if not worker.is_ready:
                worker.kill()
        event(logger, "worker_started", worker=slot, pid=worker.process.pid)
        await self._note_change()
        await self._share_sockets()
        if before is not None and before in self._processes:
            self._spawn(self._retire(before))

    async def _begun(self, slot: int) -> WorkerProcess:
        """A new worker that answers."""
        async with self._starting:
            worker = await self._start(slot)
            try:
                await worker.begin()
            except (*GONE, DeclinedError) as error:
                raise OSError(f"worker {slot} did not start: {error!r}") from None
            finally:
                if not worker.has_begun:
                    worker.kill()
        return worker

    async def _start(self, slot: int) -> WorkerProcess:
        """A new process, as soon as there is a row for it; OSError where there is none, or nobody needs it any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._rows)
            self._check_needed()
            row = self._rows.pop()
        mine, theirs = socket.socketpair()
        try:
            orders = self._orders(slot, row, theirs.fileno())
            fds = [orders.channel_fd, orders.board_fd, *chain(*orders.listening_fds)]
            worker = await WorkerProcess.start(orders, mine, fds)
        except BaseException:
            mine.close()
            await self._free(row)
            raise
        finally:
            theirs.close()
        self._processes.add(worker)
        self._spawn(self._watch(worker, slot))
        return worker

    def _check_needed(self) -> None:
        if self.is_draining:
            raise OSError("the router accepts nothing more")

    def _orders(self, slot: int, row: int, channel_fd: int) -> WorkerOrders:
        listening = [[listening.fileno() for listening in sockets] for sockets in self._sockets]
        return WorkerOrders(
            self.name, slot, self.workers, channel_fd, self._board.fd, self._board.rows, row, listening, self._tls
        )

    async def _watch(self, worker: WorkerProcess, slot: int) -> None:
        """Wait for a worker's end, and see to it that another takes its place if it was not asked for."""
        born_at = asyncio.get_running_loop().time()
        status = await worker.process.wait()
        await run_until_cancelled(Background.WORKERS, partial(self._let_go, worker))
        if self._slots[slot] is not worker or self.is_draining:
            return
        self._slots[slot] = None
        self.restarts += 1
        event(logger, "worker_died", level=logging.ERROR, worker=slot, pid=worker.process.pid, status=status)
        lived_s = asyncio.get_running_loop().time() - born_at
        pause_s = 0.0 if lived_s > STABLE_S else self._pauses_s[slot]
        await run_until_cancelled(Background.WORKERS, self._share_sockets)
        await run_until_cancelled(Background.WORKERS, partial(self._refill, slot, pause_s))

    async def _let_go(self, worker: WorkerProcess) -> None:
        """Keep what an ended worker counted, and let its row be used again."""
        worker.channel.close()
        if worker in self._processes:
            self._processes.discard(worker)
            present = [it.figures for it in self.processes]
            self.counts.add_exited(worker.figures, present, self.configuration.series)
            self.sequence.replace(worker, None)
        await self._free(worker.row)

    async def _refill(self, slot: int, pause_s: float) -> None:
        """Start a worker anew until one stood, with growing pauses; who watches that one sees to its successor."""
        while not self.is_draining and self._slots[slot] is None:
            await asyncio.sleep(pause_s)
            pause_s = self._pauses_s[slot] = min(LAST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
            try:
                await self._fill(slot)
            except OSError as error:
                event(logger, "worker_not_started", level=logging.ERROR, worker=slot, reason=str(error))
            else:
                return

    async def _free(self, row: int) -> None:
        """Let a row be used again: its worker is gone."""
        self._board.clear(row)
        self._rows.add(row)
        await self._note_change()

    async def _retire(self, worker: WorkerProcess) -> None:
        """Drain a worker, take over its decisions, and end it."""
        await worker.drain(LINGER_S, timeout_s=self.configuration.drain_timeout_s + ANSWER_S)
        self.poller.note(worker)
        self.sequence.replace(worker, await worker.kept())
        await worker.end()

    async def _share_sockets(self) -> None:
        """Every slot's sockets to its worker, and to another where it is gone or silent; who takes over goes first."""
        async with self._sharing:
            ready = [worker for worker in self.ready if worker in self._processes]
            if not self._is_open or self.is_draining:
                ready = []
            awake = [worker for worker in ready if not worker.is_silent] or ready
            wanted: dict[WorkerProcess, list[int]] = {worker: [] for worker in self._processes}
            for slot, worker in enumerate(self._slots if ready else ()):
                if worker is not None and worker in ready:
                    wanted[worker].append(slot)
                if worker not in awake:
                    wanted[awake[slot % len(awake)]].append(slot)
            for takes_over in (True, False):
                chosen = [(worker, slots) for worker, slots in wanted.items() if bool(slots) is takes_over]
                await asyncio.gather(*(or_kill(worker, partial(worker.listen, slots)) for worker, slots in chosen))

    # --- tasks ---

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            defect(logger, error, "supervisor")
