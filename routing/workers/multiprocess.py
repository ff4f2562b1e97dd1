"""What the admin port shows of all workers together.

Of a replica's health and breaker the worst counts that any worker found: one that holds it for down sends it nothing. A
worker that has not asked yet does not count. Loads and connections add up.

A router in several processes: the parent's part, from open to closed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from routing.admin.api import info_lines
from routing.health.circuit_breaker import State
from routing.http.response import RejectedRequestError
from routing.http.sockets import bind
from routing.http.tls import Tls, TlsFiles
from routing.observability.exposition import PREFIX, header, process_lines
from routing.proxy.config_store import Applied, RetryLaterError, Source
from routing.proxy.last_known_good import LastKnownGood, Signatures
from routing.workers.metrics import lines, parse
from routing.workers.process import GONE
from routing.workers.shared_configuration import NO_WORKER
from routing.workers.supervisor import Supervisor

TAKE_S = 3.0  # that a configuration waits for workers that start: less than whoever pushes it waits
POLL_S = 1.0  # that an answer waits for a worker's figures; then those seen last have to do
_BY_HEALTH = ("down", "up", "unknown")  # the first that any worker found
_BY_BREAKER = (State.OPEN, State.HALF_OPEN, State.CLOSED)
_SUMS = ("running", "waiting_tokens", "connections")


class WorkersView:
    """One router of several processes, seen from outside."""

    def __init__(self, supervisor: Supervisor, version: str) -> None:
        self.name = supervisor.name
        self.boot = secrets.token_hex(8)  # identifies this run of the parent
        self.store = supervisor.store
        self._supervisor = supervisor
        self._version = version
        self._turn = count()

    async def apply_config(self, document: bytes) -> Applied:
        """Put a pushed configuration into force in all workers; NackError if one refuses, else RetryLaterError."""
        if not await self._supervisor.is_serving(TAKE_S):
            raise RetryLaterError(NO_WORKER)
        return await self.store.apply(document, Source.PUSH)

    @property
    def not_ready_reason(self) -> str | None:
        """Why no traffic should come here; None when it may."""
        if self._supervisor.is_stopping:
            return "draining"
        if self.store.applied is None:
            return "no configuration yet"
        return None if self._supervisor.ready else NO_WORKER

    @property
    def warming(self) -> dict[str, dict[str, int]]:
        """How far each replica is that warms up, by name, when the workers were last seen."""
        rows = merged_rows(worker.rows for worker in self._supervisor.processes)
        return {row["name"]: row["warming"] for row in rows if row["warming"] is not None}

    async def metrics(self, *, is_fine: bool = False) -> str:
        """Everything counted, as Prometheus text; histograms with all their edges where ``is_fine``."""
        supervisor = self._supervisor
        await supervisor.poller.poll(POLL_S)
        present = [worker.figures for worker in supervisor.processes]
        total = supervisor.counts.total([*present, parse("\n".join(process_lines()))], supervisor.configuration.series)
        return (
            "\n".join((*info_lines(self, self._version), *self._worker_lines(), *lines(total, is_fine=is_fine))) + "\n"
        )

    @property
    def health_epoch(self) -> int | None:
        """Workers have one each, and tell none."""
        return None

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica, its health and its load."""
        await self._supervisor.poller.poll(POLL_S)
        return await self.last_polled_replicas()

    async def last_polled_replicas(self) -> list[dict[str, Any]]:
        """The same, when the workers were last seen: at no cost to them."""
        return merged_rows(worker.rows for worker in self._supervisor.processes)

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, oldest first by when the parent learned of them."""
        await self._supervisor.poller.poll(POLL_S)
        return await self._supervisor.sequence.after(after, limit, ratio)

    async def explain(self, asked: bytes) -> dict[str, Any]:
        """Placement decision a request would get now, from the next worker; RejectedRequestError if it gets none."""
        ready = self._supervisor.awake
        turn = next(self._turn)
        for worker in [*ready[turn % len(ready) :], *ready[: turn % len(ready)]] if ready else ():
            try:
                return await worker.explain(asked)
            except GONE:
                continue
        raise RejectedRequestError(503, NO_WORKER)

    def _worker_lines(self) -> Iterator[str]:
        supervisor = self._supervisor
        yield from header("workers", "gauge", "Worker processes that accept requests.")
        yield f"{PREFIX}workers {len(supervisor.awake)}"
        yield from header("worker_restarts_total", "counter", "Worker processes that ended unasked.")
        yield f"{PREFIX}worker_restarts_total {supervisor.restarts}"


def merged_rows(by_worker: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each replica, out of every worker's."""
    by_replica: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rows in by_worker:
        for row in rows:
            by_replica.setdefault((row["pool"], row["name"]), []).append(row)
    return [_merged(rows) for rows in by_replica.values()]


def _merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    worst = min(rows, key=lambda row: (_BY_HEALTH.index(row["health"]), _BY_BREAKER.index(row["breaker"])))
    last_ok_at = max((row["last_ok_at"] for row in rows if row["last_ok_at"]), default=None)
    sums = {name: sum(row[name] for row in rows) for name in _SUMS}
    ranks = [
        {name: sum(rank[name] for rank in same) for name in same[0]}
        for same in zip(*(row["ranks"] for row in rows), strict=False)
    ]
    warming = [row["warming"] for row in rows if row["warming"] is not None]
    return (
        worst
        | sums
        | {
            "breaker": min((row["breaker"] for row in rows), key=_BY_BREAKER.index),
            "ranks": ranks,
            "share": min(row["share"] for row in rows),
            "warming": {name: sum(it[name] for it in warming) for name in warming[0]} if warming else None,
            "last_ok_at": last_ok_at,
        }
    )


class MultiProcess:
    """The supervisor and what the admin port shows of it."""

    def __init__(
        self,
        name: str,
        files: LastKnownGood,
        version: str,
        workers: int,
        tls: TlsFiles,
        *,
        signatures: Signatures | None = None,
    ) -> None:
        Tls(tls)  # files that cannot be used are better found out here than by every worker
        self._supervisor = Supervisor(name, files, workers, tls, signatures=signatures)
        self.view = WorkersView(self._supervisor, version)
        self.port = 0  # the real one, once open
        self._reuses_port = False
        self._document: bytes | None = None

    async def start(self, document: bytes | None) -> None:
        """Keep the configuration for the workers."""
        self._document = document

    async def open(self, host: str, port: int, *, reuse_port: bool) -> None:
        """Start workers that accept requests; OSError where the port is taken or a worker does not start."""
        slots = await bind(host, port, count=self._supervisor.workers, reuse_port=reuse_port)
        self.port = slots[0][0].getsockname()[1]
        self._reuses_port = reuse_port
        await self._supervisor.open(slots, self._document)

    def reload(self) -> None:
        """Begin to replace every worker, one after the other."""
        self._supervisor.roll()

    async def drain(self) -> None:
        """Accept nothing more, and let what runs finish."""
        await self._supervisor.drain(to_others=self._reuses_port)

    async def close(self) -> None:
        """End everything that is left."""
        await self._supervisor.close()
