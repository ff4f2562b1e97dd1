"""One router as the admin port shows it: figures, replicas, decisions, a little at a time so that requests go on.

The decision that a request would get now, without anything being sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import msgspec
from msgspec import Struct

from routing.admin.api import about_lines
from routing.balancing.decision import Decision
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.rates import TokenRatios
from routing.balancing.replicas import targets_of
from routing.health.circuit_breaker import State
from routing.http.request import Request, RequestHead
from routing.http.response import RejectedRequestError
from routing.http.tasks import run_in_slices
from routing.observability.decision_record import Record, format_hash
from routing.observability.exposition import PREFIX, header, labels, process_lines
from routing.proxy.admission import PROMPT_PATHS, admit_request, rejection_of
from routing.proxy.config_store import Applied, ConfigStore, Source
from routing.proxy.router import Router
from routing.proxy.services import ActiveConfiguration
from routing.schema import ReplicaConfig
from routing.types import PrefixHash, ReplicaId, RoutingError


class ExplainRequest(Struct):
    """A request to explain: what a client would have sent."""

    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}
    key: str | None = None  # the name of its API key


def explain(router: Router, asked: bytes) -> dict[str, Any]:
    """The decision as JSON; RejectedRequestError if the request gets none, or if ``asked`` is none."""
    try:
        return _explained(router, msgspec.json.decode(asked, type=ExplainRequest))
    except RoutingError as error:
        raise rejection_of(error) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RejectedRequestError(422, str(error)) from None


def _explained(router: Router, request: ExplainRequest) -> dict[str, Any]:
    active = router.active
    if active is None:
        raise RejectedRequestError(503, "no configuration yet")
    path = request.path.encode()
    if path not in PROMPT_PATHS:
        raise RejectedRequestError(422, "path: not one that carries a prompt")
    if len(memoryview(request.body)) > active.limits.max_body_bytes:
        raise RejectedRequestError(413, "body: larger than a client's may be")
    asked = _as_request(request, active)
    placement_request = admit_request(asked, active.admission)
    decision = active.placement.decide(placement_request, router.balancer.health)
    record = Record.from_decision(decision, asked.request_id)
    return record.as_json() | {
        "model": decision.served.model,
        "adapter": decision.served.adapter or None,
        "trial": active.placement.canary_verdict(decision, placement_request),
        "tokens_per_byte": decision.keys.ratio.tokens_per_byte,
        "tier1": _tier1(decision, active.placement.tier1_hashes(decision, placement_request)),
        "group_replicas": _group_replicas(decision),
        "refused": decision.choice.skipped,
        "bound": decision.choice.bound,
        "candidates": decision.candidate_costs().as_json(),
    }


def _as_request(asked: ExplainRequest, active: ActiveConfiguration) -> Request:
    """The request that a client would have sent; RejectedRequestError for a key that nobody has."""
    headers = {name.lower(): value for name, value in asked.headers.items()}
    head = RequestHead(b"POST", asked.path.encode(), http11=True)
    head.session_id = headers.get("x-session-id") or None
    head.task_group = headers.get("x-task-group") or None
    request = Request(head, bytes(asked.body), headers.get("x-request-id", ""))
    if asked.key is not None:
        request.grant = active.access.grant_of(asked.key) if active.access else None
        if request.grant is None:
            raise RejectedRequestError(422, f"key: no API key is named {asked.key[:64]!r}")
    return request


def _group_replicas(decision: Decision) -> dict[str, Any] | None:
    """The set that follows the group's traffic, and its part of that; None where the configuration says the set."""
    route = decision.route
    if not route.follows_traffic or route.shares is None:
        return None
    return {"share_ratio": route.shares.share(route.group), "replicas": route.shares.replicas(route.group)}


