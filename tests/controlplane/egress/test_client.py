"""Requests through the guarded clients, to a server on a socket."""

import asyncio
import ipaddress
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from controlplane.egress import (
    EgressDeniedError,
    ResponseTooLargeError,
    Rules,
    fetch,
    fetch_async,
    guarded_async_client,
    guarded_client,
)
from tests.pace import is_within
from tests.side_by_side import alone

LOOPBACK = Rules((ipaddress.ip_network("127.0.0.0/8"),), allow_public=False)
PUBLIC_ONLY = Rules((), allow_public=True)


class Server(ThreadingHTTPServer):
    """Responds by path, and records the Host headers."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.hosts: list[str] = []
        self.closing = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self):
        self.server.hosts.append(self.headers["Host"])
        getattr(self, f"respond_{self.path.strip('/')}")()

    def respond_plain(self):
        self.reply(200, b"warm")

    def respond_redirect(self):
        self.reply(302, b"", Location="http://169.254.169.254/")

    def respond_compressed(self):
        self.reply(200, b"\x1f\x8b", **{"Content-Encoding": "gzip"})

    def respond_long(self):
        self.reply(200, b"x" * 5000)

    def respond_endless(self):
        self.start(**{"Content-Length": str(10**9)})
        while not self.server.closing.is_set():
            try:
                self.wfile.write(b"x" * 65536)
            except OSError:
                return

    def respond_trickle(self):
        """A byte every 50 ms: no single read is slow."""
        self.start(**{"Content-Length": "100000"})
        while not self.server.closing.wait(0.05):
            try:
                self.wfile.write(b"x")
            except OSError:
                return

    def respond_trickled_headers(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not self.server.closing.wait(0.05):
            try:
                self.wfile.write(b"x")
            except OSError:
                return

    def respond_silence(self):
        self.server.closing.wait(10)

    def start(self, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def reply(self, status, body, **headers):
        self.start(status, **{"Content-Length": str(len(body)), **headers})
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


def get_sync(url, rules=LOOPBACK, resolver=None, deadline_s=2.0):
    options = {"resolver": resolver} if resolver else {}
    with guarded_client(rules, **options) as client:
        return fetch(client, "GET", url, deadline_s=deadline_s, max_bytes=1000)


def get_async(url, rules=LOOPBACK, resolver=None, deadline_s=2.0):
    options = {"resolver": resolver} if resolver else {}

    async def send():
        async with guarded_async_client(rules, **options) as client:
            return await fetch_async(client, "GET", url, deadline_s=deadline_s, max_bytes=1000)

    return asyncio.run(send())


pytestmark = pytest.mark.parametrize("get", [get_sync, get_async])


def test_a_response_has_status_headers_and_the_whole_body(get, server):
    response = get(f"http://127.0.0.1:{server.server_port}/plain")
    assert (response.status, response.body, response.headers["content-length"]) == (200, b"warm", "4")


def test_the_host_header_is_the_requested_host(get, server):
    response = get(f"http://gpu-1.example:{server.server_port}/plain", resolver=lambda *_: ["127.0.0.1"])
    assert (response.status, server.hosts) == (200, [f"gpu-1.example:{server.server_port}"])


def test_a_host_is_resolved_once_and_connected_at_the_checked_address(get, server):
    resolutions = iter([["127.0.0.1"], ["169.254.169.254"], ["169.254.169.254"]])
    resolved_hosts = []

    def rebinding_resolver(host, port):
        resolved_hosts.append(host)
        return next(resolutions)

    assert get(f"http://rebind.example:{server.server_port}/plain", resolver=rebinding_resolver).status == 200
    assert resolved_hosts == ["rebind.example"]


@pytest.mark.parametrize(
    "addresses", [["169.254.169.254"], ["127.0.0.1", "10.0.0.1"], ["::ffff:10.0.0.1"], ["fe80::1%eth0"]]
)
def test_nothing_is_sent_to_a_host_with_a_denied_address(get, server, addresses):
    with pytest.raises(EgressDeniedError):
        get(f"http://evil.example:{server.server_port}/plain", resolver=lambda *_: addresses)
    assert server.hosts == []


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "localhost", "[::ffff:127.0.0.1]", "0"])
def test_loopback_is_denied_for_webhooks_in_any_notation(get, server, host):
    with pytest.raises(EgressDeniedError):
        get(f"http://{host}:{server.server_port}/plain", rules=PUBLIC_ONLY)
    assert server.hosts == []


def test_a_redirect_is_returned_and_not_followed(get, server):
    response = get(f"http://127.0.0.1:{server.server_port}/redirect")
    assert (response.status, len(server.hosts)) == (302, 1)


def test_proxies_in_the_environment_are_ignored(get, server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert get(f"http://127.0.0.1:{server.server_port}/plain").status == 200


@pytest.mark.parametrize("path", ["long", "endless", "compressed"])
def test_a_response_that_is_too_long_or_compressed_is_rejected(get, server, path):
    with pytest.raises(ResponseTooLargeError):
        get(f"http://127.0.0.1:{server.server_port}/{path}")


@alone
@pytest.mark.parametrize("path", ["trickle", "trickled_headers", "silence"])
def test_the_whole_request_ends_at_its_deadline(get, server, path):
    started_s = time.monotonic()
    with pytest.raises(httpx.TimeoutException):
        get(f"http://127.0.0.1:{server.server_port}/{path}", deadline_s=0.4)
    assert is_within(time.monotonic() - started_s, 1.5)


@alone
def test_a_hanging_resolver_ends_at_the_deadline_too(get, server):
    def hanging_resolver(*_):
        server.closing.wait(10)
        return ["127.0.0.1"]

    started_s = time.monotonic()
    with pytest.raises(httpx.TimeoutException):
        get("http://slow.example/plain", resolver=hanging_resolver, deadline_s=0.3)
    assert is_within(time.monotonic() - started_s, 1.5)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/", "http://no-such-host.invalid/", "ftp://127.0.0.1/", "http:///x"]
)
def test_every_failure_is_an_http_error(get, url):
    with pytest.raises(httpx.HTTPError):
        get(url)


def test_the_next_address_is_tried_after_a_refused_connection(get, server):
    def resolve_both(*_):
        return ["127.0.0.2", "127.0.0.1"]  # the server listens on the second only

    assert get(f"http://two.example:{server.server_port}/plain", resolver=resolve_both).status == 200
