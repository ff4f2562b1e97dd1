"""Scripted ``/metrics`` endpoints of replicas: each path serves a list of responses in turn, repeating the last."""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tests.fakes.http_server import FakeHandler, FakeServer, running

Responder = Callable[["Handler"], None]


class Handler(FakeHandler):
    server: FakeMetricsServer

    def do_GET(self):  # noqa: N802 - http.server's name
        self.server.next_responder(self.path)(self)


class FakeMetricsServer(FakeServer):
    """``script("/r1/metrics", text("..."), hang())``; ``seen`` counts requests by path and query."""

    def __init__(self):
        super().__init__(Handler)
        self.scripts: dict[str, list[Responder]] = {}
        self.seen: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()

    def script(self, path: str, *responders: Responder) -> str:
        """Serve these responses; the replica's base URL."""
        self.scripts[path] = list(responders)
        return self.url + path.removesuffix("/metrics")

    def next_responder(self, path: str) -> Responder:
        with self._lock:
            self.seen[path] += 1
            responders = self.scripts.get(path.partition("?")[0]) or [status(404)]
            return responders.pop(0) if len(responders) > 1 else responders[0]


def serving() -> AbstractContextManager[FakeMetricsServer]:
    return running(FakeMetricsServer())


def text(body: str, content_type: str = "text/plain; version=1.0.0; charset=utf-8") -> Responder:
    """A complete exposition."""
    return lambda handler: handler.respond(200, body.encode(), Content_Type=content_type)


def status(code: int, location: str | None = None) -> Responder:
    """An error or a redirect."""
    return lambda handler: handler.respond(code, **({"Location": location} if location else {}))


def torn(body: str, share: float = 0.6) -> Responder:
    """A response cut off before its Content-Length."""

    def respond(handler: Handler) -> None:
        payload = body.encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(payload)))
        handler.end_headers()
        handler.wfile.write(payload[: int(len(payload) * share)])
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)

    return respond


def hang() -> Responder:
    """No response until the server stops."""
    return Handler.hang


def endless(chunk: bytes = b"# " + b"x" * 65_000 + b"\n") -> Responder:
    """A body without end."""

    def respond(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        while not handler.server.released.is_set():
            handler.wfile.write(chunk)

    return respond


@contextmanager
def refusing() -> Iterator[int]:
    """A reserved port without a listener."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def silent() -> Iterator[int]:
    """A port that accepts connections into its backlog and never responds."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        yield listener.getsockname()[1]
