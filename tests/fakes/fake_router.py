"""A router's admin port as the control plane sees it: follows the protocol, and fails on request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from routing.schema import ConfigError, LoadedSnapshot, load_snapshot
from tests.fakes.http_server import FakeHandler, FakeServer, running

TOKEN = "router-token-for-tests"  # as in settings.test
CANNED_RESPONSES: dict[str | None, tuple[int, object]] = {
    "garbage": (200, {"hello": "world"}),
    "error": (500, {}),
    "redirect": (307, {}),
    "not_now": (503, {"status": "not_now", "reason": "no worker is running", "running_revision": None}),
}


class FakeRouter:
    """Applies configurations in memory. ``fault`` is called before each push and returns None or a fault.

    ``nack`` rejects; ``drop`` loses the request; ``lose_ack`` applies the configuration and loses the acknowledgement;
    ``hang`` waits for ``release``; ``not_now`` asks for a retry; ``garbage``, ``redirect`` and ``error`` are responses
    that no router sends.
    """

    def __init__(self, name: str = "router-1") -> None:
        self.name = name
        self.boot = "b1"
        self.running: LoadedSnapshot | None = None
        self.pushes: list[int] = []  # revisions, in order of arrival
        self.state_reads = 0  # GET requests
        self.purges: list[dict[str, object]] = []  # of response caches
        self.purged: dict[str, object] = {}  # the response to a purge
        self.fault: Callable[[], str | None] = lambda: None
        self._lock = threading.Lock()
        self._server = AdminServer(self)
        self.release = self._server.released
        self.admin_url = self._server.url
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(running(self._server))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def revision(self) -> int | None:
        return self.running.revision if self.running else None

    def announcement(self) -> dict[str, object]:
        """The body of the router's announcement."""
        running = self.running
        return {
            "name": self.name,
            "boot": self.boot,
            "admin_url": self.admin_url,
            "revision": running.revision if running else None,
            "sha256": running.sha256 if running else None,
        }

    def apply(self, document: bytes) -> tuple[int, dict[str, object]]:
        """Apply a document by the rules of ``PUT /admin/config``: (status, response body)."""
        try:
            new = load_snapshot(document)
        except ConfigError as error:
            return 422, self.nack(error.reason, error.path)
        with self._lock:
            old = self.running
            is_same = old is not None and (new.revision, new.sha256) == (old.revision, old.sha256)
            if old is not None and not is_same and new.revision <= old.revision:
                return 409, self.nack("older than the active one", "$.revision")
            self.running = new
        return 200, {"status": "ack", "revision": new.revision, "sha256": new.sha256, "applied_at": "now"}

    def nack(self, reason: str, path: str) -> dict[str, object]:
        return {"status": "nack", "reason": reason, "path": path, "running_revision": self.revision}


class AdminServer(FakeServer):
    def __init__(self, router: FakeRouter) -> None:
        super().__init__(AdminPort)
        self.router = router


class AdminPort(FakeHandler):
    """``GET`` and ``PUT`` of ``/admin/config``, and ``POST`` of purges."""

    server: AdminServer

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        router = self.server.router
        router.state_reads += 1
        if router.fault():
            self.close_connection = True
        elif self.is_authorized():
            self.respond_json(200, {**router.announcement(), "router": router.name, "config": {"hash_secret": "***"}})

    def do_PUT(self) -> None:  # noqa: N802 - http.server's name
        router = self.server.router
        document = self.rfile.read(int(self.headers["Content-Length"]))
        router.pushes.append(json.loads(document)["revision"])
        fault = router.fault()
        if fault in CANNED_RESPONSES:
            self.respond_json(*CANNED_RESPONSES[fault])
        elif fault == "nack":
            self.respond_json(422, router.nack("no room", "$.pools[0]"))
        elif fault == "hang":
            self.hang()
        elif fault == "drop":
            self.close_connection = True
        elif self.is_authorized():
            acknowledgement = router.apply(document)
            if fault == "lose_ack":
                self.close_connection = True
            else:
                self.respond_json(*acknowledgement)

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        router, body = self.server.router, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.is_authorized():
            router.purges.append(body)
            self.respond_json(503 if router.purged.get("problem") else 200, router.purged)

    def is_authorized(self) -> bool:
        if self.headers["Authorization"] == f"Bearer {TOKEN}":
            return True
        self.respond_json(401, {"error": "token"})
        return False

    def respond_json(self, status: int, body: object) -> None:
        self.respond(status, json.dumps(body).encode(), Location="http://127.0.0.1:1/")  # ignored unless a redirect
