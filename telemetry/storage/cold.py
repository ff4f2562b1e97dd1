"""When a replica's cache was cold: for a while after each restart its hit rate says nothing of its traffic (H18)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings

from controlplane.models import Event, EventKind
from telemetry.metrics.windows import Window

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
    """Ascending by start; restarts shortly before the window count. One query, over events: they outlive readings.

    A restart is noticed at the end of the interval that it lies in, of which the whole is cold.
    """
    if not replica_ids:
        return []
    warm_up, interval = timedelta(seconds=warm_up_s), timedelta(seconds=settings.SCRAPE_INTERVAL_S)
    near = Event.objects.filter(
        kind=EventKind.REPLICA_RESTARTED,
        replica_id__in=replica_ids,
        at__gt=window.start - warm_up,
        at__lt=window.end + interval,
    )
    restarts = near.order_by("at", "replica_id").values_list("replica_id", "at")
    bands = [ColdBand(pk, max(at - interval, window.start), min(at + warm_up, window.end)) for pk, at in restarts]
    return [band for band in bands if band.start < band.end]
