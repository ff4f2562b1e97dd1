"""Scripted ``/metrics`` endpoints of replicas: each path serves a list of responses in turn, repeating the last."""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeMetricsServer

    def do_GET(self):
        self.server.next_answer(self.path)(self)

    def log_message(self, *_arguments):
        pass


class FakeMetricsServer(ThreadingHTTPServer):
    """``script("/r1/metrics", text("..."), hang())``; ``seen`` counts requests by path and query."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts: dict[str, list[Answer]] = {}
        self.seen: dict[str, int] = defaultdict(int)
        self.released = threading.Event()  # ends every hanging answer
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def script(self, path: str, *answers: Answer) -> str:
        """Serve these responses; the replica's base URL."""
        self.scripts[path] = list(answers)
        return self.url + path.removesuffix("/metrics")

    def next_answer(self, path: str) -> Answer:
        with self._lock:
            self.seen[path] += 1
            answers = self.scripts.get(path.partition("?")[0]) or [status(404)]
            return answers.pop(0) if len(answers) > 1 else answers[0]

    def handle_error(self, request, client_address):
        pass  # a client that hung up is what many tests are about


@contextmanager
def serving() -> Iterator[FakeMetricsServer]:
    server = FakeMetricsServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def text(body: str, content_type: str = "text/plain; version=1.0.0; charset=utf-8") -> Answer:
    """A complete exposition."""

    def answer(handler: Handler) -> None:
        payload = body.encode()
        handler.send_response(200)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(payload)))
        handler.end_headers()
        handler.wfile.write(payload)

    return answer


def status(code: int, location: str | None = None) -> Answer:
    """An error or a redirect."""

    def answer(handler: Handler) -> None:
        handler.send_response(code)
        if location:
            handler.send_header("Location", location)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def torn(body: str, share: float = 0.6) -> Answer:
    """A response cut off before its Content-Length."""

    def answer(handler: Handler) -> None:
        payload = body.encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(payload)))
        handler.end_headers()
        handler.wfile.write(payload[: int(len(payload) * share)])
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)

    return answer


def hang() -> Answer:
    """No response until the server stops."""
    return _hang


def _hang(handler: Handler) -> None:
    handler.server.released.wait(timeout=30)
    handler.close_connection = True


def endless(chunk: bytes = b"# " + b"x" * 65_000 + b"\n") -> Answer:
    """A body without end."""

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        while not handler.server.released.is_set():
            handler.wfile.write(chunk)

    return answer


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
