"""The alert rules that every pool starts with.

A healthy pool keeps their limits whatever its traffic: they find outages and lasting overload, not missed objectives.
An operator who has objectives narrows them. A rule that an operator changes, disables or deletes stays so: rules are
created once, with their pool.

Rules: the verbs that change them, and what a pool starts with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from django.conf import settings
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.errors import InvalidError, NameTakenError
from controlplane.models import EventKind, Pool, TaskGroup
from controlplane.services.checks import lock_row
from controlplane.services.events import record_event
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.notifications import notify_resolved
from telemetry.alerts.pipeline import resolve
from telemetry.models import Alert, AlertRule, AlertState, RuleKind, Severity
from telemetry.models.alert import REPEAT_S
from telemetry.services.alerts.alerts import alerts, open_alerts


@dataclass(frozen=True, slots=True)
class DefaultRule:
    """A rule as it is created with a pool."""

    name: str
    kind: RuleKind
    severity: Severity = Severity.WARNING
    settings: Mapping[str, Any] = field(default_factory=dict)


def default_rules(scrape_interval_s: float) -> tuple[DefaultRule, ...]:
    """All of them; the first is the hit rate's."""
    # A worker that restarts evaluates again after about 5 s; three scrapes may be lost.
    behind_s = max(30.0, 3 * scrape_interval_s)
    return (
        DefaultRule("Hit rate drop", RuleKind.HIT_RATE_DROP),
        DefaultRule("Replica down", RuleKind.REPLICA_DOWN),
        DefaultRule("No data", RuleKind.NO_DATA, Severity.CRITICAL),
        # Three in ten first tokens later than 5 s for a quarter of an hour: beyond the prefill of a long prompt.
        DefaultRule(
            "TTFT objective", RuleKind.TTFT_OBJECTIVE, settings={"within_s": 5.0, "long_s": 900.0, "short_s": 300.0}
        ),
        DefaultRule("Error ratio", RuleKind.ERROR_RATIO, Severity.CRITICAL),
        DefaultRule("Replica ejected", RuleKind.REPLICA_EJECTED),
        # Affinity skews a quiet pool on purpose: only skew that makes requests wait counts.
        DefaultRule("Load skew", RuleKind.LOAD_SKEW, settings={"min_waiting": 1.0}),
        DefaultRule("KV pressure", RuleKind.KV_PRESSURE),
        DefaultRule("Configuration not converged", RuleKind.ROLLOUT_STUCK),
        # Confirmed by a second evaluation: the first after a stop of the whole control plane is late by design.
        DefaultRule(
            "Telemetry behind", RuleKind.EVALUATOR_LAG, Severity.CRITICAL, {"behind_s": behind_s, "for_s": 10.0}
        ),
    )


MOST_REPEAT_S = 2_592_000  # 30 days
SHORTEST_REPEAT_S = 60


def rules(pool: Pool | None = None) -> QuerySet[AlertRule]:
    """The rules of a pool, or all, with their pool; by pool and name."""
    found = AlertRule.objects.select_related("pool", "group")
    return found if pool is None else found.filter(pool=pool)


def effective_settings(rule: AlertRule) -> dict[str, Any]:
    """A rule's settings with the defaults of those that it does not set; as they stand where nobody can read them."""
    try:
        found: dict[str, Any] = msgspec.to_builtins(KINDS[rule.kind].read(rule.settings))
    except InvalidError:
        return dict(rule.settings)
    return found


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
    enabled: bool = True,
    by: User | None = None,
) -> AlertRule:
    """Create a rule; InvalidError for settings that no rule can have, NameTakenError."""
    rule = AlertRule(pool=pool, name=_checked_name(name), kind=kind, severity=severity, enabled=enabled)
    rule.settings = checked_settings(kind, settings or {})
    rule.repeat_s = _checked_repeat(repeat_s)
    rule.group = group_of(pool, kind, group)
    rule = _saved(rule)
    summary = f"Alert rule {rule.name} of pool {pool.name} was created."
    record_event(EventKind.RULE_CREATED, summary, pool=pool, by=by, detail={"after": facts(rule)})
    return rule


