"""Outages of PostgreSQL and of the broker, and clients that poll during them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self

import httpx
import redis

from tests.conftest import wait_until
from tests.reliability.alerting_fleet import AlertingFleet
from tests.reliability.stand import STATEMENT_S, Stand, soon, status_of

RECOVERS_S = 5.0  # after PostgreSQL's return
CLIENT_TIMEOUT_S = STATEMENT_S + 2  # longer than the server's statement timeout
RESUMES_S = 10.0  # after the broker's return
LONG_RESUMES_S = 35.0  # after the broker's return from an hour's absence
FLUSHED_S = 2.0  # two ticks of a stand's scraper
CHANGE_BEFORE_S = 8.0  # the hit rate changes this long before the return, because alerts compare with the recent past
PAGES = ("/", "/policies/", "/events/")
ENDPOINTS = ("pools", "policies", "routers", "events", "alerts")


# --- polling clients ------------------------------------------------------------------------------------


class PolledResponse(NamedTuple):
    """One response."""

    address: str
    status: int  # 0: no response
    kind: str  # content type


class Polling:
    """A REST client, and optionally a browser, that poll until the end of the block."""

    def __init__(self, rest: httpx.Client, browser: httpx.Client | None = None, *, every_s: float = 0.4) -> None:
        self.responses: list[PolledResponse] = []
        self._every_s = every_s
        self._done = threading.Event()
        clients = [(rest, ENDPOINTS), *([(browser, PAGES)] if browser else [])]
        self._threads = [threading.Thread(target=self._poll, args=arguments) for arguments in clients]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(timeout=90)

    @property
    def statuses(self) -> Counter[int]:
        """Number of responses by status."""
        return Counter(response.status for response in self.responses)

    def addresses(self, status: int) -> set[str]:
        return {response.address for response in self.responses if response.status == status}

    def kinds(self, status: int, addresses: tuple[str, ...]) -> set[str]:
        """Content types of the responses from these addresses with this status."""
        matching = (response for response in self.responses if response.status == status)
        return {response.kind for response in matching if response.address in addresses}

    def _poll(self, client: httpx.Client, addresses: tuple[str, ...]) -> None:
        while not self._done.wait(self._every_s):
            for address in addresses:
                try:
                    response = client.get(address)
                except httpx.TransportError as error:
                    self.responses.append(PolledResponse(address, 0, type(error).__name__))
                else:
                    kind = response.headers["content-type"].partition(";")[0]
                    self.responses.append(PolledResponse(address, response.status_code, kind))


# --- PostgreSQL -----------------------------------------------------------------------------------------


class Fault(StrEnum):
    """Kinds of outage."""

    RESTARTED = "restarted"
    KILLED = "killed"
    DOWN = "down"  # killed, and started again after a while


def faults(count: int, seed: int) -> list[Fault]:
    """Seeded sequence of faults: half are restarts, one is a long outage."""
    sequence = [Fault.RESTARTED] * (count // 2) + [Fault.KILLED] * (count - count // 2)
    random.Random(seed).shuffle(sequence)
    sequence[sequence.index(Fault.KILLED)] = Fault.DOWN
    return sequence


@contextmanager
def database_outage(stand: Stand, fault: Fault, outage_s: float = 0.0) -> Iterator[None]:
    """Apply a fault for the length of the block, then restore the server."""
    stand.postgres.stop() if fault is Fault.RESTARTED else stand.postgres.kill()
    returns_at = time.monotonic() + (outage_s if fault is Fault.DOWN else 0.0)
    yield
    wait_until(lambda: time.monotonic() > returns_at, outage_s + 5, "time to pass", every_s=0.1)
    stand.restart_postgres()


def until_api_recovers(rest: httpx.Client, within_s: float = RECOVERS_S) -> float:
    """Wait until the API responds with 200; seconds it took."""
    started = time.monotonic()
    soon(lambda: status_of(lambda: rest.get("pools")) == 200, within_s, "the API to recover")
    return time.monotonic() - started


# --- the broker -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokerOutage:
    """Measurements of one outage."""

    outage_s: float
    resumed_s: float  # after the return
    statuses: Counter[int]  # of responses meanwhile


def kill_broker_for(stand: Stand, rest: httpx.Client, fleet: AlertingFleet, outage_s: float) -> BrokerOutage:
    """Kill the broker and restart it later; meanwhile poll, change the hit rate, and create a pool."""
    stand.valkey.kill()
    returns_at = time.monotonic() + outage_s
    with Polling(rest, every_s=0.5) as polling:
        _wait(lambda: time.monotonic() > returns_at - CHANGE_BEFORE_S, outage_s)
        fleet.change_hit_rate()
        number = len(fleet.expected)
        created = rest.post("pools", json={"name": f"created-{number}", "models": [f"m{number}"]})
        assert created.status_code == 201, created.text
        _wait(lambda: time.monotonic() > returns_at, outage_s)
        stand.valkey.start()
        resumed_s = stand.until_ticks_resume(LONG_RESUMES_S)
    fleet.until_received()
    return BrokerOutage(outage_s, resumed_s, polling.statuses)


def flush_broker(stand: Stand) -> float:
    """Flush the broker; seconds until the next tick's work is done."""
    path = stand.environment["WARMPATH_REDIS_URL"].removeprefix("redis+socket://").partition("?")[0]
    with redis.Redis(unix_socket_path=path) as broker:
        broker.flushall()
    return stand.until_ticks_resume(RESUMES_S)


def _wait(condition: Callable[[], bool], within_s: float) -> None:
    wait_until(condition, within_s + 5, "time to pass", every_s=0.1)
