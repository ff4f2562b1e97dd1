"""One router as the admin port shows it: figures, replicas, decisions, a little at a time so that requests go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from routing.core.health.breaker import State
from routing.core.loads.book import LoadBook
from routing.core.targets import targets_of
from routing.core.token_ratio import TokenRatios
from routing.core.types import ReplicaId
from routing.proxy.admin.explain import explain
from routing.proxy.admin.view import about_lines
from routing.proxy.configuration.store import Applied, ConfigStore, Source
from routing.proxy.loop.turns import in_turns
from routing.proxy.metrics.exposition import PREFIX, header, labels
from routing.proxy.metrics.process import process_lines
from routing.proxy.router import Router
from routing.schema import ReplicaConfig


class RouterView:
    """One router, seen from outside."""

    def __init__(self, router: Router, version: str) -> None:
        self._router = router
        self._version = version

    @property
    def name(self) -> str:
        """The router's name."""
        return self._router.name

    @property
    def boot(self) -> str:
        """Tells one life of the router from the next."""
        return self._router.boot

    @property
    def store(self) -> ConfigStore:
        """The configuration in force."""
        return self._router.store

    async def take(self, document: bytes) -> Applied:
        """Put a pushed configuration into force; NackError if it is refused."""
        return await self.store.apply(document, Source.PUSH)

    @property
    def not_ready_reason(self) -> str | None:
        """Why no traffic should come here; None when it may."""
        return self._router.not_ready_reason

    @property
    def warming(self) -> dict[str, dict[str, int]]:
        """How far each replica is that warms up, by name."""
        return self._router.all_warm_ups.under_way()

    async def metrics(self, *, is_fine: bool = False) -> str:
        """Everything counted, as Prometheus text; histograms with all their edges where ``is_fine``."""
        about = about_lines(self, self._version)
        figures = self.figures(await self.replicas(), is_fine=is_fine)
        return "\n".join(await in_turns(chain(about, figures))) + "\n"

    @property
    def health_epoch(self) -> int | None:
        """Changes with any replica's health."""
        return self._router.health.epoch

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica, its health and its load."""
        return await in_turns(self._replica_rows())

    async def seen_replicas(self) -> list[dict[str, Any]]:
        """The same: nothing is between."""
        return await self.replicas()

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, oldest first, with this part of their block hashes."""
        page = self._router.decisions.page(after, limit, ratio)
        return page.as_json(await in_turns(page.shown()))

    async def explain(self, asked: bytes) -> dict[str, Any]:
        """The decision that a request would get now; RefusalError if it gets none."""
        return explain(self._router, asked)

    # --- rows and lines ---

    def figures(self, replicas: list[dict[str, Any]], *, is_fine: bool) -> Iterator[str]:
        """What was counted, and what is now; without what tells this router from others. Take it ``in_turns``."""
        router = self._router
        router.metrics.prune(router.knows)
        yield from router.metrics.lines(is_fine=is_fine)
        yield from self._failure_lines()
        yield from router.all_gates.lines(is_fine=is_fine)
        yield from router.all_warm_ups.lines()
        yield from _ratio_lines(router.token_ratios)
        yield from _replica_lines(replicas)
        yield from header("tasks", "gauge", "Asyncio tasks of the process: a few, and one for each health check.")
        yield f"{PREFIX}tasks {len(asyncio.all_tasks())}"
        yield from process_lines()

    def _replica_rows(self) -> Iterator[dict[str, Any]]:
        router, serving = self._router, self._router.serving
        for pool in serving.config.pools if serving else ():
            for replica in pool.replicas:
                name = ReplicaId(replica.name)
                finding, ranks = router.checks.finding(name), _loads(router.loads, replica)
                breaker = router.breakers.troubled.get(name)
                yield {
                    "pool": pool.name,
                    "name": replica.name,
                    "url": replica.url,
                    "state": replica.state,
                    "health": finding.health,
                    "breaker": router.breakers.state(name),
                    "reason": finding.reason or (breaker.reason if breaker else None),
                    "share": router.health.share(name),
                    "warming": router.all_warm_ups.progress(name),
                    "running": sum(running for running, _ in ranks),
                    "waiting_tokens": sum(tokens for _, tokens in ranks),
                    "ranks": [{"running": running, "waiting_tokens": tokens} for running, tokens in ranks],
                    "connections": serving.links[replica.name].connections if serving else 0,
                    "last_ok_at": finding.last_ok_at.isoformat() if finding.last_ok_at else None,
                }

    def _failure_lines(self) -> Iterator[str]:
        router = self._router
        yield from header("ejections_total", "counter", "Replicas taken out by their breakers, by why.")
        for (pool, replica, cause), count in list(router.breakers.opened.items()):
            what = labels(pool=pool, replica=replica, cause=cause)
            yield f"{PREFIX}ejections_total{{{what}}} {count}"
        yield from header("retries_refused_total", "counter", "Further tries for which the budget had no room.")
        yield f"{PREFIX}retries_refused_total {router.retry_budget.refused}"
        yield from header("connections_refused_total", "counter", "Connections over an address's limit.")
        yield f"{PREFIX}connections_refused_total {router.connection_limit.refused}"


def _loads(book: LoadBook, replica: ReplicaConfig) -> list[tuple[int, int]]:
    """Requests and waiting tokens that this process has at each rank of a replica."""
    loads = [book.load(target.id) for target in targets_of(replica)]
    return [(load.running - load.elsewhere_running, load.waiting_tokens - load.elsewhere_tokens) for load in loads]


def _ratio_lines(ratios: TokenRatios) -> Iterator[str]:
    """What was learnt of each pool's and model's tokens; nothing of those without a sample."""
    learnt = [(labels(pool=pool, model=model), it) for (pool, model), it in ratios.items() if it.samples]
    yield from header(
        "tokens_per_byte", "gauge", "Prompt tokens for each byte of a prompt, learnt from reported usage."
    )
    for what, ratio in learnt:
        yield f"{PREFIX}tokens_per_byte{{{what}}} {ratio.tokens_per_byte:.6g}"
    yield from header("tokens_per_byte_samples_total", "counter", "Responses that it was learnt from.")
    for what, ratio in learnt:
        yield f"{PREFIX}tokens_per_byte_samples_total{{{what}}} {ratio.samples}"


def _replica_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    gauges: tuple[tuple[str, str, Callable[[dict[str, Any]], object]], ...] = (
        ("replica_up", "Whether a replica answers its health check.", lambda row: int(row["health"] == "up")),
        (
            "replica_out",
            "Whether a replica's breaker keeps requests away.",
            lambda row: int(row["breaker"] != State.CLOSED),
        ),
        ("replica_share_ratio", "Part of its weight that a replica has.", lambda row: row["share"]),
        ("in_flight", "Requests sent to a replica and not ended.", lambda row: row["running"]),
        ("waiting_tokens", "Estimated prompt tokens without a first byte yet.", lambda row: row["waiting_tokens"]),
    )
    for name, text, value in gauges:
        yield from header(name, "gauge", text)
        for row in rows:
            if name == "replica_up" and row["health"] == "unknown":
                continue
            where = labels(pool=row["pool"], replica=row["name"])
            yield f"{PREFIX}{name}{{{where}}} {value(row)}"