def _tier1(decision: Decision, by_group: dict[str, PrefixHash | None]) -> dict[str, Any]:
    """Where the opening ended and its hash, and which hash each task group would have to claim to get this request."""
    return {
        "rule": decision.route.tier1,
        "bytes": decision.keys.tier1_bytes,
        "hash": format_hash(decision.keys.tier1),
        "hash_by_group": {group: format_hash(found) for group, found in by_group.items()},
    }


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

    async def apply_config(self, document: bytes) -> Applied:
        """Put a pushed configuration into force; NackError if it is refused."""
        return await self.store.apply(document, Source.PUSH)

    @property
    def not_ready_reason(self) -> str | None:
        """Why no traffic should come here; None when it may."""
        return self._router.not_ready_reason

    @property
    def warming(self) -> dict[str, dict[str, int]]:
        """How far each replica is that warms up, by name."""
        return self._router.services.all_warm_ups.progress_by_replica()

    async def metrics(self, *, is_fine: bool = False) -> str:
        """Everything counted, as Prometheus text; histograms with all their edges where ``is_fine``."""
        about = about_lines(self, self._version)
        figures = self.figures(await self.replicas(), is_fine=is_fine)
        return "\n".join(await run_in_slices(chain(about, figures))) + "\n"

    @property
    def health_epoch(self) -> int | None:
        """Changes with any replica's health."""
        return self._router.balancer.health.epoch

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica, its health and its load."""
        return await run_in_slices(self._replica_rows())

    async def last_polled_replicas(self) -> list[dict[str, Any]]:
        """The same: nothing is between."""
        return await self.replicas()

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, oldest first, with this part of their block hashes."""
        page = self._router.services.decisions.page(after, limit, ratio)
        return page.as_json(await run_in_slices(page.shown()))

    async def explain(self, asked: bytes) -> dict[str, Any]:
        """The decision that a request would get now; RejectedRequestError if it gets none."""
        return explain(self._router, asked)

    # --- rows and lines ---

    def figures(self, replicas: list[dict[str, Any]], *, is_fine: bool) -> Iterator[str]:
        """What was counted, and what is now; without what tells this router from others. Take it ``run_in_slices``."""
        router = self._router
        if router.active is not None:
            router.services.metrics.prune(router.active.series)
        yield from router.services.metrics.lines(is_fine=is_fine)
        yield from self._failure_lines()
        yield from router.services.all_admission_queues.lines(is_fine=is_fine)
        yield from router.services.all_warm_ups.lines()
        yield from _ratio_lines(router.balancer.token_ratios)
        yield from _replica_lines(replicas)
        yield from header("tasks", "gauge", "Asyncio tasks of the process: a few, and one for each health check.")
        yield f"{PREFIX}tasks {len(asyncio.all_tasks())}"
        yield from process_lines()

    def _replica_rows(self) -> Iterator[dict[str, Any]]:
        router, active = self._router, self._router.active
        for pool in active.config.pools if active else ():
            for replica in pool.replicas:
                name = ReplicaId(replica.name)
                finding, ranks = router.services.checks.status(name), _loads(router.balancer.loads, replica)
                breaker = router.balancer.breakers.not_closed.get(name)
                yield {
                    "pool": pool.name,
                    "name": replica.name,
                    "url": replica.url,
                    "state": replica.state,
                    "health": finding.health,
                    "breaker": router.balancer.breakers.state(name),
                    "reason": finding.reason or (breaker.reason if breaker else None),
                    "share": router.balancer.health.share(name),
                    "warming": router.services.all_warm_ups.progress_by_replica().get(name),
                    "running": sum(running for running, _ in ranks),
                    "waiting_tokens": sum(tokens for _, tokens in ranks),
                    "ranks": [{"running": running, "waiting_tokens": tokens} for running, tokens in ranks],
                    "connections": active.connection_pools[replica.name].connections if active else 0,
                    "last_ok_at": finding.last_ok_at.isoformat() if finding.last_ok_at else None,
                }

    def _failure_lines(self) -> Iterator[str]:
        router = self._router
        yield from header("ejections_total", "counter", "Replicas taken out by their breakers, by why.")
        for (pool, replica, cause), count in list(router.balancer.breakers.ejections.items()):
            what = labels(pool=pool, replica=replica, cause=cause)
            yield f"{PREFIX}ejections_total{{{what}}} {count}"
        yield from header("retries_refused_total", "counter", "Further tries for which the budget had no room.")
        yield f"{PREFIX}retries_refused_total {router.balancer.retry_budget.rejected}"
        yield from header("connections_refused_total", "counter", "Connections over an address's limit.")
        yield f"{PREFIX}connections_refused_total {router.connection_limit.rejected}"


def _loads(book: LoadTracker, replica: ReplicaConfig) -> list[tuple[int, int]]:
    """Requests and waiting tokens that this process has at each rank of a replica."""
    loads = [book.load(target.id) for target in targets_of(replica)]
    return [(load.running - load.remote_running, load.waiting_tokens - load.remote_tokens) for load in loads]


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
