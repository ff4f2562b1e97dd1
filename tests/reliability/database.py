"""PostgreSQL outages and the conditions that must hold during and after them (R15)."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import httpx

from tests.conftest import wait_until
from tests.reliability.flapping import HEALTH, Flapping, Name, Spooled, flapping
from tests.reliability.stand import STATEMENT_S, Stand, answers, soon

RECOVERS_S = 5.0  # after its return (R15)
GIVES_UP_S = STATEMENT_S + 2  # which the client waits beyond what the server is given
TOLD_S = 40  # within which a router that is left in peace has told everything: two heartbeats, and the pauses of before


class Fault(StrEnum):
    """Kinds of outage."""

    RESTARTED = "restarted"  # in good order
    KILLED = "killed"
    AWAY = "away"  # killed, and not started for a while


def faults(count: int, seed: int) -> list[Fault]:
    """Seeded sequence of faults: half are restarts, one is a long outage."""
    chosen = [Fault.RESTARTED] * (count // 2) + [Fault.KILLED] * (count - count // 2)
    random.Random(seed).shuffle(chosen)
    chosen[chosen.index(Fault.KILLED)] = Fault.AWAY
    return chosen


@contextmanager
def hurt(stand: Stand, fault: Fault, away_s: float = 0.0) -> Iterator[None]:
    """Apply a fault for the length of the block, then restore the server."""
    stand.postgres.stop() if fault is Fault.RESTARTED else stand.postgres.kill()
    returns_at = time.monotonic() + (away_s if fault is Fault.AWAY else 0.0)
    yield
    wait_until(lambda: time.monotonic() > returns_at, away_s + 5, "time to pass", every_s=0.1)
    stand.restart_postgres()


def until_it_answers(rest: httpx.Client, within_s: float = RECOVERS_S) -> float:
    """Wait until the API answers; seconds it took."""
    begun = time.monotonic()
    soon(lambda: answers(lambda: rest.get("pools")) == 200, within_s, "the API to answer again")
    return time.monotonic() - begun


@dataclass(frozen=True)
class Told:
    """Faults in a router's stored events: missing and duplicate numbers. Empty if all is well."""

    stored: int
    lives: int
    turns: int  # of the replica that the router saw fall ill and recover
    lost: list[Name]  # stood on the router's disk, or have a number between others, and are not stored
    repeated: list[Name]


class Telling:
    """A real router that produces events all the time and may be killed."""

    def __init__(self, stand: Stand, replica: Flapping) -> None:
        self._stand = stand
        self._replica = replica
        self._spool = Spooled(stand.folder / "data" / "router-1")

    def kill(self) -> None:
        """Kill and restart the router; its unsent events must survive."""
        self._stand.router.kill()
        self._stand.router.start()

    def until_waiting(self) -> None:
        """Wait until unsent events are on its disk."""
        wait_until(lambda: self._spool.waiting, TOLD_S, "an event to wait", every_s=0.05)

    def counted(self) -> Told:
        """Stop the router and compare stored events with sent ones; events still on its disk are not counted."""
        soon(lambda: not self._spool.waiting, TOLD_S, "everything to be told")
        self._stand.router.stop()
        left = self._spool.waiting
        with self._stand.sql() as server:
            events = Counter((str(boot), int(seq)) for boot, seq in server.execute(EVENTS).fetchall())
            reports = Counter((str(boot), int(seq)) for boot, seq in server.execute(REPORTS).fetchall())
        lost = (self._spool.names | _numbered(list(events))) - left - (events.keys() & reports.keys())
        repeated = [name for name, times in events.items() if times > 1]
        lives = len({boot for boot, _ in events})
        return Told(events.total(), lives, self._replica.turns, sorted(lost), repeated)


EVENTS = "select detail ->> 'boot', detail ->> 'seq' from controlplane_event where detail ? 'seq'"
REPORTS = "select boot, seq from controlplane_routerreport"


def _numbered(names: Sequence[Name]) -> set[Name]:
    """Every number from 1 to the last, for each boot."""
    last: dict[str, int] = {}
    for boot, seq in names:
        last[boot] = max(seq, last.get(boot, 0))
    return {(boot, seq) for boot, most in last.items() for seq in range(1, most + 1)}


@contextmanager
def telling(stand: Stand, rest: httpx.Client) -> Iterator[Telling]:
    """Such a router for the length of a block."""
    with flapping() as replica:
        for made in (
            rest.post("pools", json={"name": "flapping", "models": ["flapping"], "health": HEALTH}),
            rest.post("replicas", json={"pool": "flapping", "name": "flapping", "url": replica.url}),
        ):
            assert made.status_code == 201, made.text
        one = Telling(stand, replica)
        with one._spool.watched():
            stand.router.start()
            try:
                yield one
            finally:
                stand.router.stop()
