"""The HTTP API of the admin port: configuration in; state, metrics and decisions out. It uses aiohttp.

With a token set, every path but ``/healthz``, ``/readyz`` and ``/metrics`` requires it. Without one the port is bound
to the loopback address and accepts only requests whose Host is a loopback address. This prevents DNS rebinding, where a
web page uses a host name of its own that resolves to the loopback address.

``RouterView`` is one router process as the admin port shows it. Long outputs are produced in slices, so that requests
continue in between.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import platform
import ssl
from collections.abc import Awaitable, Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import chain
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from msgspec import Struct

from routing.balancing.placement import Decision
from routing.balancing.replicas import HealthRegistry, targets_of
from routing.balancing.saturation import SaturationMeter
from routing.health import circuit_breaker
from routing.health.circuit_breaker import State
from routing.http.request import SESSION_HEADERS, Request, RequestHead
from routing.http.response import RejectedRequestError
from routing.http.tasks import run_in_slices
from routing.log import defect
from routing.observability.decision_log import Record, format_hash
from routing.observability.metrics import PREFIX, header, labels, process_lines
from routing.paths import BODIES
from routing.process import few_files
from routing.proxy.admission import admit_request, rejection_of
from routing.proxy.config_store import Applied, ConfigStore, NackError, RetryLaterError, Source
from routing.proxy.prefill_leg import check_parameters, plan_prefill
from routing.proxy.router import CloseReason, Router
from routing.proxy.services import ActiveConfiguration
from routing.response_cache.memory import StorePurge
from routing.schema import CachePurge, PurgeResult, ReplicaConfig, is_loopback, without_secrets
from routing.types import ReplicaId, RoutingError

MAX_BODY_BYTES = 64 << 20  # of a configuration; a thousand replicas take a quarter of a megabyte
MAX_DECISIONS = 1000  # per page
RETRY_AFTER_S = 2  # for a configuration that no worker could check
SATURATION_LINES = (  # metric, attribute of Saturation, help text
    ("pool_saturation_ratio", "ratio", "Share of the replicas' prefill rate that this router's requests need."),
    ("pool_waiting_work_seconds", "waiting_s", "Time that the replicas need for this router's waiting tokens."),
    ("pool_prefill_tokens_per_second", "tokens_per_s", "Measured prefill rate of all serving replicas."),
)
OWN_REQUEST_LINES = (  # metric, help text
    ("own_requests_total", "The router's own requests for one token that engines completed."),
    ("own_prompt_tokens_total", "Prompt tokens of these."),
    ("own_cached_tokens_total", "Those of them that came from the prefix cache."),
)
_OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})

logger = logging.getLogger(__name__)
# aiohttp logs requests that are not HTTP, and would quote the token in them.
_silent = logging.Logger("silent", logging.CRITICAL + 1)  # noqa: LOG001 - outside the hierarchy, so nothing enables it
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_compiled() -> bool:
    """Whether the hot modules are native code; checks only one, because they are compiled together."""
    return circuit_breaker.__file__.endswith(tuple(EXTENSION_SUFFIXES))


def build_info(version: str) -> dict[str, Any]:
    """Version, build and Python, as texts, for the log and for labels."""
    return {
        "version": version,
        "compiled": "true" if is_compiled() else "false",
        "python": platform.python_version(),
    }


class View(Protocol):
    """What the admin port needs of a router: one process, or several workers together."""

    name: str
    boot: str  # identifies this run of the router
    store: ConfigStore

    async def apply_config(self, document: bytes) -> Applied:
        """Activate a pushed configuration; NackError if it is rejected, RetryLaterError if it could not be checked."""
        ...

    @property
    def not_ready_reason(self) -> str | None:
        """Why the router should get no traffic; None if it is ready."""
        ...

    @property
    def warming(self) -> dict[str, dict[str, int]]:
        """The progress of each replica that warms up, by name."""
        ...

    async def metrics(self, *, all_buckets: bool = False) -> str:
        """Prometheus text; histograms with all non-empty buckets if ``all_buckets``."""
        ...

    @property
    def health_epoch(self) -> int | None:
        """A number that changes whenever a replica's health changes; None if the view has no such number."""
        ...

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica with its health and load."""
        ...

    async def last_polled_replicas(self) -> list[dict[str, Any]]:
        """``replicas`` as of the last poll of the workers, for frequent calls."""
        ...

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, oldest first, with a sample ``ratio`` of their block hashes."""
        ...

    async def explain(self, request: bytes) -> dict[str, Any]:
        """The decision that a request would get now; RejectedRequestError if it gets none."""
        ...

    async def purge_responses(self, purge: CachePurge) -> PurgeResult:
        """Remove entries of response caches from the memory of all processes and from the store."""
        ...


