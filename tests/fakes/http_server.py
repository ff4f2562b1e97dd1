"""A threaded HTTP server on loopback, the base of the synchronous fakes."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

ServerT = TypeVar("ServerT", bound="FakeServer")


class FakeHandler(BaseHTTPRequestHandler):
    """Keeps connections alive and logs nothing."""

    protocol_version = "HTTP/1.1"

    def respond(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send a whole response; underscores in header names become dashes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def hang(self) -> None:
        """Send nothing until the server stops."""
        self.server.released.wait(timeout=30)  # type: ignore[attr-defined]
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class FakeServer(ThreadingHTTPServer):
    """One daemon thread per connection, so that a hanging one blocks nothing."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, handler: type[FakeHandler], tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.released = threading.Event()  # ends hanging responses
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.server_address[1]}"
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that disconnect are part of many tests


@contextmanager
def running(server: ServerT) -> Iterator[ServerT]:
    """Serve until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
