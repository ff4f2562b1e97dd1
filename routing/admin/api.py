"""The admin port: configuration in, state and figures out. Not on the request path, so aiohttp does the HTTP.

With a token set, everything but ``/healthz``, ``/readyz`` and ``/metrics`` asks for it. Without one the port is bound
to the loopback and must be asked for as such, so that no web page gets in whose own name resolves there.

What the admin port shows and does, of one router or of several workers together.

Which build of the router runs: plain Python, or its hot modules as native code.
"""

from __future__ import annotations

import hmac
import logging
import math
import platform
import ssl
from collections.abc import Awaitable, Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from routing.health import circuit_breaker
from routing.http.response import RejectedRequestError
from routing.http.sockets import is_loopback
from routing.log import defect
from routing.observability.exposition import PREFIX, header, labels
from routing.proxy.config_store import Applied, ConfigStore, NackError, RetryLaterError
from routing.schema import without_secrets


def is_compiled() -> bool:
    """Whether the hot modules are native code; one of them stands for all."""
    return circuit_breaker.__file__.endswith(tuple(EXTENSION_SUFFIXES))


def facts(version: str) -> dict[str, Any]:
    """Version, build and Python, as texts, for the log and for labels."""
    return {
        "version": version,
        "compiled": "true" if is_compiled() else "false",
        "python": platform.python_version(),
    }


class View(Protocol):
    """Whoever can show and do that."""

    @property
    def name(self) -> str:
        """The router's name."""
        ...

    @property
    def boot(self) -> str:
        """Tells one life of the router from the next."""
        ...

    @property
    def store(self) -> ConfigStore:
        """The configuration in force."""
        ...

    async def apply_config(self, document: bytes) -> Applied:
        """Put a pushed configuration into force; NackError if it is refused, RetryLaterError if it was not judged."""
        ...

    @property
    def not_ready_reason(self) -> str | None:
        """Why no traffic should come here; None when it may."""
        ...

    @property
    def warming(self) -> dict[str, dict[str, int]]:
        """How far each replica is that warms up, by name."""
        ...

    async def metrics(self, *, is_fine: bool = False) -> str:
        """Everything counted, as Prometheus text; histograms with all their edges where ``is_fine``."""
        ...

    @property
    def health_epoch(self) -> int | None:
        """Changes with any replica's health; None where that is only known by looking."""
        ...

    async def replicas(self) -> list[dict[str, Any]]:
        """Every configured replica, its health and its load."""
        ...

    async def last_polled_replicas(self) -> list[dict[str, Any]]:
        """The same, as they were seen last: for who looks all the time."""
        ...

    async def decisions(self, after: int, limit: int, ratio: float) -> dict[str, Any]:
        """Decisions after a sequence number, oldest first, with this part of their block hashes."""
        ...

    async def explain(self, asked: bytes) -> dict[str, Any]:
        """The decision that a request would get now; RejectedRequestError if it gets none."""
        ...


def about_lines(view: View, version: str) -> Iterator[str]:
    """Which router this is, and what it runs."""
    yield from header("info", "gauge", "This router.")
    yield f"{PREFIX}info{{{labels(router=view.name, boot=view.boot, **facts(version))}}} 1"
    applied = view.store.applied
    if applied is not None:
        yield from header("config_revision", "gauge", "The configuration in force.")
        yield f"{PREFIX}config_revision {applied.snapshot.revision}"
        yield from header("config_applied_timestamp_seconds", "gauge", "Unix time since when it is.")
        yield f"{PREFIX}config_applied_timestamp_seconds {applied.at.timestamp()}"


MAX_BODY_BYTES = 64 << 20  # of a configuration; a thousand replicas take a quarter of a megabyte
MAX_DECISIONS = 1000  # an answer
RETRY_AFTER_S = 2  # with a configuration that nobody could look at
_OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})

