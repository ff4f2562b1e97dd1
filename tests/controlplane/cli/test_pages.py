"""Paged lists are read from the configured site only."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from controlplane.cli.rest import Rest, Site


@contextmanager
def listing(following=""):
    """A server with a list of two pages; ``following`` is the host of the second. Its URL and the requests."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get("Authorization")))
            last = "cursor=2" in self.path
            onward = None if last else f"{following}/api/v1/events?cursor=2&limit=1000"
            body = json.dumps({"results": [{"n": len(asked)}], "next": onward}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def test_a_token_is_not_sent_to_a_site_that_a_response_names():
    with listing() as (elsewhere, stolen), listing(elsewhere) as (own, asked):
        rest = Rest(Site(own, "wp_secret"), retry_for_s=5)
        try:
            rows = rest.rows("events")
        finally:
            rest.close()
    assert stolen == []
    assert rows == [{"n": 1}, {"n": 2}]
    paths = ["/api/v1/events?limit=1000", "/api/v1/events?cursor=2&limit=1000"]
    assert asked == [(path, "Bearer wp_secret") for path in paths]
