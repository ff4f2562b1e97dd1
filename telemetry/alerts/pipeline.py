"""From rules to notifications: judge, step, write down, tell.

Theory of operation. Every change of an alert is a conditional update of its row, so of two evaluators that see the
same thing one makes the change and the other finds nothing to do; the database itself allows one open alert per
rule and pool. The event and the notifications are written in the transaction of the change: they exist exactly
if it does. Delivery is somebody else's work.
"""

from __future__ import annotations

import logging
from datetime import datetime

from django.db import IntegrityError, transaction

from controlplane.models import EventKind
from controlplane.services.events import record_event
from telemetry.alerts.evaluate import DropSettings, OpenAlert, RuleError, Step, Verdict, next_step
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.message import describe_drop, payload_of, summary_of
from telemetry.channels.enqueue import enqueue
from telemetry.models import Alert, AlertRule, AlertState, NotificationKind
from telemetry.models.alert import OPEN_STATES
from telemetry.storage.locks import EVALUATE, only_one

log = logging.getLogger(__name__)


def evaluate_rules(now: datetime) -> int:
    """Evaluate every enabled rule once; how many. 0 where another evaluator is at it."""
    with only_one(EVALUATE) as ours:
        rules = list(AlertRule.objects.filter(enabled=True).select_related("pool")) if ours else []
        for rule in rules:
            evaluate_rule(rule, now)
    return len(rules)


def evaluate_rule(rule: AlertRule, now: datetime) -> Verdict | None:
    """Judge one rule and take the step that follows; None for a rule whose settings cannot be read."""
    kind = KINDS[rule.kind]
    try:
        settings = kind.parse(rule.settings)
    except RuleError as error:  # written past the services
        log.warning("alert rule %s: %s", rule.pk, error)
        return None
    alert = Alert.objects.filter(rule=rule, state__in=OPEN_STATES).select_related("pool", "rule").first()
    verdict = kind.judge(rule.pool, settings, now, alert.started_at if alert else None)
    AlertRule.objects.filter(pk=rule.pk).update(evaluated_at=now, verdict=verdict.as_json())
    known = alert and OpenAlert(alert.state == AlertState.FIRING, alert.started_at, alert.last_breach_at)
    _take(next_step(settings, verdict.answer, known or None, now), rule, settings, verdict, alert=alert, now=now)
    return verdict


@transaction.atomic
def _take(
    step: Step, rule: AlertRule, settings: DropSettings, verdict: Verdict, *, alert: Alert | None, now: datetime
) -> None:
    if step in {Step.OPEN, Step.OPEN_FIRING}:
        alert = _open(rule, verdict, now)
    if alert is None:
        return
    if step in {Step.FIRE, Step.OPEN_FIRING}:
        _fire(alert, settings, verdict, now)
    elif step is Step.EXTEND:
        Alert.objects.filter(pk=alert.pk, state__in=OPEN_STATES).update(last_breach_at=now, **_figures(verdict))
    elif step is Step.DROP:
        Alert.objects.filter(pk=alert.pk, state=AlertState.PENDING).delete()
    elif step is Step.RESOLVE:
        resolve(alert, now)


def _figures(verdict: Verdict) -> dict[str, float | None]:
    return {"value_ratio": verdict.value_ratio, "baseline_ratio": verdict.baseline_ratio}


def _open(rule: AlertRule, verdict: Verdict, now: datetime) -> Alert | None:
    """A pending alert; None where somebody else opened one first."""
    summary = summary_of(rule.pool, verdict)
    try:
        with transaction.atomic():
            return Alert.objects.create(
                rule=rule, pool=rule.pool, started_at=now, last_breach_at=now, summary=summary, **_figures(verdict)
            )
    except IntegrityError:
        return None


def _fire(alert: Alert, settings: DropSettings, verdict: Verdict, now: datetime) -> None:
    detail = describe_drop(alert.pool, settings, verdict, now)
    changes = {
        "state": AlertState.FIRING,
        "fired_at": now,
        "last_breach_at": now,
        "summary": summary_of(alert.pool, verdict),
        "ceiling_ratio": detail["ceiling_ratio"],
        "detail": detail,
        **_figures(verdict),
    }
    if _change(alert, AlertState.PENDING, changes):
        record_event(EventKind.ALERT_FIRING, alert.summary, pool=alert.pool, detail={"alert": alert.pk})
        notify(alert, NotificationKind.FIRING, now)


def resolve(alert: Alert, now: datetime, *, because: str = "") -> bool:
    """End a firing alert and tell of it; whether it was we who ended it."""
    if not _change(alert, AlertState.FIRING, {"state": AlertState.RESOLVED, "resolved_at": now}):
        return False
    lasted_min = (now - (alert.fired_at or alert.started_at)).total_seconds() / 60
    summary = f"Hit rate of pool {alert.pool.name}: the alert ended after {lasted_min:.0f} min{because}."
    record_event(EventKind.ALERT_RESOLVED, summary, pool=alert.pool, detail={"alert": alert.pk})
    notify(alert, NotificationKind.RESOLVED, now)
    return True


def _change(alert: Alert, before: AlertState, changes: dict[str, object]) -> bool:
    """The conditional update of a transition; the object follows the row."""
    if not Alert.objects.filter(pk=alert.pk, state=before).update(**changes):
        return False
    for name, value in changes.items():
        setattr(alert, name, value)
    return True


def notify(alert: Alert, kind: NotificationKind, now: datetime) -> None:
    """Put a message for each enabled channel into the outbox."""
    enqueue({alert.pk: payload_of(alert, kind, now)}, kind, now)
