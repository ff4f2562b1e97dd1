"""A webhook receiver on loopback that records requests and sends scripted responses."""

from __future__ import annotations

import json
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.fakes.http_server import FakeHandler, FakeServer, running


@dataclass
class Received:
    """One recorded request."""

    path: str
    headers: dict[str, str]
    body: bytes
    method: str = "POST"

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def payload(self):
        return json.loads(self.body)


@dataclass
class Reply:
    """One scripted response."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    body: bytes = b""


class Handler(FakeHandler):
    server: FakeWebhookReceiver

    def do_POST(self):  # noqa: N802 - http.server's name
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        reply = self.server.record(Received(self.path, headers, body, self.command))
        if reply.hang:
            self.hang()
        else:
            self.respond(reply.status, reply.body, **reply.headers)

    do_GET = do_PUT = do_POST  # noqa: N815 - http.server's names


class FakeWebhookReceiver(FakeServer):
    """Sends ``replies`` in turn, then 200; records requests in ``received``."""

    def __init__(self):
        super().__init__(Handler)
        self.received: list[Received] = []
        self.replies: list[Reply] = []
        self.origin = self.url
        self.url = f"{self.origin}/hook/s3cret-path"
        self._lock = threading.Lock()

    def record(self, received: Received) -> Reply:
        with self._lock:
            self.received.append(received)
            return self.replies.pop(0) if self.replies else Reply()


def receiving() -> AbstractContextManager[FakeWebhookReceiver]:
    return running(FakeWebhookReceiver())
