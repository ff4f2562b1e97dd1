"""Builds short histories for rule kinds."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from telemetry.alerts.findings import Finding, Findings
from telemetry.alerts.history_window import History, ReplicaStep, WindowSum
from telemetry.alerts.kinds import KINDS
from tests.telemetry.conftest import T0


def window(ratio: float | None = 0.8, *, queries: float = 100_000, requests: float | None = 100, at: datetime = T0):
    """A window with a hit rate."""
    return WindowSum(at, queries, None if ratio is None else ratio * queries, requests)


def step(
    ratio: float = 0.8, *, queries: float = 100_000, requests: float = 100, read: bool = True, failed: bool = False
):
    """A replica's step."""
    return ReplicaStep(queries, ratio * queries, requests, read=read, failed=failed)


FAILED = ReplicaStep(None, None, None, read=False, failed=True)


def past(step_s: float, *, count: int = 1, replicas: tuple[str, ...] = ("r1", "r2"), **parts: Any) -> History:
    """A past that ends at T0."""
    start = T0 - timedelta(seconds=step_s * count)
    return History(
        start, step_s, count, replicas, parts.pop("active", frozenset(replicas)), frozenset(replicas), **parts
    )


def evaluated(kind: str, history: History, group: str = "", **settings: Any) -> Findings:
    """Findings of a kind at the end of a history."""
    return KINDS[kind].evaluate(KINDS[kind].read(settings), history.at(history.count - 1), group)


def only(findings: Findings) -> Finding:
    (finding,) = findings.values()
    return finding
