"""A replica that alternates between healthy and unhealthy, so that a router has events, and a watch on the
router's spool.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TURN_PROBES = 5
INTERVAL_S = 0.5  # between probes: a turn is longer than a router's observer looks away
HEALTH = {"interval_s": INTERVAL_S, "failures": 1, "successes": 1}  # settings of its pool
LOOK_S = 0.02
Name = tuple[str, int]  # an event's, within its router: boot and number


class _Handler(BaseHTTPRequestHandler):
    server: Flapping

    def do_GET(self) -> None:
        self.send_response(200 if self.server.probed() else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        pass


class Flapping(ThreadingHTTPServer):
    """Answers ``TURN_PROBES`` probes healthy, then as many unhealthy, and so on."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._probes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def turns(self) -> int:
        """Number of state changes."""
        return max(0, self._probes - 1) // TURN_PROBES

    def probed(self) -> bool:
        """Count a probe; whether the replica is healthy."""
        self._probes += 1
        return self.turns % 2 == 0


@contextlib.contextmanager
def flapping() -> Iterator[Flapping]:
    """Such a replica for the length of a block."""
    server = Flapping()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()


class Spooled:
    """Every event seen in a router's spool."""

    def __init__(self, folder: Path) -> None:
        self.names: set[Name] = set()
        self._file = folder / "events"

    @property
    def waiting(self) -> set[Name]:
        """Events in the spool now."""
        try:
            lines = self._file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return set()
        found = set()
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that is being written
                told = json.loads(line.partition(b" ")[2])
                found.add((str(told["boot"]), int(told["seq"])))
        return found

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Poll the spool until the end of the block."""
        done = threading.Event()

        def look() -> None:
            while not done.wait(LOOK_S):
                self.names |= self.waiting

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=10)
