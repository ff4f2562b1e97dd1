"""A real router that produces events, because its replica keeps failing and recovering, and a check of those stored."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.conftest import wait_until
from tests.reliability.stand import Stand, soon

PROBES_PER_STATE = 5
HEALTH = {
    "interval_s": 0.5,
    "failures": 1,
    "successes": 1,
}  # so that each state lasts longer than the observer's interval
SENT_S = 40  # time in which a router sends all events: two heartbeats and back-off
EventId = tuple[str, int]  # boot and sequence number
EVENTS = "select detail ->> 'boot', detail ->> 'seq' from controlplane_event where detail ? 'seq'"
REPORTS = "select boot, seq from controlplane_routerreport"


class _Handler(BaseHTTPRequestHandler):
    server: FlappingReplica

    def do_GET(self) -> None:
        self.send_response(200 if self.server.probe() else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        pass


class FlappingReplica(ThreadingHTTPServer):
    """Healthy for some health checks, then unhealthy for as many, and so on."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._probes = 0

    @property
    def changes(self) -> int:
        """Number of state changes."""
        return max(0, self._probes - 1) // PROBES_PER_STATE

    def probe(self) -> bool:
        """Count a health check; whether the replica is healthy."""
        self._probes += 1
        return self.changes % 2 == 0


@contextlib.contextmanager
def flapping_replica() -> Iterator[FlappingReplica]:
    server = FlappingReplica()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()


@dataclass(frozen=True)
class Delivery:
    """Stored events compared with those on the router's disk. ``lost`` and ``repeated`` should be empty."""

    stored: int
    boots: int
    changes: int  # of the replica's state
    lost: list[EventId]  # were on the router's disk or are missing in the sequence, and are not stored
    repeated: list[EventId]


class EventRouter:
    """The stand's router, which may be killed, and every event that was in its spool."""

    def __init__(self, stand: Stand, replica: FlappingReplica) -> None:
        self._stand = stand
        self._replica = replica
        self._spool = stand.folder / "data" / "router-1" / "events"
        self._spooled: set[EventId] = set()

    def kill(self) -> None:
        """Kill and restart the router; its unsent events must survive."""
        self._stand.router.kill()
        self._stand.router.start()

    def until_unsent(self) -> None:
        """Wait until unsent events are in the spool."""
        wait_until(self._in_spool, SENT_S, "an unsent event", every_s=0.05)

    def stop_and_count(self) -> Delivery:
        """Stop the router and compare; events that are still in the spool are not counted."""
        soon(lambda: not self._in_spool(), SENT_S, "all events to be sent")
        self._stand.router.stop()
        unsent = self._in_spool()
        with self._stand.sql() as server:
            events = Counter((str(boot), int(seq)) for boot, seq in server.execute(EVENTS).fetchall())
            reports = Counter((str(boot), int(seq)) for boot, seq in server.execute(REPORTS).fetchall())
        lost = (self._spooled | _complete_sequences(list(events))) - unsent - (events.keys() & reports.keys())
        repeated = [name for name, times in events.items() if times > 1]
        boots = len({boot for boot, _ in events})
        return Delivery(events.total(), boots, self._replica.changes, sorted(lost), repeated)

    @contextlib.contextmanager
    def watching_spool(self) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.02):
                self._spooled |= self._in_spool()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=10)

    def _in_spool(self) -> set[EventId]:
        """Events in the spool now."""
        try:
            lines = self._spool.read_bytes().split(b"\n")
        except FileNotFoundError:
            return set()
        names = set()
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that is being written
                event = json.loads(line.partition(b" ")[2])
                names.add((str(event["boot"]), int(event["seq"])))
        return names


def _complete_sequences(names: Sequence[EventId]) -> set[EventId]:
    """Every number from 1 to the last, for each boot."""
    last: dict[str, int] = {}
    for boot, seq in names:
        last[boot] = max(seq, last.get(boot, 0))
    return {(boot, seq) for boot, highest in last.items() for seq in range(1, highest + 1)}


@contextlib.contextmanager
def event_router(stand: Stand, rest: httpx.Client) -> Iterator[EventRouter]:
    """The stand's router with a flapping replica, for the length of a block."""
    with flapping_replica() as replica:
        url = f"http://127.0.0.1:{replica.server_address[1]}"
        for created in (
            rest.post("pools", json={"name": "flapping", "models": ["flapping"], "health": HEALTH}),
            rest.post("replicas", json={"pool": "flapping", "name": "flapping", "url": url}),
        ):
            assert created.status_code == 201, created.text
        router = EventRouter(stand, replica)
        with router.watching_spool():
            stand.router.start()
            try:
                yield router
            finally:
                stand.router.stop()
