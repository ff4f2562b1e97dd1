"""One router process as the admin port shows it: metrics, replicas, decisions, explanations.

Long outputs are produced in slices, so that requests continue in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec
from msgspec import Struct

from routing.admin.api import info_lines
from routing.balancing.placement import Decision
from routing.balancing.replicas import targets_of
from routing.health.circuit_breaker import State
from routing.http.request import Request, RequestHead
from routing.http.response import RejectedRequestError
from routing.http.tasks import run_in_slices
from routing.observability.decision_log import Record, format_hash
from routing.observability.metrics import PREFIX, header, labels, process_lines
from routing.proxy.admission import PROMPT_PATHS, admit_request, rejection_of
from routing.proxy.config_store import Applied, Source
from routing.proxy.router import Router
from routing.proxy.services import ActiveConfiguration
from routing.schema import ReplicaConfig
from routing.types import ReplicaId, RoutingError


class ExplainRequest(Struct):
    """A client's request to explain."""

    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}
    key: str | None = None  # the name of its API key


def explain(router: Router, document: bytes) -> dict[str, Any]:
    """The decision as JSON; RejectedRequestError if the request gets none, or if ``document`` is invalid."""
    try:
        return _explained(router, msgspec.json.decode(document, type=ExplainRequest))
    except RoutingError as error:
        raise rejection_of(error) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RejectedRequestError(422, str(error)) from None


def _explained(router: Router, explained: ExplainRequest) -> dict[str, Any]:
    active = router.active
    if active is None:
        raise RejectedRequestError(503, "no configuration yet")
    if explained.path.encode() not in PROMPT_PATHS:
        raise RejectedRequestError(422, "path: not one that carries a prompt")
    if len(memoryview(explained.body)) > active.limits.max_body_bytes:
        raise RejectedRequestError(413, "body: larger than a client's may be")
    request = _client_request(explained, active)
    placement_request = admit_request(request, active.admission)
    decision = active.placement.decide(placement_request, router.balancer.health)
    hashes = active.placement.tier1_hashes(decision, placement_request)
    return Record.from_decision(decision, request.request_id).as_json() | {
        "model": decision.served.model,
        "adapter": decision.served.adapter or None,
        "trial": active.placement.canary_verdict(decision, placement_request),
        "tokens_per_byte": decision.keys.ratio.tokens_per_byte,
        "tier1": {
            "rule": decision.route.tier1,
            "bytes": decision.keys.tier1_bytes,
            "hash": format_hash(decision.keys.tier1),
            # the hash that each task group would have to claim to get this request
            "hash_by_group": {group: format_hash(tier1) for group, tier1 in hashes.items()},
        },
        "group_replicas": _group_replicas(decision),
        "refused": decision.choice.skipped,
        "bound": decision.choice.bound,
        "candidates": decision.candidate_costs().as_json(),
    }


def _client_request(explained: ExplainRequest, active: ActiveConfiguration) -> Request:
    """The request that a client would have sent; RejectedRequestError for an unknown API key."""
    headers = {name.lower(): value for name, value in explained.headers.items()}
    head = RequestHead(b"POST", explained.path.encode(), http11=True)
    head.session_id = headers.get("x-session-id") or None
    head.task_group = headers.get("x-task-group") or None
    request = Request(head, bytes(explained.body), headers.get("x-request-id", ""))
    if explained.key is not None:
        request.grant = active.access.grant_of(explained.key) if active.access else None
        if request.grant is None:
            raise RejectedRequestError(422, f"key: no API key is named {explained.key[:64]!r}")
    return request


def _group_replicas(decision: Decision) -> dict[str, Any] | None:
    """The replicas allocated to the group by its traffic, and its share; None if the configuration names them."""
    route = decision.route
    if not route.follows_traffic or route.shares is None:
        return None
    return {"share_ratio": route.shares.share(route.group), "replicas": route.shares.replicas(route.group)}


