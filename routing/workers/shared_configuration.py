"""One configuration for all workers: ready in all of them, then on disk, then in force in all of them.

A worker that does not put it into force is killed; a new worker gets what is in force before it accepts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from routing.observability.metrics import ConfiguredSeries
from routing.proxy.config_store import ConfigStore, NackError, RetryLaterError, Swap
from routing.proxy.last_known_good import LastKnownGood, Signatures
from routing.proxy.services import target_ids
from routing.schema import Limits, LoadedSnapshot
from routing.workers.messages import DeclinedError, Preparation
from routing.workers.process import WorkerProcess, or_kill
from routing.workers.shared_state import SharedBoard, assign_columns, assign_gates, assign_rates

NO_WORKER = "no worker is running"


class SharedConfiguration:
    """What is in force in all workers, and how another one gets there."""

    def __init__(
        self,
        ready: Callable[[], list[WorkerProcess]],
        board: SharedBoard,
        files: LastKnownGood,
        signatures: Signatures | None,
    ) -> None:
        self.store = ConfigStore(self._prepare, files, signatures)
        self._ready = ready  # workers that accept
        self._board = board
        self._columns: dict[str, int] = {}  # of the board, by target
        self._rates: dict[str, int] = {}  # slots of shared limits, by name
        self._gates: dict[str, int] = {}
        self.series: ConfiguredSeries | None = None  # None: no configuration yet

    @property
    def drain_timeout_s(self) -> float:
        """How long a worker may take to end what runs."""
        applied = self.store.applied
        return (applied.snapshot.config.limits if applied else Limits()).drain_timeout_s

    async def bring_up_to_date(self, worker: WorkerProcess) -> None:
        """Put into force in a new worker what is in force in the others; the store is locked meanwhile."""
        applied = self.store.applied
        if applied is not None:
            await worker.prepare(Preparation(applied.snapshot.document, self._columns, self._rates, self._gates))
            await worker.commit()

    async def _prepare(self, snapshot: LoadedSnapshot) -> Swap:
        """Let every worker make it ready; NackError if one refuses, RetryLaterError if one is silent or none is."""
        columns = assign_columns(target_ids(snapshot.config), self._columns, self._board)
        rates = assign_rates(snapshot.config, self._rates, self._board.limits)
        gates = assign_gates(snapshot.config, self._gates, self._board.limits)
        preparation = Preparation(snapshot.document, columns, rates, gates)
        prepared = await self._prepared(snapshot, preparation)
        return partial(self._swap, snapshot, preparation, prepared)

    async def _prepared(self, snapshot: LoadedSnapshot, preparation: Preparation) -> list[WorkerProcess]:
        """The workers that have it ready; one that dies over it is none of them, and its successor gets it later."""
        processes = self._ready()
        if any(worker.is_silent for worker in processes):
            raise RetryLaterError("a worker does not answer")
        results = await asyncio.gather(*(worker.prepare(preparation) for worker in processes), return_exceptions=True)
        for result in results:
            if isinstance(result, DeclinedError):
                reason, path = result.facts.get("reason", "refused by a worker"), result.facts.get("path", "$")
                raise NackError(reason, path=path, revision=snapshot.revision)
            if isinstance(result, TimeoutError):
                raise RetryLaterError("a worker does not answer")
        prepared = [worker for worker, result in zip(processes, results, strict=True) if result is None]
        if not prepared:
            raise RetryLaterError(NO_WORKER)
        return prepared

    async def _swap(self, snapshot: LoadedSnapshot, preparation: Preparation, prepared: list[WorkerProcess]) -> None:
        """Put it into force."""
        self._columns, self._rates, self._gates = preparation.columns, preparation.rates, preparation.gates
        self.series = ConfiguredSeries(snapshot.config)
        await asyncio.gather(*(or_kill(worker, worker.commit) for worker in prepared))