logger = logging.getLogger(__name__)
# aiohttp would tell it what was no HTTP, and quote the token in it.
_nobody = logging.Logger("nobody", logging.CRITICAL + 1)  # noqa: LOG001 - of no hierarchy, so no configuration opens it
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Admin:
    """The handlers of one admin port."""

    def __init__(self, view: View) -> None:
        self._view = view

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
        reason = self._view.not_ready_reason
        if reason is not None:
            return _json({"status": "not_ready", "reason": reason}, status=503)
        return _json({"status": "ready", "revision": self._view.store.revision})

    async def metrics(self, request: web.Request) -> web.Response:
        """Everything counted, as Prometheus text. ``?buckets=fine``: histograms with all edges, non-empty ones only."""
        buckets = request.query.get("buckets")
        if buckets not in (None, "fine"):
            return _json({"error": "buckets: expected fine, or no such parameter"}, status=400)
        text = await self._view.metrics(is_fine=buckets == "fine")
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def read_config(self, _: web.Request) -> web.Response:
        """What runs, since when, and what was last refused."""
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
        """Take a snapshot: acknowledged once it is on disk and in force, or refused with the reason."""
        store = self._view.store
        try:
            applied = await self._view.apply_config(await request.read())
        except NackError as nack:
            refusal = {"status": "nack", "reason": nack.reason, "path": nack.path, "running_revision": store.revision}
            return _json(refusal, status=409 if nack.is_conflict else 422)
        except RetryLaterError as error:
            delay = {"status": "not_now", "reason": error.reason, "running_revision": store.revision}
            return _json(delay, status=503, headers={"Retry-After": str(RETRY_AFTER_S)})
        return _json({**applied.as_ack(), "signature": store.signature})

    async def replicas(self, _: web.Request) -> web.Response:
        """Every configured replica, its health and its load."""
        return _json({"replicas": await self._view.replicas()})

    async def decisions(self, request: web.Request) -> web.Response:
        """Decisions after a sequence number, oldest first; ``blocks`` is the part of their hashes that is wanted."""
        after = _number(request, "after", 0)
        limit = min(_number(request, "limit", MAX_DECISIONS), MAX_DECISIONS)
        found = await self._view.decisions(after, limit, _part(request, "blocks"))
        return _json({"boot": self._view.boot, **found})

    async def explain(self, request: web.Request) -> web.Response:
        """The decision that a request would get now. Nothing is sent."""
        return _json(await self._view.explain(await request.read()))


class AdminPort:
    """The handlers, bound to an address."""

    def __init__(self, view: View) -> None:
        self._admin = Admin(view)
        self._runner: web.AppRunner | None = None
        self.port = 0  # the real one, once open

    async def open(self, host: str, port: int, token: str | None, tls: ssl.SSLContext | None = None) -> None:
        """Serve, over TLS where there is a context for it; OSError where the port is taken."""
        self._runner = web.AppRunner(
            self._admin.application(token),
            access_log=None,
            logger=_nobody,
            auto_decompress=False,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=tls).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Serve no more."""
        if self._runner is not None:
            await self._runner.cleanup()


def _guard(token: str | None) -> Any:
    """Let in who may be; the middleware of one port."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _OPEN_PATHS:
            return await handler(request)
        if token is None and not _asks_loopback(request):
            return _json({"error": "without a token this port is http://localhost or a loopback address"}, status=403)
        if token is not None and not _has_token(request, token):
            return _json({"error": "unauthorized"}, status=401, headers={"WWW-Authenticate": "Bearer"})
        # A small body that is large inside would hold requests up for long.
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return _json({"error": "compressed bodies are not taken"}, status=415)
        return await handler(request)

    return guard


def _asks_loopback(request: web.Request) -> bool:
    """Whether the client meant the loopback, as far as it says what it meant."""
    try:
        return is_loopback(urlsplit(f"//{request.host}").hostname or "")
    except ValueError:
        return False


def _has_token(request: web.Request, token: str) -> bool:
    """Compare in constant time."""
    given = request.headers.get("Authorization", "")
    return hmac.compare_digest(given.encode(errors="surrogateescape"), f"Bearer {token}".encode())


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON, with what went wrong where that is the caller's business."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _json({"error": error.text or error.reason}, status=error.status)
    except RejectedRequestError as error:
        return _json({"error": error.message}, status=error.status)
    except (web.RequestPayloadError, ConnectionError):  # nobody reads this
        return _json({"error": "the body did not come whole"}, status=400)
    except Exception as error:  # noqa: BLE001 - the port's border
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


def _part(request: web.Request, name: str) -> float:
    """A number from 0 to 1; all of it where it is not said."""
    text = request.query.get(name, "1")
    try:
        part = float(text)
    except ValueError:
        part = math.nan
    if not 0 <= part <= 1:
        raise web.HTTPUnprocessableEntity(text=f"{name}: expected a number from 0 to 1")
    return part
