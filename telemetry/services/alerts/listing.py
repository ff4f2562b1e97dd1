"""The alerts that pages and the API list: those that are open, and those that were."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.models import Pool
from telemetry.models import Alert, AlertState
from telemetry.models.alert import OPEN_STATES


def open_alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Pending and firing alerts with their rule and pool, newest first."""
    return alerts(pool).filter(state__in=OPEN_STATES)


def past_alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Alerts that fired and have ended, newest first."""
    return alerts(pool).filter(state=AlertState.RESOLVED)


def alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Alerts in whatever state, with their rule and pool, newest first."""
    found = Alert.objects.select_related("rule", "rule__group", "pool").order_by("-started_at", "-pk")
    return found if pool is None else found.filter(pool=pool)
