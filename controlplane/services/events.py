"""Recording events, and reading them as a stream: each once, in a stable order.

Theory of operation. An event's id is assigned when the row is written, not when it is committed, so a reader of "ids
above the last one" could miss one that is committed late. Readers therefore follow the transactions' numbers, up to
the oldest transaction that is still running: whatever is committed later has a higher number. The position of an event,
``(xact, id)``, can be looked up by its id.

Readers poll, because polling works behind every connection pooler: while clients wait, a process queries the newest
position at most every half second, and a client reads events only when the position has changed.
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

# Observations. All other kinds change the desired state, or permissions, and are audited.
OBSERVED = frozenset(
    {
        EventKind.AUDIT_BROKEN,  # nothing is appended to a broken log
        EventKind.CONFIG_APPLIED,
        EventKind.CONFIG_REJECTED,
        EventKind.ROLLOUT_ACKNOWLEDGED,
        EventKind.ROLLOUT_COMPLETED,
        EventKind.ROLLOUT_HELD,
        EventKind.ROLLOUT_HOLD_ENDED,
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

Position = tuple[int, int]  # (xact, id), ascending
BEFORE_ALL: Position = (0, 0)  # before every event
POLL_INTERVAL_S = 0.5


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
    """Record one event in the transaction of its change; changes are also appended to the audit log.

    ``detail`` is JSON without secrets, with ``before`` and ``after`` of a change. ``by`` is None for the system, ``at``
    is now by default, ``project`` the pool's. Callers lock their rows first: the audit log's lock comes after them.
    """
    detail = detail or {}
    if kind not in OBSERVED:
        project = project or (pool.project if pool else None)
        append_entry(
            kind,
            summary,
            by=by,
            project=project.name if project else "",
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


def newest_position() -> Position:
    """The newest position that no running transaction can precede. One query, on an index."""
    committed = Event.objects.filter(xact__lt=_transaction_number("xmin"))
    return committed.order_by("-xact", "-id").values_list("xact", "id").first() or BEFORE_ALL


def position_of(event_id: int) -> Position:
    """The position of an event, or of the newest one before it if it was deleted."""
    return Event.objects.filter(pk__lte=event_id).order_by("-pk").values_list("xact", "id").first() or BEFORE_ALL


def events_after(position: Position, rows: QuerySet[Event], limit: int) -> list[Event]:
    """At most ``limit`` of ``rows`` after a position, the oldest first."""
    xact, event_id = position
    later = rows.filter(Q(xact__gt=xact) | Q(xact=xact, pk__gt=event_id), xact__lt=_transaction_number("xmin"))
    return list(later.order_by("xact", "id")[:limit])


def reset_foreign_events() -> int:
    """Order events with transaction numbers of the future first: a dump of another database was restored."""
    return Event.objects.filter(xact__gte=_transaction_number("xmax")).update(xact=0)


class PositionCache:
    """The newest position, at most half a second old. For any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._position: Position = BEFORE_ALL
        self._read_at = 0.0

    def read(self) -> Position:
        """The newest position; a query at most every half second. Releases the connection."""
        with self._lock:
            if time.monotonic() - self._read_at >= POLL_INTERVAL_S:
                self._position = newest_position()
                self._read_at = time.monotonic()
                release_connection()
            return self._position


def release_connection() -> None:
    """Close the database connection while waiting."""
    if not connection.in_atomic_block:
        connection.close()


def _transaction_number(bound: str) -> Cast:
    """``xmin``: the oldest running transaction's number; ``xmax``: the next one's."""
    snapshot = Func(function=f"pg_snapshot_{bound}", template="%(function)s(pg_current_snapshot())")
    return Cast(Cast(snapshot, TextField()), BigIntegerField())
