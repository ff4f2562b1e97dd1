"""Recording what happened: in the timeline, and in the audit log where it was a change.

Following events: every one that somebody may see, once, in an order that stays.

Theory of operation. An id is given out when a row is written, not when it is committed, so whoever reads "ids above
the last one" can miss one that is committed late. Events are therefore followed in the order of their transactions'
numbers, and only as far as no transaction is still at work: whatever is committed later has a higher number than all
that was shown. The place of an event, ``(xact, id)``, is found again by its id alone.

Waiting is polling, because it works behind every pooler and costs the same however many wait: a process asks for the
newest event at most every half second while anybody waits, and a client reads for itself only when that has moved.
"""

from __future__ import annotations

import threading
import time
from datetime import datetime
from typing import Any

from django.contrib.auth.models import User
from django.db import connection
from django.db.models import BigIntegerField, Func, Q, QuerySet, TextField
from django.db.models.functions import Cast
from django.utils import timezone

from controlplane.models import Event, EventKind, Pool, Project, Replica, Router
from controlplane.services.audit_log import append_entry

# What was merely observed; everything else changed what the fleet should be, or who may change it.
OBSERVED = frozenset(
    {
        EventKind.AUDIT_BROKEN,  # to what is broken nothing is added
        EventKind.CONFIG_APPLIED,
        EventKind.CONFIG_REFUSED,
        EventKind.ROLLOUT_BEGUN,
        EventKind.ROLLOUT_COMPLETED,
        EventKind.ROLLOUT_HELD,
        EventKind.ROLLOUT_RELEASED,
        EventKind.ROUTER_JOINED,
        EventKind.ROUTER_LOST,
        EventKind.ROUTER_STARTED,
        EventKind.ROUTER_REPORTED,
        EventKind.CONFIG_LOADED,
        EventKind.REPLICA_EJECTED,
        EventKind.REPLICA_READMITTED,
        EventKind.REPLICA_UNREACHABLE,
        EventKind.REPLICA_REACHABLE,
        EventKind.REPLICA_DOWN,
        EventKind.REPLICA_UP,
        EventKind.REPLICA_RESTARTED,
        EventKind.TRAFFIC_MIX_CHANGED,
        EventKind.ALERT_FIRING,
        EventKind.ALERT_RESOLVED,
        EventKind.SOURCE_FAILING,
        EventKind.SOURCE_RECOVERED,
        EventKind.SOURCE_HOLDING,
        EventKind.REPLICAS_FOUND,
        EventKind.REPLICAS_MISSING,
    }
)


def record_event(
    kind: EventKind,
    summary: str,
    *,
    pool: Pool | None = None,
    replica: Replica | None = None,
    router: Router | None = None,
    project: Project | None = None,
    by: User | None = None,
    detail: dict[str, Any] | None = None,
    reason: str = "",
    at: datetime | None = None,
) -> Event:
    """Record one event, in the transaction of what it tells of. ``by`` is None where the system acted by itself, and
    ``at`` where it is happening now.

    ``detail`` holds JSON: ``before`` and ``after`` where something was changed, and never a secret. ``project`` is
    the pool's where there is a pool. Whoever calls this holds the locks on rows that it needs: the audit log's comes
    after them.
    """
    detail = detail or {}
    if kind not in OBSERVED:
        within = project or (pool.project if pool else None)
        append_entry(
            kind,
            summary,
            by=by,
            project=within.name if within else "",
            pool=pool.name if pool else "",
            reason=reason,
            before=detail.get("before"),
            after=detail.get("after", None if "before" in detail else detail or None),
        )
    return Event.objects.create(
        at=at or timezone.now(),
        kind=kind,
        summary=summary[:500],
        pool=pool,
        replica=replica,
        router=router,
        actor=by,
        detail=detail,
    )


Place = tuple[int, int]  # (xact, id), ascending; (0, 0) is before everything
START: Place = (0, 0)
EVERY_S = 0.5


def settled() -> QuerySet[Event]:
    """The events that no transaction at work can precede any more, in their order."""
    rows: QuerySet[Event] = Event.objects.filter(xact__lt=_oldest_at_work()).order_by("xact", "id")
    return rows


def newest_position() -> Place:
    """The place of the newest settled event. One query, on an index."""
    newest = settled().reverse().values_list("xact", "id").first()
    return newest or START


def position_of(event_id: int) -> Place:
    """The place of an event, or of the newest one before it if it is gone."""
    found = Event.objects.filter(pk__lte=event_id).order_by("-pk").values_list("xact", "id").first()
    return found or START


def events_after(place: Place, rows: QuerySet[Event], limit: int) -> list[Event]:
    """Those of ``rows`` that follow a place, at most ``limit``, the oldest first."""
    xact, number = place
    later = rows.filter(Q(xact__gt=xact) | Q(xact=xact, pk__gt=number), xact__lt=_oldest_at_work())
    return list(later.order_by("xact", "id")[:limit])


def reset_foreign_events() -> int:
    """Put events first whose transactions this database has yet to come to: it was restored from another's dump."""
    foreign = Event.objects.filter(xact__gte=Cast(Cast(_SnapshotMaximum(), TextField()), BigIntegerField()))
    return foreign.update(xact=0)


class PositionCache:
    """The newest place as this process knows it, at most half a second old. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: Place = START
        self._read_at = 0.0

    def read(self) -> Place:
        """The newest place; a query at most every half second. The connection is given back."""
        with self._lock:
            if time.monotonic() - self._read_at >= EVERY_S:
                self._known = newest_position()
                self._read_at = time.monotonic()
                release_connection()
            return self._known


def release_connection() -> None:
    """Give the database connection back while waiting."""
    if not connection.in_atomic_block:
        connection.close()


class _SnapshotMinimum(Func):
    function = "pg_snapshot_xmin"
    template = "%(function)s(pg_current_snapshot())"


class _SnapshotMaximum(Func):
    function = "pg_snapshot_xmax"
    template = "%(function)s(pg_current_snapshot())"


def _oldest_at_work() -> Cast:
    """The lowest number of a transaction that is still at work."""
    return Cast(Cast(_SnapshotMinimum(), TextField()), BigIntegerField())
