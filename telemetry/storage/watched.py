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
    waiting: float | None  # requests in the queue, mean over time, summed over engines


def pressure_sums(replica_ids: Sequence[int], window: Window) -> list[PressureSums]:
    """Per replica and step, ascending. One query."""
    rows = rows_of(
        f"""
        select replica_id, {STEP} as start, avg(kv_usage_ratio), sum(preemptions)::bigint,
            sum(waiting) / count(distinct at) filter (where waiting is not null)
        from telemetry_reading
        where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s::bigint[]) and state <> 'stale'
        group by replica_id, start order by replica_id, start
        """,  # noqa: S608 - no part of it comes from outside
        during(window) | {"ids": list(replica_ids)},
    )
    return [PressureSums(*row) for row in rows]