@transaction.atomic
def update_rule(rule: AlertRule, *, by: User | None = None, **changes: Any) -> AlertRule:
    """Change ``name``, ``group``, ``severity``, ``settings`` (all of them), ``repeat_s`` or ``enabled``.

    Its kind is for good. Disabling a rule, or looking elsewhere, ends its alerts. InvalidError, NameTakenError.
    """
    rule = lock_row(AlertRule.objects.select_for_update(of=("self",)).select_related("pool", "group"), rule.pk)
    before, group = facts(rule), rule.group_id
    for name, value in changes.items():
        setattr(rule, name, _CHECKS[name](rule, value) if name in _CHECKS else value)
    rule = _saved(rule)
    if (after := facts(rule)) != before:
        summary = f"Alert rule {rule.name} of pool {rule.pool.name} was changed."
        change = {"before": before, "after": after}
        record_event(EventKind.RULE_CHANGED, summary, pool=rule.pool, by=by, detail=change)
    if not rule.enabled:
        close_alerts(rule, because="its rule was disabled")
    elif rule.group_id != group:
        close_alerts(rule, because="its rule looks elsewhere now")
    return rule


@transaction.atomic
def delete_rule(rule: AlertRule, *, by: User | None = None) -> None:
    """Remove a rule and its alerts; what was firing is first resolved, so that nobody waits for the end of it."""
    rule = lock_row(AlertRule.objects.select_for_update(of=("self",)).select_related("pool", "group"), rule.pk)
    close_alerts(rule, because="its rule was removed")
    summary = f"Alert rule {rule.name} of pool {rule.pool.name} was removed."
    record_event(EventKind.RULE_REMOVED, summary, pool=rule.pool, by=by, detail={"before": facts(rule)})
    rule.delete()


def facts(rule: AlertRule) -> dict[str, Any]:
    """What an event shows of a rule before and after a change."""
    return {
        "name": rule.name,
        "enabled": rule.enabled,
        "group": rule.group.name if rule.group else None,
        "severity": rule.severity,
        "repeat_s": rule.repeat_s,
        "settings": rule.settings,
    }


def close_alerts(rule: AlertRule, *, because: str) -> None:
    """End what is open of a rule that is no longer evaluated, and tell those who were told of it."""
    now = timezone.now()
    for alert in open_alerts().filter(rule=rule):
        resolve(alert, now, because=f", because {because}")
    Alert.objects.filter(rule=rule, state=AlertState.PENDING).delete()
    notify_resolved(alerts(rule.pool).filter(rule=rule), now)


def ensure_default_rules(pool: Pool) -> AlertRule:
    """The rules that every pool starts with, as they are where they are there; the first of them."""
    made = [
        AlertRule.objects.get_or_create(
            pool=pool,
            name=one.name,
            defaults={"kind": one.kind, "severity": one.severity, "settings": dict(one.settings)},
        )[0]
        for one in default_rules(settings.SCRAPE_INTERVAL_S)
    ]
    return made[0]


def checked_settings(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a kind can read, as they were given; InvalidError."""
    if kind not in KINDS:
        raise InvalidError("$.kind", f"expected one of {', '.join(KINDS)}")
    KINDS[kind].read(dict(settings))
    return dict(settings)


def group_of(pool: Pool, kind: str, name: str | None) -> TaskGroup | None:
    """The task group that a rule is narrowed to by its name; InvalidError where it cannot be."""
    if not name:
        return None
    if KINDS[kind].group_sources is None:
        raise InvalidError("$.group", f"a rule of kind {kind} looks at a whole pool")
    group = TaskGroup.objects.filter(pool=pool, name=name).first()
    if group is None:
        raise InvalidError("$.group", f"pool {pool.name} has no such task group")
    return group


def _checked_repeat(repeat_s: int) -> int:
    if repeat_s and not SHORTEST_REPEAT_S <= repeat_s <= MOST_REPEAT_S:
        raise InvalidError("$.repeat_s", f"expected 0, or {SHORTEST_REPEAT_S} to {MOST_REPEAT_S}")
    return repeat_s


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


_CHECKS: dict[str, Callable[[AlertRule, Any], Any]] = {
    "name": lambda _, given: _checked_name(given),
    "settings": lambda rule, given: checked_settings(rule.kind, given),
    "repeat_s": lambda _, given: _checked_repeat(given),
    "group": lambda rule, given: group_of(rule.pool, rule.kind, given),
}
