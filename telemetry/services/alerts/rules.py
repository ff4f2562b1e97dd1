"""Creates, changes and removes alert rules, and defines the default rules of a new pool.

A healthy pool is within the limits of the default rules whatever its traffic: they find outages and lasting overload,
not missed objectives, for which an operator sets narrower limits. Default rules are created once, with their pool; a
rule that an operator changes, disables or removes stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet, Subquery
from django.db.models.signals import post_save, pre_delete
from django.dispatch import receiver
from django.utils import timezone

from controlplane.errors import ConflictError, InvalidError, NameTakenError
from controlplane.models import EventKind, Pool, TaskGroup
from controlplane.services.checks import checked_text, lock_row, unique_or
from controlplane.services.events import record_event
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.notifications import notify_resolved
from telemetry.alerts.pipeline import resolve
from telemetry.channels.base import url
from telemetry.models import Alert, AlertRule, AlertState, EvaluationState, RuleKind, Severity
from telemetry.models.alert import REPEAT_S
from telemetry.services.alerts.alerts import alerts, open_alerts


@dataclass(frozen=True, slots=True)
class DefaultRule:
    """A rule that is created with a pool."""

    name: str
    kind: RuleKind
    severity: Severity = Severity.WARNING
    settings: Mapping[str, Any] = field(default_factory=dict)


def default_rules(scrape_interval_s: float) -> tuple[DefaultRule, ...]:
    """The default rules; the first is that of the hit rate."""
    # A worker that restarts evaluates again after about 5 s; three scrapes may be lost.
    behind_s = max(30.0, 3 * scrape_interval_s)
    return (
        DefaultRule("Hit rate drop", RuleKind.HIT_RATE_DROP),
        DefaultRule("Replica down", RuleKind.REPLICA_DOWN),
        DefaultRule("Metrics unreadable", RuleKind.METRICS_UNREADABLE),
        DefaultRule("Router lost", RuleKind.ROUTER_LOST),
        DefaultRule("No router left", RuleKind.ROUTER_LOST, Severity.CRITICAL, {"max_present": 0}),
        # No result while fewer than two routers share their state.
        DefaultRule("Routers apart", RuleKind.ROUTERS_APART),
        DefaultRule("Traffic vanished", RuleKind.TRAFFIC_VANISHED),
        DefaultRule("No data", RuleKind.NO_DATA, Severity.CRITICAL),
        # 30 % of first tokens later than 5 s for 15 min: longer than the prefill of a long prompt.
        DefaultRule(
            "TTFT objective", RuleKind.TTFT_OBJECTIVE, settings={"within_s": 5.0, "long_s": 900.0, "short_s": 300.0}
        ),
        DefaultRule("Error ratio", RuleKind.ERROR_RATIO, Severity.CRITICAL),
        DefaultRule("Stream failures", RuleKind.STREAM_FAILURES),
        DefaultRule("Replica ejected", RuleKind.REPLICA_EJECTED),
        # Affinity skews a quiet pool on purpose: only skew that makes requests wait is a problem.
        DefaultRule("Load skew", RuleKind.LOAD_SKEW, settings={"min_waiting": 1.0}),
        DefaultRule("KV pressure", RuleKind.KV_PRESSURE),
        # No result without a response cache.
        DefaultRule("Response cache store down", RuleKind.CACHE_STORE_DOWN),
        DefaultRule("Response cache hit share drop", RuleKind.CACHE_SHARE_DROP),
        DefaultRule("Configuration not converged", RuleKind.ROLLOUT_STUCK),
        # Confirmed by a second evaluation: the first one after a restart of the control plane is late by design.
        DefaultRule(
            "Telemetry behind", RuleKind.EVALUATOR_LAG, Severity.CRITICAL, {"behind_s": behind_s, "for_s": 10.0}
        ),
    )


MIN_REPEAT_S, MAX_REPEAT_S = 60, 2_592_000  # up to 30 days


def rules(pool: Pool | None = None) -> QuerySet[AlertRule]:
    """The rules of a pool, or all, with their pool and the time of the last evaluation; by pool and name."""
    last_run = Subquery(EvaluationState.objects.values("at")[:1])
    rows = AlertRule.objects.select_related("pool", "group").annotate(last_run_at=last_run)
    return rows if pool is None else rows.filter(pool=pool)


def effective_settings(rule: AlertRule) -> dict[str, Any]:
    """A rule's settings with defaults for those that it does not set; those that cannot be read as they are stored."""
    try:
        complete: dict[str, Any] = msgspec.to_builtins(KINDS[rule.kind].read(rule.settings))
    except (InvalidError, KeyError):  # KeyError: a kind of a later release
        return dict(rule.settings)
    return complete


@transaction.atomic
def create_rule(
    pool: Pool,
    *,
    name: str,
    kind: str = RuleKind.HIT_RATE_DROP,
    group: str | None = None,
    severity: str = Severity.WARNING,
    settings: Mapping[str, Any] | None = None,
    repeat_s: int = REPEAT_S,
    runbook_url: str = "",
    enabled: bool = True,
    by: User | None = None,
) -> AlertRule:
    """Create a rule. InvalidError for invalid settings, NameTakenError."""
    rule = AlertRule(
        pool=pool, name=checked_text("$.name", name, at_most=100), kind=kind, severity=severity, enabled=enabled
    )
    rule.settings = checked_settings(kind, settings or {})
    rule.repeat_s, rule.runbook_url = _checked_repeat(repeat_s), _checked_url(runbook_url)
    rule.group = group_of(pool, kind, group)
    with unique_or(lambda _: NameTakenError("rule", rule.name)):
        rule.save()
    summary = f"Alert rule {rule.name} of pool {pool.name} was created."
    record_event(EventKind.RULE_CREATED, summary, pool=pool, by=by, detail={"after": _event_detail(rule)})
    return rule


