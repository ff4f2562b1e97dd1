"""Recording what happened: in the timeline, and in the audit log where it was a change."""

from datetime import datetime
from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from controlplane.models import Event, EventKind, Pool, Project, Replica, Router
from controlplane.services.audit.log import append_entry

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