def info_lines(view: View, version: str) -> Iterator[str]:
    """Prometheus text about the router and its active configuration."""
    yield from header("info", "gauge", "Name, version and build of this router.")
    yield f"{PREFIX}info{{{labels(router=view.name, boot=view.boot, **build_info(version))}}} 1"
    applied = view.store.applied
    if applied is not None:
        yield from header("config_revision", "gauge", "Revision of the active configuration.")
        yield f"{PREFIX}config_revision {applied.snapshot.revision}"
        yield from header(
            "config_applied_timestamp_seconds", "gauge", "Unix time at which the active configuration was activated."
        )
        yield f"{PREFIX}config_applied_timestamp_seconds {applied.at.timestamp()}"


class AdminPort:
    """The admin port: an address and its handlers."""

    def __init__(self, view: View) -> None:
        self.port = 0  # the bound port, once the server listens
        self._view = view
        self._runner: web.AppRunner | None = None

    async def open(self, host: str, port: int, token: str | None, tls: ssl.SSLContext | None = None) -> None:
        """Serve, over TLS if ``tls`` is set; OSError if the port is taken. Bind to the loopback without a token."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_authorization(token), _json_errors])
        app.add_routes(
            [
                web.get("/healthz", self.healthz),
                web.get("/readyz", self.readyz),
                web.get("/metrics", self.metrics),
                web.get("/admin/config", self.read_config),
                web.put("/admin/config", self.put_config),
                web.get("/admin/replicas", self.replicas),
                web.get("/admin/decisions", self.decisions),
                web.post("/admin/explain", self.explain),
                web.post("/admin/response-cache/purge", self.purge_responses),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, logger=_silent, auto_decompress=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=tls).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def healthz(self, _: web.Request) -> web.Response:
        """Liveness: 200 while the process runs."""
        return _json({"status": "ok"})

    async def readyz(self, _: web.Request) -> web.Response:
        """Readiness for traffic. It does not depend on the control plane."""
        reason = self._view.not_ready_reason
        if reason is not None:
            return _json({"status": "not_ready", "reason": reason}, status=503)
        text = few_files()
        warning = {} if text is None else {"warning": text}
        return _json({"status": "ready", "revision": self._view.store.revision, **warning})

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text. ``?buckets=fine``: histograms with all non-empty buckets."""
        buckets = request.query.get("buckets")
        if buckets not in (None, "fine"):
            return _json({"error": "buckets: expected fine, or no such parameter"}, status=400)
        text = await self._view.metrics(all_buckets=buckets == "fine")
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def read_config(self, _: web.Request) -> web.Response:
        """The active configuration, and the last rejection."""
        store = self._view.store
        applied, nack = store.applied, store.last_nack
        return _json(
            {
                "router": self._view.name,
                "boot": self._view.boot,
                "revision": applied.snapshot.revision if applied else None,
                "sha256": applied.snapshot.sha256 if applied else None,
                "applied_at": applied.at.isoformat() if applied else None,
                "source": applied.source if applied else None,
                "signature": store.signature,
                "config": without_secrets(applied.snapshot.config) if applied else None,
                "last_nack": nack.as_json() if nack else None,
            }
        )

    async def put_config(self, request: web.Request) -> web.Response:
        """Take a snapshot: acknowledged once it is on disk and active, or rejected with the reason."""
        store = self._view.store
        try:
            applied = await self._view.apply_config(await request.read())
        except NackError as nack:
            body = {"status": "nack", "reason": nack.reason, "path": nack.path, "running_revision": store.revision}
            return _json(body, status=409 if nack.is_conflict else 422)
        except RetryLaterError as error:
            body = {"status": "not_now", "reason": error.reason, "running_revision": store.revision}
            return _json(body, status=503, headers={"Retry-After": str(RETRY_AFTER_S)})
        return _json({**applied.as_ack(), "signature": store.signature})

    async def replicas(self, _: web.Request) -> web.Response:
        """Every configured replica with its health and load."""
        return _json({"replicas": await self._view.replicas()})

    async def decisions(self, request: web.Request) -> web.Response:
        """Decisions after a sequence number, oldest first; ``blocks`` is the ratio of their block hashes to return."""
        after = _number(request, "after", 0)
        limit = min(_number(request, "limit", MAX_DECISIONS), MAX_DECISIONS)
        page = await self._view.decisions(after, limit, _ratio(request, "blocks"))
        return _json({"boot": self._view.boot, **page})

    async def explain(self, request: web.Request) -> web.Response:
        """The decision that a request would get now. Nothing is sent to a replica."""
        return _json(await self._view.explain(await request.read()))

    async def purge_responses(self, request: web.Request) -> web.Response:
        """Remove entries of response caches; 503 if some may be left, and ``problem`` says why."""
        if self._view.store.applied is None:
            return _json({"error": "no configuration yet"}, status=503)
        try:
            purge = msgspec.json.decode(await request.read(), type=CachePurge)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _json({"error": str(error)}, status=422)
        result = await self._view.purge_responses(purge)
        return _json(result, status=200 if result.problem is None else 503)