class RouterView:
    """The ``View`` of a single process."""

    def __init__(self, router: Router, version: str) -> None:
        self.name = router.name
        self.boot = router.boot
        self.store = router.store
        self._router = router
        self._version = version

    async def apply_config(self, document: bytes) -> Applied:
        """Activate a pushed configuration; NackError if it is rejected."""
        return await self.store.apply(document, Source.PUSH)

    @property
    def not_ready_reason(self) -> str | None:
        """Why the router should get no traffic; None if it is ready."""
        return self._router.not_ready_reason

    @property
    def warming(self) -> dict[str, dict[str, int]]:
        """The progress of each replica that warms up, by name."""
        return self._router.services.all_warm_ups.progress_by_replica()

    async def metrics(self, *, is_fine: bool = False) -> str:
        """Prometheus text; histograms with all non-empty buckets if ``is_fine``."""
        lines = self.metric_lines(await self.replicas(), is_fine=is_fine)
        return "\n".join(await run_in_slices(chain(info_lines(self, self._version), lines))) + "\n"

    @property
    def health_epoch(self) -> int | None:
        """Changes with any replica's health."""
        return self._router.balancer.health.epoch

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica with its health and load."""
        return await run_in_slices(self._replica_rows())

    async def last_polled_replicas(self) -> list[dict[str, Any]]:
        """The same, since there are no workers to poll."""
        return await self.replicas()

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, oldest first, with a sample ``ratio`` of their block hashes."""
        page = self._router.services.decisions.page(after, limit, ratio)
        return page.as_json(await run_in_slices(page.rows()))

    async def explain(self, request: bytes) -> dict[str, Any]:
        """The decision that a request would get now; RejectedRequestError if it gets none."""
        return explain(self._router, request)

    def _replica_rows(self) -> Iterator[dict[str, Any]]:
        router, active = self._router, self._router.active
        warming = self.warming
        for pool in active.config.pools if active else ():
            for replica in pool.replicas:
                name = ReplicaId(replica.name)
                status, loads = router.services.checks.status(name), self._loads(replica)
                breaker = router.balancer.breakers.not_closed.get(name)
                yield {
                    "pool": pool.name,
                    "name": replica.name,
                    "url": replica.url,
                    "state": replica.state,
                    "health": status.health,
                    "breaker": router.balancer.breakers.state(name),
                    "reason": status.reason or (breaker.reason if breaker else None),
                    "share": router.balancer.health.share(name),
                    "warming": warming.get(name),
                    "running": sum(running for running, _ in loads),
                    "waiting_tokens": sum(tokens for _, tokens in loads),
                    "ranks": [{"running": running, "waiting_tokens": tokens} for running, tokens in loads],
                    "connections": active.connection_pools[replica.name].connections if active else 0,
                    "last_ok_at": status.last_ok_at.isoformat() if status.last_ok_at else None,
                }

    def _loads(self, replica: ReplicaConfig) -> list[tuple[int, int]]:
        """Requests and waiting tokens of this process at each rank of a replica."""
        loads = [self._router.balancer.loads.load(target.id) for target in targets_of(replica)]
        return [(load.running - load.remote_running, load.waiting_tokens - load.remote_tokens) for load in loads]

    # --- metrics ---

    def metric_lines(self, replicas: list[dict[str, Any]], *, is_fine: bool) -> Iterator[str]:
        """All metrics but ``info_lines``. Produce them with ``run_in_slices``."""
        router = self._router
        if router.active is not None:
            router.services.metrics.prune(router.active.series)
        yield from router.services.metrics.lines(is_fine=is_fine)
        yield from self._failure_lines()
        yield from router.services.all_admission_queues.lines(is_fine=is_fine)
        yield from router.services.all_warm_ups.lines()
        yield from self._token_ratio_lines()
        yield from _replica_lines(replicas)
        yield from header("tasks", "gauge", "Asyncio tasks of the process: a few, and one for each health check.")
        yield f"{PREFIX}tasks {len(asyncio.all_tasks())}"
        yield from process_lines()

    def _failure_lines(self) -> Iterator[str]:
        router = self._router
        yield from header("ejections_total", "counter", "Replicas ejected by their circuit breakers, by cause.")
        for (pool, replica, cause), count in list(router.balancer.breakers.ejections.items()):
            yield f"{PREFIX}ejections_total{{{labels(pool=pool, replica=replica, cause=cause)}}} {count}"
        yield from header("retries_refused_total", "counter", "Retries that the retry budget did not allow.")
        yield f"{PREFIX}retries_refused_total {router.balancer.retry_budget.rejected}"
        yield from header("connections_refused_total", "counter", "Connections over an address's limit.")
        yield f"{PREFIX}connections_refused_total {router.connection_limit.rejected}"

    def _token_ratio_lines(self) -> Iterator[str]:
        """The measured tokens per byte of each pool and model with a sample."""
        ratios = self._router.balancer.token_ratios
        measured = [(labels(pool=pool, model=model), it) for (pool, model), it in ratios.items() if it.samples]
        text = "Prompt tokens for each byte of a prompt, measured from reported usage."
        yield from header("tokens_per_byte", "gauge", text)
        for pairs, ratio in measured:
            yield f"{PREFIX}tokens_per_byte{{{pairs}}} {ratio.tokens_per_byte:.6g}"
        yield from header("tokens_per_byte_samples_total", "counter", "Responses that it was measured from.")
        for pairs, ratio in measured:
            yield f"{PREFIX}tokens_per_byte_samples_total{{{pairs}}} {ratio.samples}"


def _replica_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    gauges: tuple[tuple[str, str, str], ...] = (
        ("replica_up", "health", "Whether a replica passes its health check."),
        ("replica_out", "breaker", "Whether a replica is ejected by its circuit breaker."),
        ("replica_share_ratio", "share", "Share of its weight that a replica has."),
        ("in_flight", "running", "Requests sent to a replica and not ended."),
        ("waiting_tokens", "waiting_tokens", "Estimated prompt tokens without a first byte yet."),
    )
    for name, field, text in gauges:
        yield from header(name, "gauge", text)
        for row in rows:
            value = row[field]
            if field == "health":
                if value == "unknown":
                    continue
                value = int(value == "up")
            elif field == "breaker":
                value = int(value != State.CLOSED)
            yield f"{PREFIX}{name}{{{labels(pool=row['pool'], replica=row['name'])}}} {value}"