@transaction.atomic
def update_rule(rule: AlertRule, *, by: User | None = None, **changes: Any) -> AlertRule:
    """Change ``name``, ``group``, ``severity``, ``settings`` (all of them), ``repeat_s``, ``runbook_url``, ``enabled``.

    The kind cannot change. Disabling a rule or changing its group resolves its alerts. InvalidError, NameTakenError;
    ConflictError for a kind of a later release.
    """
    rule = lock_row(AlertRule.objects.select_for_update(of=("self",)).select_related("pool", "group"), rule.pk)
    if rule.kind not in KINDS:
        raise ConflictError(f"Kind {rule.kind} is of a later release: this one cannot change its rules.")
    before, group = _event_detail(rule), rule.group_id
    for name, value in changes.items():
        setattr(rule, name, _CHECKS[name](rule, value) if name in _CHECKS else value)
    with unique_or(lambda _: NameTakenError("rule", rule.name)):
        rule.save()
    if (after := _event_detail(rule)) != before:
        summary = f"Alert rule {rule.name} of pool {rule.pool.name} was changed."
        change = {"before": before, "after": after}
        record_event(EventKind.RULE_CHANGED, summary, pool=rule.pool, by=by, detail=change)
    if not rule.enabled:
        close_alerts(rule, reason="its rule was disabled")
    elif rule.group_id != group:
        close_alerts(rule, reason="its rule was changed to another task group")
    return rule


@transaction.atomic
def delete_rule(rule: AlertRule, *, by: User | None = None) -> None:
    """Remove a rule and its alerts. Firing alerts are resolved first, so that their channels are notified."""
    rule = lock_row(AlertRule.objects.select_for_update(of=("self",)).select_related("pool", "group"), rule.pk)
    close_alerts(rule, reason="its rule was removed")
    summary = f"Alert rule {rule.name} of pool {rule.pool.name} was removed."
    record_event(EventKind.RULE_REMOVED, summary, pool=rule.pool, by=by, detail={"before": _event_detail(rule)})
    rule.delete()


def _event_detail(rule: AlertRule) -> dict[str, Any]:
    """The values that an event records of a rule."""
    return {
        "name": rule.name,
        "enabled": rule.enabled,
        "group": rule.group.name if rule.group else None,
        "severity": rule.severity,
        "repeat_s": rule.repeat_s,
        "runbook_url": rule.runbook_url,
        "settings": rule.settings,
    }


def close_alerts(rule: AlertRule, *, reason: str) -> None:
    """Resolve the alerts of a rule that is no longer evaluated, and notify their channels."""
    now = timezone.now()
    for alert in open_alerts().filter(rule=rule):
        resolve(alert, now, reason=reason)
    Alert.objects.filter(rule=rule, state=AlertState.PENDING).delete()
    notify_resolved(alerts(rule.pool).filter(rule=rule), now)


@receiver(pre_delete, sender=AlertRule, dispatch_uid="telemetry.last_alerts")
def close_alerts_of_deleted_rule(instance: AlertRule, **_: Any) -> None:
    """Resolve the alerts of a rule before it is deleted with its pool or task group, so that receivers are notified."""
    close_alerts(instance, reason="its rule was removed")


@receiver(post_save, sender=Pool, dispatch_uid="telemetry.default_rules")
def create_default_rules(instance: Pool, created: bool, raw: bool = False, **_: Any) -> None:
    """Create the default alert rules of a pool in the transaction that creates the pool."""
    if created and not raw:
        ensure_default_rules(instance)


def ensure_default_rules(pool: Pool) -> AlertRule:
    """Create the default rules that a pool lacks; returns the first default rule. Two queries."""
    rows = [
        AlertRule(pool=pool, name=rule.name, kind=rule.kind, severity=rule.severity, settings=dict(rule.settings))
        for rule in default_rules(settings.SCRAPE_INTERVAL_S)
    ]
    AlertRule.objects.bulk_create(rows, ignore_conflicts=True)
    return AlertRule.objects.get(pool=pool, name=rows[0].name)


def checked_settings(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, if they are valid for the kind; InvalidError."""
    if kind not in KINDS:
        raise InvalidError("$.kind", f"expected one of {', '.join(KINDS)}")
    KINDS[kind].read(dict(settings))
    return dict(settings)


def group_of(pool: Pool, kind: str, name: str | None) -> TaskGroup | None:
    """The task group of a rule by its name; InvalidError."""
    if not name:
        return None
    if KINDS[kind].group_sources is None:
        raise InvalidError("$.group", f"a rule of kind {kind} is always for a whole pool")
    group = TaskGroup.objects.filter(pool=pool, name=name).first()
    if group is None:
        raise InvalidError("$.group", f"pool {pool.name} has no such task group")
    return group


def _checked_repeat(repeat_s: int) -> int:
    if repeat_s and not MIN_REPEAT_S <= repeat_s <= MAX_REPEAT_S:
        raise InvalidError("$.repeat_s", f"expected 0, or {MIN_REPEAT_S} to {MAX_REPEAT_S}")
    return repeat_s


def _checked_url(text: str) -> str:
    try:
        return url(text) if text else ""
    except ValueError as error:
        raise InvalidError("$.runbook_url", str(error)) from None


_CHECKS: dict[str, Callable[[AlertRule, Any], Any]] = {
    "name": lambda _, value: checked_text("$.name", value, at_most=100),
    "settings": lambda rule, value: checked_settings(rule.kind, value),
    "repeat_s": lambda _, value: _checked_repeat(value),
    "runbook_url": lambda _, value: _checked_url(value),
    "group": lambda rule, value: group_of(rule.pool, rule.kind, value),
}
