"""Paged lists are read from the configured site only."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from controlplane.cli.rest import RestClient, Site


@contextmanager
def listing(next_url=""):
    """A server with a list of two pages, the second at ``next_url``; (its URL, the requests that it received)."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers.get("Authorization")))
            last = "cursor=2" in self.path
            next_page = None if last else f"{next_url}/api/v1/events?cursor=2&limit=1000"
            body = json.dumps({"results": [{"n": len(requests)}], "next": next_page}).encode()
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
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def test_a_token_is_not_sent_to_a_site_that_a_response_names():
    with listing() as (other_url, leaked), listing(other_url) as (site_url, requests):
        rest = RestClient(Site(site_url, "wp_secret"), retry_for_s=5)
        try:
            rows = rest.rows("events")
        finally:
            rest.close()
    assert leaked == []
    assert rows == [{"n": 1}, {"n": 2}]
    paths = ["/api/v1/events?limit=1000", "/api/v1/events?cursor=2&limit=1000"]
    assert requests == [(path, "Bearer wp_secret") for path in paths]
