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
    """Answers by path, and remembers who was asked for."""

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
        getattr(self, f"answer_{self.path.strip('/')}")()

    def answer_plain(self):
        self.reply(200, b"warm")

    def answer_redirect(self):
        self.reply(302, b"", Location="http://169.254.169.254/")

    def answer_packed(self):
        self.reply(200, b"\x1f\x8b", **{"Content-Encoding": "gzip"})

    def answer_long(self):
        self.reply(200, b"x" * 5000)

    def answer_endless(self):
        self.start(**{"Content-Length": str(10**9)})
        while not self.server.closing.is_set():
            try:
                self.wfile.write(b"x" * 65536)
            except OSError:
                return

    def answer_trickle(self):
        """A byte every 50 ms: no single read is slow."""
        self.start(**{"Content-Length": "100000"})
        while not self.server.closing.wait(0.05):
            try:
                self.wfile.write(b"x")
            except OSError:
                return

    def answer_trickled_head(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not self.server.closing.wait(0.05):
            try:
                self.wfile.write(b"x")
            except OSError:
                return

    def answer_silence(self):
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

    async def work():
        async with guarded_async_client(rules, **options) as client:
            return await fetch_async(client, "GET", url, deadline_s=deadline_s, max_bytes=1000)

    return asyncio.run(work())


pytestmark = pytest.mark.parametrize("get", [get_sync, get_async])


def test_the_answer_comes_whole(get, server):
    answer = get(f"http://127.0.0.1:{server.server_port}/plain")
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"warm", "4")


def test_the_host_stays_the_one_that_was_asked_for(get, server):
    answer = get(f"http://gpu-1.example:{server.server_port}/plain", resolver=lambda *_: ["127.0.0.1"])
    assert (answer.status, server.hosts) == (200, [f"gpu-1.example:{server.server_port}"])


def test_a_host_that_resolves_anew_after_the_check_is_connected_to_where_it_was_checked(get, server):
    answers = iter([["127.0.0.1"], ["169.254.169.254"], ["169.254.169.254"]])
    asked = []

    def rebinding(host, port):
        asked.append(host)
        return next(answers)

    assert get(f"http://rebind.example:{server.server_port}/plain", resolver=rebinding).status == 200
    assert asked == ["rebind.example"]


@pytest.mark.parametrize(
    "found", [["169.254.169.254"], ["127.0.0.1", "10.0.0.1"], ["::ffff:10.0.0.1"], ["fe80::1%eth0"]]
)
def test_nothing_is_sent_to_a_host_with_an_address_that_is_not_allowed(get, server, found):
    with pytest.raises(EgressDeniedError):
        get(f"http://evil.example:{server.server_port}/plain", resolver=lambda *_: found)
    assert server.hosts == []


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "localhost", "[::ffff:127.0.0.1]", "0"])
def test_loopback_is_no_webhook_however_it_is_written(get, server, host):
    with pytest.raises(EgressDeniedError):
        get(f"http://{host}:{server.server_port}/plain", rules=PUBLIC_ONLY)
    assert server.hosts == []


def test_a_redirect_is_an_answer_and_is_not_followed(get, server):
    answer = get(f"http://127.0.0.1:{server.server_port}/redirect")
    assert (answer.status, len(server.hosts)) == (302, 1)


def test_no_proxy_is_taken_from_the_environment(get, server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert get(f"http://127.0.0.1:{server.server_port}/plain").status == 200


@pytest.mark.parametrize("path", ["long", "endless", "packed"])
def test_an_answer_that_is_too_long_or_packed_is_refused(get, server, path):
    with pytest.raises(ResponseTooLargeError):
        get(f"http://127.0.0.1:{server.server_port}/{path}")


@alone
@pytest.mark.parametrize("path", ["trickle", "trickled_head", "silence"])
def test_the_whole_request_ends_with_its_deadline(get, server, path):
    begun = time.monotonic()
    with pytest.raises(httpx.TimeoutException):
        get(f"http://127.0.0.1:{server.server_port}/{path}", deadline_s=0.4)
    assert is_within(time.monotonic() - begun, 1.5)


@alone
def test_a_resolver_that_hangs_ends_with_the_deadline_too(get, server):
    def hanging(*_):
        server.closing.wait(10)
        return ["127.0.0.1"]

    begun = time.monotonic()
    with pytest.raises(httpx.TimeoutException):
        get("http://slow.example/plain", resolver=hanging, deadline_s=0.3)
    assert is_within(time.monotonic() - begun, 1.5)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/", "http://no-such-host.invalid/", "ftp://127.0.0.1/", "http:///x"]
)
def test_every_failure_is_an_http_error(get, url):
    with pytest.raises(httpx.HTTPError):
        get(url)


def test_the_next_address_is_tried_when_one_does_not_answer(get, server):
    def both(*_):
        return ["127.0.0.2", "127.0.0.1"]  # the server listens on the second alone

    assert get(f"http://two.example:{server.server_port}/plain", resolver=both).status == 200
