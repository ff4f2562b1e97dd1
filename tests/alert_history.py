"""Alerts in every state, for tests of pages."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.contrib.auth.models import User
from django.utils import timezone

from controlplane.models import Pool
from telemetry.alerts.message import alert_labels
from telemetry.alerts.notifications import notify_due
from telemetry.alerts.pipeline import record_transition, resolve
from telemetry.models import Alert, AlertRule, AlertTransition, RuleKind
from telemetry.services.alerts.alerts import acknowledge, create_silence
from telemetry.services.alerts.rules import create_rule

CAUSE = {
    "kind": "prompt_changed",
    "confidence": 0.82,
    "summary": "The prompt of task group coding changes at byte 412: a date with a time.",
    "evidence": {"offset": 412, "class": "timestamp", "requests": 740},
    "advice": "Move the date behind what all requests share.",
}


def alerts_of_every_state(pool: Pool, by: User) -> dict[str, int]:
    """One alert of each state; ids by name."""
    now = timezone.now()
    alerts = {
        "firing": _fire(pool, "hit_rate_drop", now, value=0.31, limit=0.49, baseline=0.64, causes=[CAUSE]),
        "taken": _fire(pool, "kv_pressure", now, subject="gpu-2", value=0.97, limit=0.95),
        "silenced": _fire(pool, "load_skew", now, value=1.9, limit=1.5, unit="count"),
        "over": _fire(pool, "replica_down", now, subject="gpu-3", value=90.0, limit=30.0, unit="seconds"),
    }
    pending = _fire(pool, "ttft_objective", now, value=0.4, limit=0.3)
    Alert.objects.filter(pk=pending.pk).update(state="pending", fired_at=None)
    matchers = ["kind=load_skew"]
    create_silence(matchers=matchers, ends_at=now + timedelta(hours=4), comment="Moving a rack", by=by)
    notify_due(timezone.now())
    acknowledge(alerts["taken"], by=by, note="Adding a replica")
    resolve(alerts["over"], now)
    notify_due(timezone.now())
    return {**{name: alert.pk for name, alert in alerts.items()}, "pending": pending.pk}


def _fire(pool: Pool, kind: str, now: datetime, *, subject: str = "", **figures: object) -> Alert:
    rule = AlertRule.objects.filter(pool=pool, kind=kind).first()
    rule = rule or create_rule(pool, name=RuleKind(kind).label, kind=kind)
    started_at = now - timedelta(minutes=12)
    Alert.objects.filter(rule=rule, state="firing").delete()
    summary = f"{RuleKind(kind).label} of pool {pool.name}{subject and f', {subject}'}."
    alert = Alert.objects.create(
        rule=rule, pool=pool, subject=subject, state="firing", started_at=started_at, last_breach_at=now,
        fired_at=started_at, labels=alert_labels(rule, subject), summary=summary, explained_at=now, **figures,
    )  # fmt: skip
    record_transition(alert, AlertTransition.PENDING, started_at)
    record_transition(alert, AlertTransition.FIRED, started_at)
    return alert