def _authorization(token: str | None) -> Any:
    @web.middleware
    async def authorization(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _OPEN_PATHS:
            return await handler(request)
        if token is None and not _has_loopback_host(request):
            return _json({"error": "without a token this port is http://localhost or a loopback address"}, status=403)
        if token is not None and not _has_token(request, token):
            return _json({"error": "unauthorized"}, status=401, headers={"WWW-Authenticate": "Bearer"})
        # A small body that decompresses to a large one would delay requests.
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            return _json({"error": "compressed bodies are not supported"}, status=415)
        return await handler(request)

    return authorization


def _has_loopback_host(request: web.Request) -> bool:
    try:
        return is_loopback(urlsplit(f"//{request.host}").hostname or "")
    except ValueError:
        return False


def _has_token(request: web.Request, token: str) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _json({"error": error.text or error.reason}, status=error.status)
    except RejectedRequestError as error:
        return _json({"error": error.message}, status=error.status)
    except (web.RequestPayloadError, ConnectionError):  # the client is gone
        return _json({"error": "the request body is incomplete"}, status=400)
    except Exception as error:  # noqa: BLE001 - exception boundary of the port
        defect(logger, error, f"admin {request.path}")
        return _json({"error": "internal error"}, status=500)


def _json(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, headers=headers, content_type="application/json"
    )


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 18:
        raise web.HTTPUnprocessableEntity(text=f"{name}: expected a whole number")
    return int(text)


def _ratio(request: web.Request, name: str) -> float:
    """A number from 0 to 1, by default 1."""
    try:
        ratio = float(request.query.get(name, "1"))
    except ValueError:
        ratio = math.nan
    if not 0 <= ratio <= 1:
        raise web.HTTPUnprocessableEntity(text=f"{name}: expected a number from 0 to 1")
    return ratio


class ExplainRequest(Struct):
    """A client's request to explain."""

    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}
    key: str | None = None  # the name of its API key


def explain(router: Router, document: bytes) -> dict[str, Any]:
    """The decision as JSON; RejectedRequestError if the request gets none, or if ``document`` is invalid."""
    try:
        return _explanation(router, msgspec.json.decode(document, type=ExplainRequest))
    except RoutingError as error:
        raise rejection_of(error) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RejectedRequestError(422, str(error)) from None


def _explanation(router: Router, explained: ExplainRequest) -> dict[str, Any]:
    """The decision as JSON, with everything that led to it."""
    active = router.active
    if active is None:
        raise RejectedRequestError(503, "no configuration yet")
    if explained.path not in BODIES:
        raise RejectedRequestError(422, "path: not one that carries a prompt")
    if len(memoryview(explained.body)) > active.limits.max_body_bytes:
        raise RejectedRequestError(413, "body: larger than a client's may be")
    request = _client_request(explained, active)
    placement_request = admit_request(request, active.admission)
    decision = active.placement.decide(placement_request, router.balancer.health)
    prefill = _prefill(decision, request, active, router.balancer.health)
    hashes = active.placement.tier1_hashes(decision, placement_request)
    caches, scope = router.services.response_caches, active.admission.cache_scope(request, placement_request)
    return Record.from_decision(decision, request.request_id).as_json() | {
        "model": decision.served.model,
        "adapter": decision.served.adapter or None,
        "canary": active.placement.canary_verdict(decision, placement_request),
        "tokens_per_byte": decision.keys.ratio.tokens_per_byte,
        "tier1": {
            "rule": decision.route.tier1,
            "bytes": decision.keys.tier1_bytes,
            "hash": format_hash(decision.keys.tier1),
            # the hash that each task group would have to claim to get this request
            "hash_by_group": {group: format_hash(tier1) for group, tier1 in hashes.items()},
        },
        "prefill": prefill,
        # None: the request's group has no response cache. A hit has no decision: nothing is placed.
        "response_cache": None if caches is None or scope is None else caches.explain(request, scope),
        "rejected": decision.choice.skipped,
        "candidates": decision.candidate_costs().as_json(),
    }


