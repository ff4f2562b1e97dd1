"""A pool's windows, as rules look at them."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from controlplane.models import Pool
from telemetry.alerts.evaluate import WindowSum
from telemetry.metrics.windows import Window
from telemetry.storage.sums import EngineSums, engine_sums


def pool_windows(pool: Pool, *, since: datetime, until: datetime, window_s: float) -> list[WindowSum]:
    """Windows of ``window_s`` seconds side by side, the last one ending at ``until``, ascending; pool sums (H2).

    Only whole windows: the first one begins at ``since`` or up to a window's length later.
    """
    count = max(math.floor((until - since).total_seconds() / window_s), 1)
    window = Window(until - timedelta(seconds=count * window_s), until, window_s)
    replica_ids = list(pool.replicas.values_list("pk", flat=True))
    by_start: dict[datetime, list[EngineSums]] = {start: [] for start in window.starts()}
    for row in engine_sums(replica_ids, window):
        by_start[row.start].append(row)
    return [_together(start, rows) for start, rows in by_start.items()]


def _together(start: datetime, rows: list[EngineSums]) -> WindowSum:
    known = [row for row in rows if row.queries is not None]
    if not known:
        return WindowSum(start, None, None, None)
    hits = sum((row.hits or 0) + (row.external_hits or 0) for row in known)
    counted = [row.requests for row in known if row.requests is not None]
    return WindowSum(start, sum(row.queries or 0 for row in known), hits, sum(counted) if counted else None)
