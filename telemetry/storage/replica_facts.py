"""Facts about replicas that decide which readings count: cold caches after restarts, decode replicas, removed ones.

A decode replica gets its KV cache by transfer, so its own hit rate is near 1 whatever was reused, and a pool's rate
comes from its other replicas. The replica's role says which half of a split it is, else its label ``role`` (or
Kubernetes' ``llm-d.ai/role``), else its metrics: SGLang's have a label for it, vLLM's have not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import QuerySet

from controlplane.models import Event, EventKind, Pool, Replica, ReplicaRole, ReplicaState
from telemetry.metrics.windows import Window
from telemetry.models import ScrapeState

LABELS = ("role", "llm-d.ai/role")
DECODE = "decode"
WITHOUT_DECODE = "Without decode replicas: their cache is filled by transfer, so their own rate is near 100 %."
COLD_S = 120.0  # after a restart the cache fills, and its hit rate is misleading


@dataclass(frozen=True, slots=True)
class ColdBand:
    """One replica from a detected restart to the end of its warm-up, cut to the window."""

    replica_id: int
    start: datetime
    end: datetime

    def touches(self, start: datetime, end: datetime) -> bool:
        return self.start < end and self.end > start


def cold_bands(replica_ids: Sequence[int], window: Window, *, warm_up_s: float = COLD_S) -> list[ColdBand]:
    """The cold bands that overlap a window, ascending. One query over events, which are retained longer than readings.

    A restart is detected at the end of its interval, and the whole interval is cold.
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


def is_decode(replica: Replica, reported_role: str = "") -> bool:
    """Whether a replica decodes only, by its role, its labels, or else by the role that its metrics report."""
    if replica.role != ReplicaRole.BOTH:
        return replica.role == ReplicaRole.DECODE
    return next((replica.labels[name] for name in LABELS if name in replica.labels), reported_role) == DECODE


def removed_replicas(since: datetime, pools: Collection[Pool] | None = None) -> list[Replica]:
    """Replicas that were removed from some or all pools since a time, as unsaved rows. One query.

    Their readings count for their pool, so that figures of the past do not change with a removal.
    """
    removals = _removals().filter(at__gt=since)
    if pools is not None:
        removals = removals.filter(pool__in=pools)
    return [_removed_replica(removal) for removal in removals.order_by()]


def last_removal(name: str, pools: Collection[Pool]) -> tuple[Replica, Event] | None:
    """The last removed replica of a name as an unsaved row, and its removal; None: none of these pools had it.

    One query.
    """
    removals = _removals().filter(pool__in=pools, detail__before__name=name).select_related("actor")
    removal = removals.order_by("-at", "-pk").first()
    return None if removal is None else (_removed_replica(removal), removal)


def _removals() -> QuerySet[Event]:
    """Removals of replicas; those that an earlier release recorded without the replica's id are left out."""
    removals = Event.objects.filter(kind=EventKind.REPLICA_REMOVED, pool__isnull=False)
    return removals.filter(detail__replica_id__isnull=False).select_related("pool")


def _removed_replica(removal: Event) -> Replica:
    names = {field.name for field in Replica._meta.concrete_fields} - {"state"}  # noqa: SLF001 - Django's public name
    before = removal.detail.get("before") or {}
    fields = {name: value for name, value in before.items() if name in names}
    return Replica(pk=removal.detail["replica_id"], pool=removal.pool, state=ReplicaState.DISABLED, **fields)


def hit_rate_replicas(replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas whose counters make the hit rate of their pool. One query."""
    states = ScrapeState.objects.filter(replica__in=replicas).exclude(role="").only("replica_id", "role")
    roles = {state.replica_id: state.role for state in states}
    return [replica for replica in replicas if not is_decode(replica, roles.get(replica.pk, ""))]
