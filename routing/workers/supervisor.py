"""The parent of all workers: starts, watches, replaces and drains them.

Theory of operation. The parent opens every worker's listening sockets and keeps them open, so that an accept queue
outlives its worker. A slot is the place of a worker with its sockets; the worker in it may change. If a worker exits
unexpectedly, another one accepts from its sockets until the slot has a worker again. A replacement starts the new
worker in a slot first, lets it accept from the same sockets, and then drains the old one.

One configuration for all workers is prepared by all of them, then written to disk, then activated by all of them. A
worker that fails to activate it is killed; a new worker gets the active configuration before it accepts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from routing.http.sockets import close_listeners, divert_new_connections
from routing.http.tasks import Background, run_until_cancelled
from routing.http.tls import TlsFiles
from routing.log import defect, event
from routing.observability.metrics import ConfiguredSeries
from routing.process import backlog
from routing.proxy.config_store import ConfigStore, LastKnownGood, NackError, RetryLaterError, Signatures, Swap
from routing.proxy.shutdown import LINGER_S
from routing.schema import Limits, LoadedSnapshot
from routing.settings import STATE_URL, from_environment
from routing.sharing.transports import WorkerQueue
from routing.workers.messages import CallRejectedError, Preparation, WorkerOptions
from routing.workers.metrics import MergedMetrics
from routing.workers.process import CALL_S, UNREACHABLE, WorkerPoller, WorkerProcess, run_or_kill
from routing.workers.sequence import DecisionSequence
from routing.workers.shared_limits import LimitsMemory, assign_queues, assign_rates

STOP_ACCEPTING_S = 1.0  # until a draining router's port closes, even if a worker does not respond
FIRST_PAUSE_S = 0.1  # before the second attempt to start a worker, doubled up to MAX_PAUSE_S
MAX_PAUSE_S = 5.0
STABLE_S = 10.0  # a worker that ran for longer is replaced without a pause
NO_WORKER = "no worker is running"
SILENT_WORKER = "a worker does not respond"

logger = logging.getLogger(__name__)


class SharedConfiguration:
    """The active configuration of all workers. ``ready`` returns the workers that accept."""

    def __init__(
        self,
        ready: Callable[[], list[WorkerProcess]],
        memory: LimitsMemory,
        files: LastKnownGood,
        signatures: Signatures | None,
    ) -> None:
        self.store = ConfigStore(self._prepare, files, signatures)
        self.series: ConfiguredSeries | None = None  # None: no configuration yet
        self._ready = ready
        self._memory = memory
        self._rates: dict[str, int] = {}  # slots of shared limits, by name
        self._queues: dict[str, int] = {}

    @property
    def drain_timeout_s(self) -> float:
        """Maximum duration of a worker's drain."""
        applied = self.store.applied
        return (applied.snapshot.config.limits if applied else Limits()).drain_timeout_s

    async def bring_up_to_date(self, worker: WorkerProcess) -> None:
        """Activate the active configuration in a new worker. The caller holds the store's lock."""
        applied = self.store.applied
        if applied is not None:
            await worker.prepare(Preparation(applied.snapshot.document, self._rates, self._queues))
            await worker.commit()

    async def _prepare(self, snapshot: LoadedSnapshot) -> Swap:
        """Let every worker prepare a configuration; NackError if one rejects it, RetryLaterError if one is silent.

        RetryLaterError also without workers. One that dies meanwhile is ignored: its successor gets the configuration.
        """
        rates = assign_rates(snapshot.config, self._rates, self._memory)
        queues = assign_queues(snapshot.config, self._queues, self._memory)
        preparation = Preparation(snapshot.document, rates, queues)
        workers = self._ready()
        if any(worker.is_silent for worker in workers):
            raise RetryLaterError(SILENT_WORKER)
        results = await asyncio.gather(*(worker.prepare(preparation) for worker in workers), return_exceptions=True)
        for result in results:
            if isinstance(result, CallRejectedError):
                reason, path = result.facts.get("reason", "rejected by a worker"), result.facts.get("path", "$")
                raise NackError(reason, path=path, revision=snapshot.revision)
            if isinstance(result, TimeoutError):
                raise RetryLaterError(SILENT_WORKER)
        prepared = [worker for worker, result in zip(workers, results, strict=True) if result is None]
        if not prepared:
            raise RetryLaterError(NO_WORKER)
        return partial(self._swap, snapshot, preparation, prepared)

    async def _swap(self, snapshot: LoadedSnapshot, preparation: Preparation, prepared: list[WorkerProcess]) -> None:
        """Activate a configuration in the workers that prepared it."""
        self._rates, self._queues = preparation.rates, preparation.queues
        self.series = ConfiguredSeries(snapshot.config)
        await asyncio.gather(*(run_or_kill(worker, worker.commit) for worker in prepared))


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
        self.boot = secrets.token_hex(8)  # identifies this run of the parent
        self.workers = workers
        self._tls = tls or TlsFiles()
        self._state_dir = str(files.folder)
        self._memory = LimitsMemory.create(2 * workers)  # a slot may have a draining worker beside its present one
        has_server = from_environment(os.environ, STATE_URL) is not None  # of shared state
        self._queues = [] if has_server else [WorkerQueue() for _ in range(self._memory.rows)]  # by row
        self.configuration = SharedConfiguration(lambda: self.ready, self._memory, files, signatures)
        self.store = self.configuration.store
        self.metrics = MergedMetrics()
        self.sequence = DecisionSequence()
        self.poller = WorkerPoller(lambda: self.processes, self.sequence, self._share_sockets)
        self.restarts = 0
        self.is_stopping = False  # not ready any more, though workers are still replaced and accept
        self.is_draining = False  # workers accept nothing more
        self._is_open = False  # workers may accept
        self._sockets: list[list[socket.socket]] = [[] for _ in range(workers)]  # by slot, one for each address
        self._slots: list[WorkerProcess | None] = [None] * workers
        self._processes: set[WorkerProcess] = set()  # including those that start or drain
        self._free_rows = set(range(self._memory.rows))
        self._changed = asyncio.Condition()  # a row is free, or a worker is ready
        self._tasks: set[asyncio.Task[None]] = set()
        self._sharing = asyncio.Lock()
        self._starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))  # all at once would slow each other's imports
        self._reloading: asyncio.Task[None] | None = None
        self._is_reload_due = False
        self._pauses_s = [0.0] * workers

    # --- state ---

    @property
    def processes(self) -> list[WorkerProcess]:
        """Workers whose metrics count, including those that drain."""
        return [worker for worker in self._processes if worker.has_started]

    @property
    def ready(self) -> list[WorkerProcess]:
        """Workers that accept, by slot."""
        return [worker for worker in self._slots if worker is not None and worker.is_ready]

    @property
    def responsive(self) -> list[WorkerProcess]:
        """Ready workers that are not silent."""
        return [worker for worker in self.ready if not worker.is_silent]

    async def is_serving(self, within_s: float) -> bool:
        """Whether a worker accepts; waits for that as long as ``within_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: self._is_open and self.ready)
        return self._is_open and bool(self.ready)

    async def _notify_changed(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- start, reload and stop ---

    async def open(self, sockets: list[list[socket.socket]], document: bytes | None) -> None:
        """Start all workers, give them the configuration, and let them accept from these sockets."""
        self._sockets = sockets
        for listening in chain(*sockets):
            listening.listen(backlog())
        await asyncio.gather(*(self._replace(slot) for slot in range(self.workers)))
        await self.store.start(document)
        self._is_open = True
        await self._notify_changed()
        await self._share_sockets()
        self._spawn(run_until_cancelled(Background.WORKERS, self.poller.poll_forever))
        self._start_reload()

    def reload(self) -> None:
        """Replace every worker as soon as possible, also those that start now and may have read the old files."""
        if self.is_stopping:
            event(logger, "reload_ignored", level=logging.WARNING)
        else:
            self._is_reload_due = True
            self._start_reload()

    def _start_reload(self) -> None:
        if self._is_open and self._is_reload_due and self._reloading is None:
            self._reloading = self._spawn(self._reload())

    async def _reload(self) -> None:
        try:
            while self._is_reload_due and not self.is_stopping:
                self._is_reload_due = False
                await self._replace_all()
        finally:
            self._reloading = None

    async def _replace_all(self) -> None:
        """Replace one worker after the other; the rest stay if a new one does not start."""
        try:
            for slot in range(self.workers):
                if self.is_stopping:
                    return
                await self._replace(slot)
        except OSError as error:
            event(logger, "reload_failed", level=logging.ERROR, reason=str(error))
        else:
            event(logger, "workers_replaced", workers=self.workers)

    async def drain(self, *, to_others: bool) -> None:
        """Accept nothing more, and wait for requests in flight; ``to_others``: other processes share the port."""
        self.is_stopping = True
        in_flight = sum(worker.in_flight for worker in self._processes)  # as of the last poll
        event(logger, "draining", in_flight=in_flight, limit_s=self.configuration.drain_timeout_s)
        if to_others:
            for sockets in zip(*self._sockets, strict=True):
                await divert_new_connections(sockets)
        self.is_draining = True
        for worker in self._processes:
            if not worker.is_ready:
                worker.kill()  # it has the sockets open, and will not accept
        async with self._sharing:
            stopping = asyncio.gather(*(run_or_kill(worker, worker.stop_accepting) for worker in self.processes))
            await asyncio.wait([stopping], timeout=STOP_ACCEPTING_S)
            self._close_sockets()
            await stopping
        linger_s, timeout_s = LINGER_S if to_others else 0.0, self.configuration.drain_timeout_s + CALL_S
        await asyncio.gather(*(worker.drain(linger_s, timeout_s=timeout_s) for worker in self.processes))

    async def close(self) -> None:
        """Kill the workers that remain."""
        self.is_stopping = self.is_draining = True
        self._close_sockets()
        for task in list(self._tasks):
            task.cancel()
        processes = list(self._processes)
        for worker in processes:
            worker.kill()
        await asyncio.gather(*(worker.end() for worker in processes))
        for queue in self._queues:
            queue.close()

    def _close_sockets(self) -> None:
        close_listeners(list(chain(*self._sockets)))
        self._sockets = [[] for _ in self._sockets]

    # --- workers ---

    async def _replace(self, slot: int) -> None:
        """Start a new worker in a slot and drain the previous one; OSError if the new one does not start."""
        worker = await self._start(slot)
        try:
            async with self.store.lock:
                await self.configuration.bring_up_to_date(worker)
                self._check_not_draining()
                if worker not in self._processes:
                    raise OSError(f"worker {slot} exited before it could accept")
                worker.is_ready = True
                previous, self._slots[slot] = self._slots[slot], worker
        except (*UNREACHABLE, CallRejectedError) as error:
            raise OSError(f"worker {slot} did not activate the configuration: {error!r}") from None
        finally:
            if not worker.is_ready:
                worker.kill()
        event(logger, "worker_started", worker=slot, pid=worker.process.pid)
        await self._notify_changed()
        await self._share_sockets()
        if previous is not None and previous in self._processes:
            self._spawn(self._retire(previous))

    async def _start(self, slot: int) -> WorkerProcess:
        """Start a worker and wait until it responds; OSError if it does not, or if the router drains."""
        async with self._starting:
            worker = await self._start_process(slot)
            try:
                await worker.wait_until_started()
            except (*UNREACHABLE, CallRejectedError) as error:
                raise OSError(f"worker {slot} did not start: {error!r}") from None
            finally:
                if not worker.has_started:
                    worker.kill()
        return worker

    async def _start_process(self, slot: int) -> WorkerProcess:
        """A new process, as soon as there is a free row for the process."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free_rows)
            self._check_not_draining()
            row = self._free_rows.pop()
        own_end, worker_end = socket.socketpair()
        memory, fds = self._memory, [[listener.fileno() for listener in sockets] for sockets in self._sockets]
        datagrams = [queue.sending.fileno() for queue in self._queues]
        receiving = self._queues[row].receiving.fileno() if self._queues else None
        options = WorkerOptions(
            self.name,
            self.boot,
            slot,
            self.workers,
            worker_end.fileno(),
            memory.fd,
            memory.rows,
            row,
            receiving,
            datagrams,
            fds,
            self._tls,
            self._state_dir,
        )
        inherited = [options.channel_fd, memory.fd, *chain(*fds), *datagrams]
        if receiving is not None:
            inherited.append(receiving)
        try:
            worker = await WorkerProcess.start(options, own_end, inherited)
        except BaseException:
            own_end.close()
            await self._release_row(row)
            raise
        finally:
            worker_end.close()
        self._processes.add(worker)
        self._spawn(self._watch(worker, slot))
        return worker

    def _check_not_draining(self) -> None:
        if self.is_draining:
            raise OSError("the router is draining")

    async def _watch(self, worker: WorkerProcess, slot: int) -> None:
        """Wait until a worker exits, and start its successor if that was not intended."""
        time = asyncio.get_running_loop().time
        started_at = time()
        status = await worker.process.wait()
        await run_until_cancelled(Background.WORKERS, partial(self._remove, worker))
        if self._slots[slot] is not worker or self.is_draining:
            return
        self._slots[slot] = None
        self.restarts += 1
        event(logger, "worker_died", level=logging.ERROR, worker=slot, pid=worker.process.pid, status=status)
        pause_s = 0.0 if time() - started_at > STABLE_S else self._pauses_s[slot]
        await run_until_cancelled(Background.WORKERS, self._share_sockets)
        await run_until_cancelled(Background.WORKERS, partial(self._refill, slot, pause_s))

    async def _remove(self, worker: WorkerProcess) -> None:
        """Retain the counters of a worker that has exited, and release its row."""
        worker.channel.close()
        if worker in self._processes:
            self._processes.discard(worker)
            present = [process.metrics for process in self.processes]
            self.metrics.add_exited(worker.metrics, present, self.configuration.series)
            self.sequence.replace(worker, None)
        await self._release_row(worker.row)

    async def _refill(self, slot: int, pause_s: float) -> None:
        """Try to start a worker until one is ready, with growing pauses."""
        while not self.is_draining and self._slots[slot] is None:
            await asyncio.sleep(pause_s)
            pause_s = self._pauses_s[slot] = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
            try:
                await self._replace(slot)
            except OSError as error:
                event(logger, "worker_not_started", level=logging.ERROR, worker=slot, reason=str(error))
            else:
                return

    async def _release_row(self, row: int) -> None:
        self._memory.clear(row)
        if self._queues:
            self._queues[row].clear()
        self._free_rows.add(row)
        await self._notify_changed()

    async def _retire(self, worker: WorkerProcess) -> None:
        """Drain a worker, retain its decisions, and end it."""
        await worker.drain(LINGER_S, timeout_s=self.configuration.drain_timeout_s + CALL_S)
        self.poller.add_decisions(worker)
        self.sequence.replace(worker, await worker.retained_decisions())
        await worker.end()

    async def _share_sockets(self) -> None:
        """Assign each slot's sockets to its worker, and to another one if that has exited or is silent.

        Workers that accept from more sockets get the command first, so that no socket is without one.
        """
        async with self._sharing:
            ready = [worker for worker in self.ready if worker in self._processes]
            if not self._is_open or self.is_draining:
                ready = []
            responsive = [worker for worker in ready if not worker.is_silent] or ready
            assigned: dict[WorkerProcess, list[int]] = {worker: [] for worker in self._processes}
            for slot, worker in enumerate(self._slots if ready else ()):
                if worker is not None and worker in ready:
                    assigned[worker].append(slot)
                if worker not in responsive:
                    assigned[responsive[slot % len(responsive)]].append(slot)
            for accepts in (True, False):
                chosen = [(worker, slots) for worker, slots in assigned.items() if bool(slots) is accepts]
                await asyncio.gather(*(run_or_kill(worker, partial(worker.listen, slots)) for worker, slots in chosen))

    # --- tasks ---

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            defect(logger, error, "supervisor")
