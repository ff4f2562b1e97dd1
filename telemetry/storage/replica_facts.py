"""When a replica's cache was cold: for a while after each restart its hit rate says nothing of its traffic (H18).

Which half of a prefill/decode split a replica is (H19).

A decode replica gets its KV cache by transfer, so its own hit rate is near 1 whatever was reused. A pool's rate is that
of its other replicas. A replica's label ``role`` (or ``llm-d.ai/role``, as Kubernetes has it) says what it is, else its
engine's metrics: SGLang's do, vLLM's have no word for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings

from controlplane.models import Event, EventKind, Replica
from telemetry.metrics.windows import Window
from telemetry.models import ScrapeState

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


LABELS = ("role", "llm-d.ai/role")
DECODE = "decode"
WITHOUT_DECODE = "Without decode replicas: their cache is filled by transfer, so their own rate is near 100 %."


def is_decode(replica: Replica, told: str = "") -> bool:
    """Whether its labels say so, or else its metrics (``told``)."""
    return next((replica.labels[name] for name in LABELS if name in replica.labels), told) == DECODE


def hit_rate_replicas(replicas: Sequence[Replica]) -> list[Replica]:
    """Those whose counters make the hit rate of their pool. One query."""
    states = ScrapeState.objects.filter(replica__in=replicas).exclude(role="").only("replica_id", "role")
    told = {state.replica_id: state.role for state in states}
    return [replica for replica in replicas if not is_decode(replica, told.get(replica.pk, ""))]
