"""Sums that only alert rules ask for; everything else is in sums.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from telemetry.metrics.windows import Window
from telemetry.storage.sums import STEP, during, rows_of


@dataclass(frozen=True, slots=True)
class PressureSums:
    """How full a replica was over one step."""

    replica_id: int
    start: datetime
    kv_usage_ratio: float | None  # mean over time and engines
    preemptions: int | None


@dataclass(frozen=True, slots=True)
class PredictedSums:
    """Answers of one replica that had a prediction and a report, over one step; tokens."""

    pool: str
    replica: str
    start: datetime
    requests: int
    predicted: int
    delivered: int
    prompt: int


def pressure_sums(replica_ids: Sequence[int], window: Window) -> list[PressureSums]:
    """Per replica and step, ascending. One query."""
    rows = rows_of(
        f"""
        select replica_id, {STEP} as start, avg(kv_usage_ratio), sum(preemptions)::bigint
        from telemetry_reading
        where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s::bigint[]) and state <> 'stale'
        group by replica_id, start order by replica_id, start
        """,  # noqa: S608 - no part of it comes from outside
        during(window) | {"ids": list(replica_ids)},
    )
    return [PressureSums(*row) for row in rows]


def predicted_sums(pools: Sequence[str], window: Window) -> list[PredictedSums]:
    """Per pool, replica and step, ascending, of all routers; steps without a prediction are left out. One query."""
    rows = rows_of(
        f"""
        select pool, replica, {STEP} as start, sum(usage_reported)::bigint, sum(predicted_tokens)::bigint,
            sum(predicted_cached_tokens)::bigint, sum(predicted_prompt_tokens)::bigint
        from telemetry_routerreading
        where at > %(start)s and at <= %(end)s and pool = any(%(pools)s) and replica <> ''
            and predicted_prompt_tokens > 0
        group by pool, replica, start order by pool, replica, start
        """,  # noqa: S608 - no part of it comes from outside
        during(window) | {"pools": list(pools)},
    )
    return [PredictedSums(*row) for row in rows]
