"""One configuration for all workers: prepared by all of them, then written to disk, then activated by all of them.

A worker that fails to activate it is killed; a new worker gets the active configuration before it accepts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from routing.balancing.replicas import target_ids
from routing.observability.metrics import ConfiguredSeries
from routing.proxy.config_store import ConfigStore, LastKnownGood, NackError, RetryLaterError, Signatures, Swap
from routing.schema import Limits, LoadedSnapshot
from routing.workers.messages import CallRejectedError, Preparation
from routing.workers.process import WorkerProcess, run_or_kill
from routing.workers.shared_state import SharedBoard, assign_columns, assign_queues, assign_rates

NO_WORKER = "no worker is running"
SILENT_WORKER = "a worker does not respond"


class SharedConfiguration:
    """The active configuration of all workers. ``ready`` returns the workers that accept."""

    def __init__(
        self,
        ready: Callable[[], list[WorkerProcess]],
        board: SharedBoard,
        files: LastKnownGood,
        signatures: Signatures | None,
    ) -> None:
        self.store = ConfigStore(self._prepare, files, signatures)
        self.series: ConfiguredSeries | None = None  # None: no configuration yet
        self._ready = ready
        self._board = board
        self._columns: dict[str, int] = {}  # of the board, by target
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
            await worker.prepare(Preparation(applied.snapshot.document, self._columns, self._rates, self._queues))
            await worker.commit()

    async def _prepare(self, snapshot: LoadedSnapshot) -> Swap:
        """Let every worker prepare a configuration; NackError if one rejects it, RetryLaterError if one is silent.

        RetryLaterError also without workers. One that dies meanwhile is ignored: its successor gets the configuration.
        """
        columns = assign_columns(target_ids(snapshot.config), self._columns, self._board)
        rates = assign_rates(snapshot.config, self._rates, self._board.limits)
        queues = assign_queues(snapshot.config, self._queues, self._board.limits)
        preparation = Preparation(snapshot.document, columns, rates, queues)
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
        self._columns, self._rates, self._queues = preparation.columns, preparation.rates, preparation.queues
        self.series = ConfiguredSeries(snapshot.config)
        await asyncio.gather(*(run_or_kill(worker, worker.commit) for worker in prepared))
