"""A router of several processes: its start and stop, and what the admin port shows of all workers together.

A replica's health and breaker are the worst that any worker reports, because a worker that finds it down sends it
nothing. A worker that has not checked the replica yet does not count. Loads and connections are added.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from routing.admin.api import info_lines, purge_memory_and_store
from routing.health.circuit_breaker import State
from routing.http.response import RejectedRequestError
from routing.http.sockets import bind
from routing.http.tls import Tls, TlsFiles
from routing.observability.metrics import PREFIX, header, process_lines
from routing.proxy.config_store import Applied, LastKnownGood, RetryLaterError, Signatures, Source
from routing.response_cache.memory import StorePurge
from routing.schema import CachePurge, PurgeResult
from routing.workers.messages import CallRejectedError
from routing.workers.metrics import lines, parse
from routing.workers.process import UNREACHABLE
from routing.workers.supervisor import NO_WORKER, Supervisor

WORKERS_TIMEOUT_S = 3.0  # how long a pushed configuration waits for starting workers; its sender waits longer
POLL_TIMEOUT_S = 1.0  # how long a response waits for a worker's state; then the last known one is used
_BY_HEALTH = ("down", "up", "unknown")  # worst first
_BY_STREAM = ("estimated", "replaying", "partial", "following", "unused")  # of KV events, worst first
_BY_BREAKER = (State.OPEN, State.HALF_OPEN, State.CLOSED)  # worst first
_SUMS = ("running", "waiting_tokens", "connections")


class WorkersView:
    """Admin view of a router with several worker processes."""

    def __init__(self, supervisor: Supervisor, version: str) -> None:
        self.name = supervisor.name
        self.boot = supervisor.boot
        self.store = supervisor.store
        self._supervisor = supervisor
        self._version = version
        self._next_worker = count()

    async def apply_config(self, document: bytes) -> Applied:
        """Activate a pushed configuration in all workers; NackError if one rejects it, RetryLaterError without any."""
        if not await self._supervisor.is_serving(WORKERS_TIMEOUT_S):
            raise RetryLaterError(NO_WORKER)
        return await self.store.apply(document, Source.PUSH)

    @property
    def not_ready_reason(self) -> str | None:
        """Why the router should get no traffic; None if it is ready."""
        if self._supervisor.is_stopping:
            return "draining"
        if self.store.applied is None:
            return "no configuration yet"
        return None if self._supervisor.ready else NO_WORKER

    @property
    def warming(self) -> dict[str, dict[str, int]]:
        """The progress of each replica that warms up, by name, as of the last poll."""
        return {row["name"]: row["warming"] for row in self._replica_rows() if row["warming"] is not None}

    async def metrics(self, *, all_buckets: bool = False) -> str:
        """Prometheus text; histograms with all non-empty buckets if ``all_buckets``."""
        supervisor = self._supervisor
        await supervisor.poller.poll(POLL_TIMEOUT_S)
        present = [worker.metrics for worker in supervisor.processes]
        parent_metrics = parse("\n".join(process_lines()))
        total = supervisor.metrics.total([*present, parent_metrics], supervisor.configuration.series)
        text = (*info_lines(self, self._version), *self._worker_lines(), *lines(total, all_buckets=all_buckets))
        return "\n".join(text) + "\n"

    @property
    def health_epoch(self) -> int | None:
        """None, because each worker has a ``health_epoch`` of its own."""
        return None

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica with its health and load."""
        await self._supervisor.poller.poll(POLL_TIMEOUT_S)
        return self._replica_rows()

    async def last_polled_replicas(self) -> list[dict[str, Any]]:
        """``replicas`` as of the last poll."""
        return self._replica_rows()

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, in the order in which the parent learned of them."""
        await self._supervisor.poller.poll(POLL_TIMEOUT_S)
        return await self._supervisor.sequence.after(after, limit, ratio)

    async def explain(self, request: bytes) -> dict[str, Any]:
        """The decision that a request would get now, by the next worker; RejectedRequestError if it gets none."""
        workers = self._supervisor.responsive
        start = next(self._next_worker) % len(workers) if workers else 0
        for worker in (*workers[start:], *workers[:start]):
            try:
                return await worker.explain(request)
            except UNREACHABLE:
                continue
        raise RejectedRequestError(503, NO_WORKER)

    async def purge_responses(self, purge: CachePurge) -> PurgeResult:
        """Remove entries of response caches from the memory of all workers and, by one of them, from the store."""
        return await purge_memory_and_store(purge, self._forget, self._purge_store)

    async def _forget(self, purge: CachePurge) -> tuple[int, str | None]:
        calls = [worker.forget_responses(purge) for worker in self._supervisor.processes]
        results = await asyncio.gather(*calls, return_exceptions=True)
        entries = [result for result in results if isinstance(result, int)]
        silent = len(results) - len(entries)
        return sum(entries), f"{silent} of {len(results)} worker processes did not respond" if silent else None

    async def _purge_store(self, purge: CachePurge) -> StorePurge | None:
        for worker in self._supervisor.responsive:
            try:
                return await worker.purge_store(purge)
            except (*UNREACHABLE, CallRejectedError):
                continue
        return StorePurge(0, None, NO_WORKER)

    def _replica_rows(self) -> list[dict[str, Any]]:
        return merged_rows(worker.replica_rows for worker in self._supervisor.processes)

    def _worker_lines(self) -> Iterator[str]:
        yield from header("workers", "gauge", "Worker processes that accept requests.")
        yield f"{PREFIX}workers {len(self._supervisor.responsive)}"
        yield from header("worker_restarts_total", "counter", "Worker processes that exited unexpectedly.")
        yield f"{PREFIX}worker_restarts_total {self._supervisor.restarts}"


def merged_rows(by_worker: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each replica, merged from those of all workers."""
    by_replica: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rows in by_worker:
        for row in rows:
            by_replica.setdefault((row["pool"], row["name"]), []).append(row)
    return [_merged(rows) for rows in by_replica.values()]


