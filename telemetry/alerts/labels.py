"""What an alert is called by: the labels that silences match and channels show. Pure."""

from __future__ import annotations

from telemetry.alerts.kinds import Where
from telemetry.models import AlertRule


def labels_of(rule: AlertRule, subject: str) -> dict[str, str]:
    """The labels of an alert of a rule; those that do not apply are left out."""
    named = {
        "pool": rule.pool.name,
        "group": rule.group.name if rule.group else "",
        "replica": subject,
        "rule": rule.name,
        "kind": rule.kind,
        "severity": rule.severity,
    }
    return {name: value for name, value in named.items() if value}


def where_of(rule: AlertRule, subject: str) -> Where:
    """What a rule looks at, in names."""
    return Where(rule.pool.name, rule.group.name if rule.group else "", subject)
