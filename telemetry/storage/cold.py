"""When a replica's cache was cold: for a while after each restart its hit rate says nothing of its traffic (H18)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from telemetry.metrics.rates import ReadingState
from telemetry.metrics.windows import Window
from telemetry.models import Reading

COLD_S = 120.0  # after a restart a cache is filling, and its figures mislead


@dataclass(frozen=True, slots=True)
class ColdBand:
    """One replica from the restart that was noticed to the end of its warm-up, cut to the window."""

    replica_id: int
    start: datetime
    end: datetime

    def touches(self, start: datetime, end: datetime) -> bool:
        """Whether it lies in part between two times."""
        return self.start < end and self.end > start


def cold_bands(replica_ids: Sequence[int], window: Window, *, warm_up_s: float = COLD_S) -> list[ColdBand]:
    """Ascending by start; restarts shortly before the window count. One query over the readings of the window."""
    if not replica_ids:
        return []
    warm_up = timedelta(seconds=warm_up_s)
    near = Reading.objects.filter(at__gt=window.start - warm_up, at__lte=window.end, replica_id__in=replica_ids)
    restarts = (
        near.filter(state=ReadingState.RESET.value)
        .values_list("replica_id", "at", "interval_s")
        .order_by("at", "replica_id")
        .distinct()
    )
    bands = [
        ColdBand(pk, max(at - timedelta(seconds=interval_s or 0.0), window.start), min(at + warm_up, window.end))
        for pk, at, interval_s in restarts
    ]
    return [band for band in bands if band.start < band.end]
