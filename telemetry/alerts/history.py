"""A pool's windows, as rules look at them."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import Any

from controlplane.models import Pool, Replica
from telemetry.alerts.evaluate import WindowSum
from telemetry.metrics.windows import Window
from telemetry.storage.cold import COLD_S, cold_bands
from telemetry.storage.roles import is_decode
from telemetry.storage.sums import EngineSums, engine_sums


def pool_windows(pool: Pool, *, since: datetime, until: datetime, window_s: float) -> list[WindowSum]:
    """Windows of ``window_s`` seconds side by side, the last one ending at ``until``, ascending; pool sums (H2).

    Only whole windows: the first one begins at ``since`` or up to a window's length later. Decode replicas are left out
    (H19), and so are others while their cache was cold (H18).
    """
    count = max(math.floor((until - since).total_seconds() / window_s), 1)
    window = Window(until - timedelta(seconds=count * window_s), until, window_s)
    replicas = list(pool.replicas.select_related("scrape_state").defer("scrape_state__marks"))
    counted = [replica for replica in replicas if not is_decode(replica, _told(replica, "role") or "")]
    by_start: dict[datetime, list[EngineSums]] = {start: [] for start in window.starts()}
    cold = _cold_steps([replica for replica in counted if _told(replica, "restarted_at")], window)
    for row in engine_sums([replica.pk for replica in counted], window):
        if (row.replica_id, row.start) not in cold:
            by_start[row.start].append(row)
    return [_together(start, rows) for start, rows in by_start.items()]


def _told(replica: Replica, what: str) -> Any:
    return getattr(getattr(replica, "scrape_state", None), what, None)


def _cold_steps(restarted: list[Replica], window: Window) -> set[tuple[int, datetime]]:
    """Replica and start of each step that a cold band lies in. No query where none restarted lately."""
    oldest = window.start - timedelta(seconds=COLD_S)
    bands = cold_bands([replica.pk for replica in restarted if _told(replica, "restarted_at") > oldest], window)
    step = timedelta(seconds=window.step_s)
    return {
        (band.replica_id, start) for band in bands for start in window.starts() if band.touches(start, start + step)
    }


def _together(start: datetime, rows: list[EngineSums]) -> WindowSum:
    known = [row for row in rows if row.queries is not None]
    if not known:
        return WindowSum(start, None, None, None)
    hits = sum((row.hits or 0) + (row.external_hits or 0) for row in known)
    counted = [row.requests for row in known if row.requests is not None]
    return WindowSum(start, sum(row.queries or 0 for row in known), hits, sum(counted) if counted else None)
