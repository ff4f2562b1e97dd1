"""Rules and alerts: the verbs that change rules, and what pages and the API show of alerts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.errors import InvalidError, NameTakenError
from controlplane.models import EventKind, Pool
from controlplane.services.events import record_event
from telemetry.alerts.evaluate import LIMITS, RuleError
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.pipeline import resolve
from telemetry.models import Alert, AlertRule, AlertState, RuleKind
from telemetry.models.alert import OPEN_STATES

DEFAULT_RULE = "Hit rate drop"


def rules(pool: Pool | None = None) -> QuerySet[AlertRule]:
    """The rules of a pool, or all, with their pool; by pool and name."""
    found = AlertRule.objects.select_related("pool")
    return found if pool is None else found.filter(pool=pool)


def open_alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Pending and firing alerts with their rule and pool, newest first."""
    return _alerts(pool).filter(state__in=OPEN_STATES)


def past_alerts(pool: Pool | None = None) -> QuerySet[Alert]:
    """Alerts that fired and have ended, newest first."""
    return _alerts(pool).filter(state=AlertState.RESOLVED)


def _alerts(pool: Pool | None) -> QuerySet[Alert]:
    found = Alert.objects.select_related("rule", "pool").order_by("-started_at", "-pk")
    return found if pool is None else found.filter(pool=pool)


def effective_settings(rule: AlertRule) -> dict[str, float]:
    """A rule's settings with the defaults of those that it does not set."""
    return {name: rule.settings.get(name, default) for name, (_, _, default, _) in LIMITS.items()}


@transaction.atomic
def create_rule(
    pool: Pool,
    *,
    name: str,
    kind: str = RuleKind.HIT_RATE_DROP,
    settings: Mapping[str, Any] | None = None,
    enabled: bool = True,
    by: User | None = None,
) -> AlertRule:
    """Create a rule; InvalidError for settings that no rule can have, NameTakenError."""
    checked = _checked(kind, settings or {})
    rule = _saved(AlertRule(pool=pool, name=_checked_name(name), kind=kind, settings=checked, enabled=enabled))
    summary = f"Alert rule {rule.name} of pool {pool.name} was created."
    record_event(EventKind.RULE_CREATED, summary, pool=pool, by=by, detail={"after": facts(rule)})
    return rule


@transaction.atomic
def update_rule(
    rule: AlertRule,
    *,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    enabled: bool | None = None,
    by: User | None = None,
) -> AlertRule:
    """Change what is given; ``settings`` replaces all of them. Disabling a rule ends its alerts. InvalidError."""
    rule = AlertRule.objects.select_for_update(of=("self",)).select_related("pool").get(pk=rule.pk)
    before = facts(rule)
    if name is not None:
        rule.name = _checked_name(name)
    if settings is not None:
        rule.settings = _checked(rule.kind, settings)
    if enabled is not None:
        rule.enabled = enabled
    rule = _saved(rule)
    if (after := facts(rule)) != before:
        summary = f"Alert rule {rule.name} of pool {rule.pool.name} was changed."
        change = {"before": before, "after": after}
        record_event(EventKind.RULE_CHANGED, summary, pool=rule.pool, by=by, detail=change)
    if not rule.enabled:
        close_alerts(rule)
    return rule


@transaction.atomic
def delete_rule(rule: AlertRule, *, by: User | None = None) -> None:
    """Remove a rule and its alerts; what was firing is first resolved, so that nobody waits for the end of it."""
    close_alerts(rule)
    summary = f"Alert rule {rule.name} of pool {rule.pool.name} was removed."
    record_event(EventKind.RULE_REMOVED, summary, pool=rule.pool, by=by, detail={"before": facts(rule)})
    rule.delete()


def facts(rule: AlertRule) -> dict[str, Any]:
    """What an event shows of a rule before and after a change."""
    return {"name": rule.name, "enabled": rule.enabled, "settings": rule.settings}


def close_alerts(rule: AlertRule) -> None:
    """End what is open of a rule that is no longer evaluated."""
    now = timezone.now()
    for alert in open_alerts().filter(rule=rule):
        resolve(alert, now, because=", because its rule was disabled")
    Alert.objects.filter(rule=rule, state=AlertState.PENDING).delete()


def ensure_default_rule(pool: Pool) -> AlertRule:
    """The rule that every pool starts with; the one that is there where there is one."""
    rule, _ = AlertRule.objects.get_or_create(
        pool=pool, name=DEFAULT_RULE, defaults={"kind": RuleKind.HIT_RATE_DROP, "settings": {}}
    )
    return rule


def _checked(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    if kind not in KINDS:
        raise InvalidError("$.kind", f"expected one of {', '.join(KINDS)}")
    try:
        KINDS[kind].parse(dict(settings))
    except RuleError as error:
        path = f"$.settings.{error.field}" if error.field else "$.settings"
        raise InvalidError(path, error.reason) from None
    return dict(settings)


def _checked_name(name: str) -> str:
    if not name.strip() or len(name) > 100:
        raise InvalidError("$.name", "expected 1 to 100 characters")
    return name.strip()


def _saved(rule: AlertRule) -> AlertRule:
    try:
        with transaction.atomic():
            rule.save()
    except IntegrityError:
        raise NameTakenError("rule", rule.name) from None
    return rule