def _prefill(
    decision: Decision, request: Request, active: ActiveConfiguration, health: HealthRegistry
) -> dict[str, Any] | None:
    """The replica that would prefill the prompt first, or why none would; None if no replica has a role."""
    route = decision.route.prefill
    if route is None:
        return None
    check_parameters(request)
    plan = plan_prefill(request, decision, active.placement, health)
    return {
        "replica": None if plan.target is None else plan.target.replica,
        "skipped": plan.skipped,
        "uncached_tokens": plan.uncached_tokens,
        "min_uncached_tokens": route.min_uncached_tokens,
        "hit_tokens": None if plan.target is None else plan.target.choice.hit_tokens,
    }


def _client_request(explained: ExplainRequest, active: ActiveConfiguration) -> Request:
    """The request that a client would have sent; RejectedRequestError for an unknown API key."""
    headers = {name.lower(): value for name, value in explained.headers.items()}
    head = RequestHead(b"POST", explained.path.encode(), http11=True)
    names = [name.decode() for name in SESSION_HEADERS]
    head.lines = b"".join(f"{name}: {value}\r\n".encode("latin-1", "replace") for name, value in headers.items())
    head.session_id = next((headers[name] for name in names if headers.get(name)), None)
    head.task_group = headers.get("x-task-group") or None
    request = Request(head, bytes(explained.body), headers.get("x-request-id", ""))
    if explained.key is not None:
        request.grant = active.access.grant_of(explained.key) if active.access else None
        if request.grant is None:
            raise RejectedRequestError(422, f"key: no API key is named {explained.key[:64]!r}")
    return request


async def purge_memory_and_store(
    purge: CachePurge,
    forget: Callable[[CachePurge], Awaitable[tuple[int, str | None]]],
    purge_store: Callable[[CachePurge], Awaitable[StorePurge | None]],
) -> PurgeResult:
    """Remove entries from memory, then from the store, then what processes read from the store meanwhile.

    ``forget`` returns the entries that it removed from the memory of all processes, and its problem.
    """
    entries, problem = await forget(purge)
    stored = await purge_store(purge)
    if stored is None:
        return PurgeResult(entries, problem=problem)
    _, late_problem = (0, None) if purge.dry_run else await forget(purge)
    problems = [text for text in (problem or late_problem, stored.problem) if text]
    return PurgeResult(entries, stored.removed, stored.remaining, "; ".join(problems) or None)