def _merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    worst = min(rows, key=lambda row: (_BY_HEALTH.index(row["health"]), _BY_BREAKER.index(row["breaker"])))
    warming = [row["warming"] for row in rows if row["warming"] is not None]
    return worst | {
        **{name: sum(row[name] for row in rows) for name in _SUMS},
        "breaker": min((row["breaker"] for row in rows), key=_BY_BREAKER.index),
        "ranks": [_sums(ranks) for ranks in zip(*(row["ranks"] for row in rows), strict=False)],
        "share": min(row["share"] for row in rows),
        "kv_events": _worst_streams([row["kv_events"] for row in rows if row.get("kv_events")]),
        "warming": _sums(warming) if warming else None,
        "last_ok_at": max((row["last_ok_at"] for row in rows if row["last_ok_at"]), default=None),
    }


def _worst_streams(streams: list[list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    """The KV event stream of each rank, of the worker that knows least; None if there are none."""
    worst = [min(ranks, key=lambda row: _BY_STREAM.index(row["state"])) for ranks in zip(*streams, strict=False)]
    return worst or None


def _sums(rows: Iterable[dict[str, int]]) -> dict[str, int]:
    first_row, *other_rows = rows
    return {name: value + sum(row[name] for row in other_rows) for name, value in first_row.items()}


class MultiProcess:
    """The data plane of a router of several processes."""

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
        Tls(tls)  # reports unusable files here instead of in every worker
        self._supervisor = Supervisor(name, files, workers, tls, signatures=signatures)
        self.view = WorkersView(self._supervisor, version)
        self.port = 0  # the bound port, once the server listens
        self._reuses_port = False
        self._document: bytes | None = None

    async def start(self, document: bytes | None) -> None:
        """Keep the configuration for the workers."""
        self._document = document

    async def open(self, host: str, port: int, *, reuse_port: bool) -> None:
        """Start workers that accept requests; OSError if the port is taken or a worker does not start."""
        slots = await bind(host, port, count=self._supervisor.workers, reuse_port=reuse_port)
        self.port = slots[0][0].getsockname()[1]
        self._reuses_port = reuse_port
        await self._supervisor.open(slots, self._document)

    def reload(self) -> None:
        """Start to replace every worker, one after the other."""
        self._supervisor.reload()

    async def drain(self) -> None:
        """Accept nothing more, and wait for the requests in flight."""
        await self._supervisor.drain(to_others=self._reuses_port)

    async def close(self) -> None:
        """Kill the workers that remain."""
        await self._supervisor.close()
