"""The admin port: configuration in, state and figures out. Not on the request path, so aiohttp does the HTTP.

With a token set, everything but ``/healthz``, ``/readyz`` and ``/metrics`` asks for it.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from routing.core.types import ReplicaId, RoutingError
from routing.proxy import metrics
from routing.proxy.config_store import NackError, Source
from routing.proxy.decisions import Record
from routing.proxy.log import event
from routing.proxy.placing import PROMPT_PATHS, placement_request, refusal_of
from routing.proxy.router import Router
from routing.schema import RouterConfig

MAX_BODY_BYTES = 64 << 20  # of a configuration; a thousand replicas take a quarter of a megabyte
MAX_DECISIONS = 1000  # an answer
_OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Explained(Struct):
    """A request to explain: what a client would have sent."""

    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}


class Admin:
    """The handlers of one router's admin port."""

    def __init__(self, router: Router, version: str) -> None:
        self._router = router
        self._version = version

    def application(self, token: str | None) -> web.Application:
        """The port's application; without a token everything is open, so it must be bound to the loopback only."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_guard(token), _answer_errors])
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
            ]
        )
        return app

    async def healthz(self, _: web.Request) -> web.Response:
        """The process is alive."""
        return _json({"status": "ok"})

    async def readyz(self, _: web.Request) -> web.Response:
        """Traffic may come here. The control plane has no part in it."""
        reason = self._router.not_ready_reason
        if reason is not None:
            return _json({"status": "not_ready", "reason": reason}, status=503)
        return _json({"status": "ready", "revision": self._router.store.revision})

    async def metrics(self, _: web.Request) -> web.Response:
        """Everything counted, as Prometheus text."""
        self._router.metrics.prune(self._router.knows)
        text = "\n".join(self._metric_lines()) + "\n"
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def read_config(self, _: web.Request) -> web.Response:
        """What runs, since when, and what was last refused."""
        store = self._router.store
        applied, nack = store.applied, store.last_nack
        return _json(
            {
                "router": self._router.name,
                "boot": self._router.boot,
                "revision": applied.snapshot.revision if applied else None,
                "sha256": applied.snapshot.sha256 if applied else None,
                "applied_at": applied.at.isoformat() if applied else None,
                "source": applied.source if applied else None,
                "config": _without_secret(applied.snapshot.config) if applied else None,
                "last_nack": nack.as_json() if nack else None,
            }
        )

    async def put_config(self, request: web.Request) -> web.Response:
        """Take a snapshot: acknowledged once it is on disk and in force, or refused with the reason."""
        store = self._router.store
        try:
            applied = await store.apply(await request.read(), Source.PUSH)
        except NackError as nack:
            refusal = {"status": "nack", "reason": nack.reason, "path": nack.path, "running_revision": store.revision}
            return _json(refusal, status=409 if nack.is_conflict else 422)
        return _json(applied.as_ack())

    async def replicas(self, _: web.Request) -> web.Response:
        """Every configured replica, its health and its load."""
        return _json({"replicas": list(self._replica_rows())})

    async def decisions(self, request: web.Request) -> web.Response:
        """Decisions after a sequence number, oldest first."""
        after = _number(request, "after", 0)
        limit = min(_number(request, "limit", MAX_DECISIONS), MAX_DECISIONS)
        return _json({"boot": self._router.boot, **self._router.decisions.after(after, limit)})

    async def explain(self, request: web.Request) -> web.Response:
        """The decision that a request would get now. Nothing is sent."""
        serving = self._router.serving
        if serving is None:
            return _json({"error": "no configuration yet"}, status=503)
        asked = msgspec.json.decode(await request.read(), type=Explained)
        if asked.path.encode() not in PROMPT_PATHS:
            raise web.HTTPUnprocessableEntity(text="path: not one that carries a prompt")
        headers = {name.lower(): value for name, value in asked.headers.items()}
        wanted = placement_request(
            asked.path.encode(),
            bytes(asked.body),
            headers.get("x-session-id") or None,
            headers.get("x-task-group") or None,
        )
        decision = serving.placement.decide(wanted, self._router.health)
        return _json(Record.of(decision, headers.get("x-request-id", ""), wanted.prompt.tokens).as_json())

    # --- rows and lines ---

    def _replica_rows(self) -> Iterator[dict[str, Any]]:
        router, serving = self._router, self._router.serving
        for pool in serving.config.pools if serving else ():
            for replica in pool.replicas:
                load, finding = router.loads.load(ReplicaId(replica.name)), router.checks.finding(replica.name)
                yield {
                    "pool": pool.name,
                    "name": replica.name,
                    "url": replica.url,
                    "state": replica.state,
                    "health": finding.health,
                    "reason": finding.reason,
                    "running": load.running,
                    "waiting_tokens": load.waiting_tokens,
                    "connections": serving.links[replica.name].connections if serving else 0,
                    "last_ok_at": finding.last_ok_at.isoformat() if finding.last_ok_at else None,
                }

    def _metric_lines(self) -> Iterator[str]:
        router = self._router
        yield from metrics.header("info", "gauge", "This router.")
        about = metrics.labels(router=router.name, boot=router.boot, version=self._version)
        yield f"{metrics.PREFIX}info{{{about}}} 1"
        if router.store.applied is not None:
            yield from metrics.header("config_revision", "gauge", "The configuration in force.")
            yield f"{metrics.PREFIX}config_revision {router.store.applied.snapshot.revision}"
            yield from metrics.header("config_applied_timestamp_seconds", "gauge", "Unix time since when it is.")
            yield f"{metrics.PREFIX}config_applied_timestamp_seconds {router.store.applied.at.timestamp()}"
        yield from router.metrics.lines()
        yield from self._replica_lines()
        yield from metrics.process_lines()

    def _replica_lines(self) -> Iterator[str]:
        rows = list(self._replica_rows())
        gauges: tuple[tuple[str, str, Callable[[dict[str, Any]], object]], ...] = (
            ("replica_up", "Whether a replica answers its health check.", lambda row: int(row["health"] == "up")),
            ("in_flight", "Requests sent to a replica and not ended.", lambda row: row["running"]),
            ("waiting_tokens", "Estimated prompt tokens without a first byte yet.", lambda row: row["waiting_tokens"]),
        )
        for name, text, value in gauges:
            yield from metrics.header(name, "gauge", text)
            for row in rows:
                if name == "replica_up" and row["health"] == "unknown":
                    continue
                where = metrics.labels(pool=row["pool"], replica=row["name"])
                yield f"{metrics.PREFIX}{name}{{{where}}} {value(row)}"


def _guard(token: str | None) -> Any:
    """Ask for the token, comparing in constant time."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and request.path not in _OPEN_PATHS:
            given = request.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {token}".encode()):
                return _json({"error": "unauthorized"}, status=401, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return guard


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON, with what went wrong where that is the caller's business."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _json({"error": error.text or error.reason}, status=error.status)
    except RoutingError as error:
        refusal = refusal_of(error)
        return _json({"error": refusal.message}, status=refusal.status)
    except msgspec.MsgspecError as error:
        return _json({"error": str(error)}, status=422)
    except Exception as error:  # noqa: BLE001 - the port's border
        event(logger, "admin_error", level=logging.ERROR, path=request.path, error=repr(error))
        return _json({"error": "internal error"}, status=500)


def _json(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=status, headers=headers, content_type="application/json"
    )


def _without_secret(config: RouterConfig) -> object:
    return msgspec.to_builtins(config) | {"hash_secret": "***"}


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 18:
        raise web.HTTPUnprocessableEntity(text=f"{name}: expected a whole number")
    return int(text)
