"""Why a drop that fires does so: asked when it begins, and again while it lasts, because evidence comes in late."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q

from controlplane.isolation import isolated_items
from controlplane.models import PeriodicTask
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.pipeline import note
from telemetry.models import Alert, AlertMove, AlertState
from telemetry.services.alerts.causes import explain_drop

AGAIN = timedelta(minutes=3)
BASELINE = timedelta(hours=1)  # before the drop, that it is compared with
LEAST_BASELINE = timedelta(minutes=2)
MOST_AT_ONCE = 5  # alerts of one run: each costs 14 queries; the others' turn comes with the next
DROPS = tuple(kind.name for kind in KINDS.values() if kind.is_drop)


def explain_drops(now: datetime) -> int:
    """Look for the causes of drops that fire and were not explained lately; of how many. A query where none is.

    Nothing that goes wrong there keeps an alert from being told.
    """
    stale = Q(explained_at=None) | Q(explained_at__lte=now - AGAIN)
    firing = Alert.objects.filter(stale, state=AlertState.FIRING, rule__kind__in=DROPS)
    due = list(firing.select_related("rule", "rule__group", "pool").order_by("explained_at", "pk")[:MOST_AT_ONCE])
    explained = 0
    if not due:
        return explained
    with isolated_items(PeriodicTask.ALERT_CAUSES) as item:
        for alert in due:
            Alert.objects.filter(pk=alert.pk).update(explained_at=now)  # also if that fails: the others' turn comes
            with item(f"alert {alert.pk}"), transaction.atomic():
                explain(alert, now)
                explained += 1
    return explained


def explain(alert: Alert, now: datetime) -> None:
    """Store the causes of one drop as they look now; the first that are found are a step of its life."""
    start, baseline_start = _spans(alert)
    causes = explain_drop(
        alert.pool,
        group=alert.rule.group.name if alert.rule.group else None,
        start=start,
        end=now,
        baseline_start=baseline_start,
        baseline_end=start,
    )
    found = [cause.as_json() for cause in causes]
    Alert.objects.filter(pk=alert.pk, state=AlertState.FIRING).update(causes=found, explained_at=now)
    if found and not alert.causes:
        note(alert, AlertMove.EXPLAINED, now, text=found[0]["summary"])


def _spans(alert: Alert) -> tuple[datetime, datetime]:
    """When the drop began, and since when its level held: a side before it that is of one level."""
    onset, since = alert.detail.get("onset"), alert.detail.get("level_since")
    window = timedelta(seconds=float(alert.detail.get("window_s") or 60))
    start = datetime.fromisoformat(onset) if onset else alert.started_at - window
    earliest = start - BASELINE
    level_since = datetime.fromisoformat(since) if since else earliest
    return start, min(max(earliest, level_since), start - LEAST_BASELINE)
