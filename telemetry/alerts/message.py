"""What an alert is called by: the labels that silences match and channels show. Pure.

What an alert tells people: figures, the likeliest places, where to look.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from controlplane.models import Pool
from telemetry.alerts.kinds import Kind, RuleSettings, Where
from telemetry.alerts.verdict import Verdict
from telemetry.metrics.rates import hit_rate_ratio, ratio
from telemetry.metrics.windows import Window
from telemetry.models import Alert, AlertRule
from telemetry.storage.reachable import reachable_share
from telemetry.storage.sums import EngineSums, RouterSums, engine_sums, router_sums


def alert_labels(rule: AlertRule, subject: str) -> dict[str, str]:
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


def scope_of(rule: AlertRule, subject: str) -> Where:
    """What a rule looks at, in names."""
    return Where(rule.pool.name, rule.group.name if rule.group else "", subject)


TOP = 3
LOOK_BACK_S = 3600.0  # what a deep link shows before the alert


def describe(rule: AlertRule, kind: Kind, settings: RuleSettings, verdict: Verdict, now: datetime) -> dict[str, Any]:
    """What is known at the moment at which an alert fires, as JSON. Up to 6 queries."""
    window_s = _window_s(settings, verdict, now)
    known = {
        "window_s": window_s,
        **verdict.figures,
        "queried_tokens": verdict.figures.get("tokens"),
        "extra_recomputed_tokens": _extra_tokens(verdict),
    }
    group = rule.group.name if rule.group else ""
    return known | (_places(rule.pool, group, window_s, now) if kind.is_drop else {})


def _window_s(settings: RuleSettings, verdict: Verdict, now: datetime) -> float:
    """The time that an alert is about: since its onset where that is known, else a step."""
    onset = verdict.figures.get("onset")
    return (now - datetime.fromisoformat(onset)).total_seconds() if onset else settings.step_s


def _places(pool: Pool, group: str, window_s: float, now: datetime) -> dict[str, Any]:
    """Where a hit rate could be better: the replicas and groups that compute the most anew. 5 queries.

    ``group``: the rule's task group, of which ``accounted_ratio`` is told, or "".
    """
    window = Window(now - timedelta(seconds=window_s), now, window_s)
    replicas: dict[int, str] = dict(pool.replicas.values_list("pk", "name"))
    engines = engine_sums(list(replicas), window, whole=True)
    groups, _ = router_sums([pool.name], window, whole=True)
    reachable = reachable_share([pool.name], window)
    return {
        "reachable": reachable and reachable.as_json(),
        "top_replicas": _top([_replica_line(replicas[row.replica_id], row) for row in engines]),
        "top_groups": _top([_group_line(row) for row in groups]),
        **_basis([row for row in groups if group and row.group == group]),
    }


def _basis(rows: list[RouterSums]) -> dict[str, Any]:
    """Of a rule of one task group: the share of the responses that its hit rate rests on."""
    return {"accounted_ratio": rows[0].accounted_ratio} if rows else {}


def _extra_tokens(verdict: Verdict) -> int | None:
    """Tokens computed anew that the baseline would have had in the cache."""
    tokens: float | None = verdict.figures.get("tokens")
    if verdict.value is None or verdict.baseline is None or tokens is None:
        return None
    return round(max(verdict.baseline - verdict.value, 0.0) * tokens)


def _replica_line(name: str, row: EngineSums) -> dict[str, Any]:
    found = (row.hits or 0) + (row.external_hits or 0)
    rate = hit_rate_ratio(row.queries, row.hits, row.external_hits)
    return {"name": name, "hit_rate_ratio": rate, "recomputed_tokens": max((row.queries or 0) - found, 0)}


def _group_line(row: RouterSums) -> dict[str, Any]:
    recomputed = max((row.prompt_tokens or 0) - (row.cached_tokens or 0), 0)
    rate = ratio(row.cached_tokens, row.prompt_tokens)
    return {
        "name": row.group,
        "hit_rate_ratio": rate,
        "accounted_ratio": row.accounted_ratio,
        "recomputed_tokens": recomputed,
    }


def _top(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that recompute the most: there a better hit rate would help the most."""
    return sorted(lines, key=lambda line: -line["recomputed_tokens"])[:TOP]


def overview_path(alert: Alert, now: datetime) -> str:
    """The overview of an alert's pool around its time."""
    end = alert.resolved_at or now
    around = {
        "pool": alert.pool.name,
        "from": (alert.started_at - timedelta(seconds=LOOK_BACK_S)).isoformat(timespec="seconds"),
        "to": end.isoformat(timespec="seconds"),
    }
    return f"/?{urlencode(around)}"


def links_of(alert: Alert, now: datetime) -> dict[str, str]:
    """Where to go on, as paths of the site."""
    return {
        "alert": reverse("telemetry:alert", args=[alert.pk]),
        "silence": f"{reverse('telemetry:silence-new')}?alert={alert.pk}",
        "pool": overview_path(alert, now),
    }


def payload_of(alert: Alert, kind: str, now: datetime) -> dict[str, Any]:
    """The message, in the form that Standard Webhooks suggests: type, timestamp, data."""
    return {
        "type": f"alert.{kind}",
        "timestamp": now.isoformat(timespec="milliseconds"),
        "data": {
            "alert": alert.pk,
            "rule": alert.rule.name,
            "kind": alert.rule.kind,
            "severity": alert.severity,
            "pool": alert.pool.name,
            "state": kind,
            "summary": alert.summary,
            "labels": alert.labels,
            "value": alert.value,
            "limit": alert.limit,
            "baseline": alert.baseline,
            "unit": alert.unit,
            "value_ratio": alert.value_ratio,
            "baseline_ratio": alert.baseline_ratio,
            "reachable_ratio": alert.reachable_ratio,
            "started_at": alert.started_at.isoformat(timespec="seconds"),
            "fired_at": alert.fired_at.isoformat(timespec="seconds") if alert.fired_at else None,
            "resolved_at": alert.resolved_at.isoformat(timespec="seconds") if alert.resolved_at else None,
            "acknowledged_by": alert.acknowledged_by or None,
            "causes": alert.causes,
            "detail": alert.detail,
            "links": links_of(alert, now),
            "path": overview_path(alert, now),
        },
    }