class RouterView:
    """The ``View`` of a single process."""

    def __init__(self, router: Router, version: str) -> None:
        self.name = router.name
        self.boot = router.boot
        self.store = router.store
        self._router = router
        self._version = version
        self._saturation = SaturationMeter(router.balancer.loads, router.balancer.health)

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

    async def metrics(self, *, all_buckets: bool = False) -> str:
        """Prometheus text; histograms with all non-empty buckets if ``all_buckets``."""
        lines = self.metric_lines(await self.replicas(), all_buckets=all_buckets)
        return "\n".join(await run_in_slices(chain(info_lines(self, self._version), lines))) + "\n"

    @property
    def health_epoch(self) -> int | None:
        """A number that changes whenever a replica's health changes."""
        return self._router.balancer.health.epoch

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica with its health and load."""
        return await run_in_slices(self._replica_rows())

    async def last_polled_replicas(self) -> list[dict[str, Any]]:
        """As ``replicas``, since there are no workers to poll."""
        return await self.replicas()

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, oldest first, with a sample ``ratio`` of their block hashes."""
        page = self._router.services.decisions.page(after, limit, ratio)
        return page.as_json(await run_in_slices(page.rows()))

    async def explain(self, request: bytes) -> dict[str, Any]:
        """The decision that a request would get now; RejectedRequestError if it gets none."""
        return explain(self._router, request)

    async def purge_responses(self, purge: CachePurge) -> PurgeResult:
        """Remove entries of response caches from memory and from the store."""
        return await purge_memory_and_store(purge, self._forget, self._router.services.all_response_caches.purge_store)

    async def _forget(self, purge: CachePurge) -> tuple[int, str | None]:
        return await self._router.services.all_response_caches.forget(purge), None

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
                    "role": replica.role,
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
                    "kv_events": router.services.kv_events.rows(replica),
                }

    def _loads(self, replica: ReplicaConfig) -> list[tuple[int, int]]:
        """Requests and waiting tokens of this process at each rank of a replica."""
        loads = [self._router.balancer.loads.load(target.id) for target in targets_of(replica)]
        return [(load.running - load.remote_running, load.waiting_tokens - load.remote_tokens) for load in loads]

    # --- metrics ---

    def metric_lines(self, replicas: list[dict[str, Any]], *, all_buckets: bool) -> Iterator[str]:
        """All metrics but ``info_lines``. Produce them with ``run_in_slices``."""
        router = self._router
        if router.active is not None:
            router.services.metrics.prune(router.active.series)
        yield from router.services.metrics.lines(all_buckets=all_buckets)
        yield from self._failure_lines()
        yield from router.services.all_admission_queues.lines(all_buckets=all_buckets)
        yield from router.services.all_warm_ups.lines()
        yield from router.services.kv_events.lines()
        if router.services.tracer is not None:
            yield from router.services.tracer.lines()
        yield from router.services.all_response_caches.lines()
        if router.state_exchange is not None:
            yield from router.state_exchange.lines()
        yield from self._token_ratio_lines()
        yield from self._saturation_lines()
        yield from _replica_lines(replicas)
        yield from header("tasks", "gauge", "Asyncio tasks of the process: a few, and one for each health check.")
        yield f"{PREFIX}tasks {len(asyncio.all_tasks())}"
        yield from process_lines()

    def _failure_lines(self) -> Iterator[str]:
        router = self._router
        yield from header("ejections_total", "counter", "Replicas ejected by their circuit breakers, by cause.")
        for (pool, replica, cause), count in list(router.balancer.breakers.ejections.items()):
            yield f"{PREFIX}ejections_total{{{labels(pool=pool, replica=replica, cause=cause)}}} {count}"
        yield from header("engine_probes_total", "counter", "Requests for one token sent to engines that may hang.")
        for check in router.services.stall_detector.probed:
            yield f"{PREFIX}engine_probes_total{{{labels(replica=check.name)}}} {check.probes}"
        for number, (name, text) in enumerate(OWN_REQUEST_LINES):
            yield from header(name, "counter", text)
            for asked, counts in list(router.services.own_requests.counts.items()):
                yield f"{PREFIX}{name}{{{labels(replica=asked)}}} {counts[number]}"
        yield from header("retries_rejected_total", "counter", "Retries that the retry budget did not allow.")
        yield f"{PREFIX}retries_rejected_total {router.balancer.retry_budget.rejected}"
        yield from header("connections_closed_total", "counter", "Client connections that ended, by reason.")
        for reason in CloseReason:
            yield f"{PREFIX}connections_closed_total{{{labels(reason=reason)}}} {router.closed[reason]}"

    def _token_ratio_lines(self) -> Iterator[str]:
        """The measured tokens per byte of each pool and model with a sample."""
        ratios = self._router.balancer.token_ratios
        measured = [(labels(pool=pool, model=model), ratio) for (pool, model), ratio in ratios.items() if ratio.samples]
        text = "Prompt tokens for each byte of a prompt, measured from reported usage."
        yield from header("tokens_per_byte", "gauge", text)
        for pairs, ratio in measured:
            yield f"{PREFIX}tokens_per_byte{{{pairs}}} {ratio.tokens_per_byte:.6g}"
        yield from header("tokens_per_byte_samples_total", "counter", "Responses whose usage was measured.")
        for pairs, ratio in measured:
            yield f"{PREFIX}tokens_per_byte_samples_total{{{pairs}}} {ratio.samples}"

    def _saturation_lines(self) -> Iterator[str]:
        """Saturation of each pool by the requests of this process; no sample while a figure is unknown."""
        pools = self._router.active.config.pools if self._router.active else ()
        queues = self._router.services.all_admission_queues
        self._saturation.forget_all_but(pool.name for pool in pools)
        read = [(labels(pool=pool.name), self._saturation.read(pool, queues.waiting(pool.name))) for pool in pools]
        for name, attribute, text in SATURATION_LINES:
            yield from header(name, "gauge", text)
            for pairs, figures in read:
                value = getattr(figures, attribute)
                if value is not None:
                    yield f"{PREFIX}{name}{{{pairs}}} {value:.6g}"


def _replica_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    gauges: tuple[tuple[str, str, str], ...] = (
        ("replica_up", "health", "Whether a replica passes its health check."),
        ("replica_out", "breaker", "Whether a replica is ejected by its circuit breaker."),
        ("replica_share_ratio", "share", "Fraction of its weight that a replica currently has."),
        ("in_flight", "running", "Requests sent to a replica and not ended."),
        ("waiting_tokens", "waiting_tokens", "Estimated prompt tokens of requests that wait for their first byte."),
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
