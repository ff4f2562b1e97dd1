"""Broker outages and the conditions that must hold during and after them (R12 to R14)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import redis

from tests.conftest import wait_until
from tests.reliability.asking import Asking
from tests.reliability.stand import Stand
from tests.reliability.watched import Watched

RESUMES_S = 10.0  # after its return (R12)
LONG_RESUMES_S = 35.0  # after the return of one that was away for an hour (R13)
TICK_S = 1.0  # of a stand's scraper
FLUSHED_S = 2 * TICK_S  # (R14)
TURNS_S = 8.0  # before its return, at most, in which a fleet falls ill or recovers: alerts compare with just before


@dataclass(frozen=True)
class DependencyState:
    """Measurements of one outage."""

    away_s: float
    resumed_s: float  # after the return
    statuses: Counter[int]  # of what was read meanwhile


def kill_and_return(stand: Stand, rest: httpx.Client, fleet: Watched, away_s: float) -> DependencyState:
    """Kill the broker and restart it later; meanwhile read every page, change the fleet's state, and create an
    object.
    """
    stand.valkey.kill()
    returns_at = time.monotonic() + away_s
    with Asking(rest, every_s=0.5) as asking:
        _pass(lambda: time.monotonic() > returns_at - TURNS_S, away_s)
        fleet.turn()
        made = rest.post("pools", json={"name": f"made-{len(fleet.expected)}", "models": [f"m{len(fleet.expected)}"]})
        assert made.status_code == 201, made.text
        _pass(lambda: time.monotonic() > returns_at, away_s)
        stand.valkey.start()
        resumed_s = stand.until_ticks_resume(LONG_RESUMES_S)
    fleet.until_told()
    return DependencyState(away_s, resumed_s, asking.statuses)


def flush(stand: Stand) -> float:
    """Flush the broker; seconds until the next tick's work is done."""
    path = stand.environment["WARMPATH_REDIS_URL"].removeprefix("redis+socket://").partition("?")[0]
    with redis.Redis(unix_socket_path=path) as broker:
        broker.flushall()
    return stand.until_ticks_resume(RESUMES_S)


def _pass(condition: Callable[[], bool], within_s: float) -> None:
    wait_until(condition, within_s + 5, "time to pass", every_s=0.1)
