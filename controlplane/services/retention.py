"""Deletes what is older than its retention: events, reports of routers, and configurations that nothing needs.

Each run deletes a bounded number of rows, so that it holds locks briefly; runs follow every ten minutes. The audit log
ends by ``services/audit_log.py``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Max, QuerySet
from django.utils import timezone

from controlplane.models import (
    OPEN_ROLLOUTS,
    ConfigSnapshot,
    Event,
    EventKind,
    Rollout,
    Router,
    RouterReport,
)

MAX_DELETED = 20_000  # rows of a table in one run
MAX_CONFIGURATIONS = 500  # in one run
REPORT_RETENTION = timedelta(days=30)  # far longer than a router resends an event


def delete_expired_events() -> int:
    """Delete events older than ``EVENTS_RETENTION_DAYS``; their number.

    Removals of replicas stay as long as the sums of their readings, which they assign to a pool.
    """
    now = timezone.now()
    expired = Event.objects.filter(at__lt=now - timedelta(days=settings.EVENTS_RETENTION_DAYS))
    with_sums = now - timedelta(days=max(settings.ROLLUP_RETENTION_DAYS.values()))
    expired = expired.exclude(kind=EventKind.REPLICA_REMOVED, at__gte=with_sums)
    return _delete(expired, MAX_DELETED)


def delete_expired_reports() -> int:
    """Delete the records by which resent events of routers are recognized; their number."""
    expired = RouterReport.objects.filter(taken_at__lt=timezone.now() - REPORT_RETENTION)
    return _delete(expired, MAX_DELETED)


def delete_expired_configurations() -> int:
    """Delete configurations older than ``CONFIGURATIONS_RETENTION_DAYS``; their number.

    Not the newest one, those that a router runs or was sent, and those of open rollouts. Ended rollouts stay without.
    """
    before = timezone.now() - timedelta(days=settings.CONFIGURATIONS_RETENTION_DAYS)
    needed = {ConfigSnapshot.objects.aggregate(newest=Max("number"))["newest"]}
    for numbers in Router.objects.values_list("running_number", "pushed_number"):
        needed |= set(numbers)
    needed |= set(Rollout.objects.filter(state__in=OPEN_ROLLOUTS).values_list("snapshot__number", flat=True))
    expired = ConfigSnapshot.objects.filter(created_at__lt=before).exclude(number__in=needed - {None})
    with transaction.atomic():
        keys = _keys(expired, MAX_CONFIGURATIONS)
        Rollout.objects.filter(snapshot__in=keys).update(snapshot=None)
        return ConfigSnapshot.objects.filter(pk__in=keys).delete()[0]


def _keys(expired: QuerySet[Any], limit: int) -> list[Any]:
    """Keys to delete by: a join with a limited subquery is quadratic where the planner expects few rows."""
    return list(expired.order_by().values_list("pk", flat=True)[:limit])


def _delete(expired: QuerySet[Any], limit: int) -> int:
    deleted: int = expired.model.objects.filter(pk__in=_keys(expired, limit)).delete()[0]
    return deleted
