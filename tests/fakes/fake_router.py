"""A router's admin port as the control plane sees it: follows the protocol, and fails on request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from routing.schema import ConfigError, LoadedSnapshot, load_snapshot

TOKEN = "router-token-for-tests"  # settings.test's
CANNED: dict[str | None, tuple[int, object]] = {
    "garbage": (200, {"hello": "world"}),
    "error": (500, {}),
    "redirect": (307, {}),
    "not_now": (503, {"status": "not_now", "reason": "no worker is running", "running_revision": None}),
}


class FakeRouter:
    """Applies configurations in memory. ``fault`` is called before each push and returns None or a fault.

    ``nack`` rejects; ``drop`` loses the request; ``lose_answer`` applies it and loses the acknowledgement; ``hang``
    waits for ``release``; ``not_now`` asks for a retry; ``garbage``, ``redirect`` and ``error`` are responses no
    router sends.
    """

    def __init__(self, name: str = "router-1") -> None:
        self.name = name
        self.boot = "b1"
        self.running: LoadedSnapshot | None = None
        self.pushes: list[int] = []  # numbers, as they arrived
        self.looks = 0
        self.fault: Callable[[], str | None] = lambda: None
        self.release = threading.Event()
        self._lock = threading.Lock()
        self._server = AdminServer(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def revision(self) -> int | None:
        return self.running.revision if self.running else None

    def announcement(self) -> dict[str, object]:
        """The body of its announcement."""
        running = self.running
        return {
            "name": self.name,
            "boot": self.boot,
            "admin_url": self.admin_url,
            "revision": running.revision if running else None,
            "sha256": running.sha256 if running else None,
        }

    def take(self, document: bytes) -> tuple[int, dict[str, object]]:
        """The rules of ``PUT /admin/config``."""
        try:
            new = load_snapshot(document)
        except ConfigError as error:
            return 422, self.nack(error.reason, error.path)
        with self._lock:
            old = self.running
            same = old is not None and (new.revision, new.sha256) == (old.revision, old.sha256)
            if old is not None and not same and new.revision <= old.revision:
                return 409, self.nack("older than the running one", "$.revision")
            self.running = new
        return 200, {"status": "ack", "revision": new.revision, "sha256": new.sha256, "applied_at": "now"}

    def nack(self, reason: str, path: str) -> dict[str, object]:
        return {"status": "nack", "reason": reason, "path": path, "running_revision": self.revision}


class AdminServer(ThreadingHTTPServer):
    """One daemon thread per connection, so that a hanging one blocks nothing."""

    daemon_threads = True

    def __init__(self, router: FakeRouter) -> None:
        super().__init__(("127.0.0.1", 0), AdminPort)
        self.router = router


class AdminPort(BaseHTTPRequestHandler):
    """``GET`` and ``PUT`` of ``/admin/config``."""

    protocol_version = "HTTP/1.1"
    server: AdminServer

    def do_GET(self) -> None:
        router = self.server.router
        router.looks += 1
        if router.fault():
            self.close_connection = True
        elif self.is_admitted():
            told = router.announcement()
            self.answer(200, {**told, "router": router.name, "config": {"hash_secret": "***"}})

    def do_PUT(self) -> None:
        router = self.server.router
        document = self.rfile.read(int(self.headers["Content-Length"]))
        router.pushes.append(json.loads(document)["revision"])
        fault = router.fault()
        if fault in CANNED:
            self.answer(*CANNED[fault])
        elif fault == "nack":
            self.answer(422, router.nack("no room", "$.pools[0]"))
        elif fault in {"hang", "drop"}:
            if fault == "hang":
                router.release.wait(30)
            self.close_connection = True
        elif self.is_admitted():
            answer = router.take(document)
            if fault == "lose_answer":
                self.close_connection = True
            else:
                self.answer(*answer)

    def log_message(self, *_: object) -> None:
        pass

    def is_admitted(self) -> bool:
        if self.headers["Authorization"] == f"Bearer {TOKEN}":
            return True
        self.answer(401, {"error": "token"})
        return False

    def answer(self, status: int, body: object) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.send_header("Location", "http://127.0.0.1:1/")  # means something to a redirect alone
        self.end_headers()
        self.wfile.write(payload)
