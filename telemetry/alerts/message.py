"""What an alert contains: its labels, the details stored when it fires, its links, and its notification payload."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from django.urls import reverse

from controlplane.models import Pool, RoutingPolicy
from telemetry.alerts.findings import Finding, TrafficEvidence
from telemetry.alerts.kinds import KINDS, Kind, RuleSettings, Scope
from telemetry.alerts.kinds.base import percent
from telemetry.alerts.kinds.hit_rate_drop import DropEvidence
from telemetry.alerts.remedies import remedy_of
from telemetry.causes.evidence import CauseKind
from telemetry.metrics.rates import hit_rate_ratio, ratio
from telemetry.metrics.windows import Window
from telemetry.models import Alert, AlertRule
from telemetry.storage.reachable import reachable_share
from telemetry.storage.sums import EngineSums, RouterSums, engine_sums, router_sums

TOP = 3  # replicas and task groups in the details
LOOK_BACK_S = 3600.0  # before the alert that the link to the pool shows


def group_name(rule: AlertRule) -> str:
    """The task group of a rule; "" for a rule on the whole pool."""
    return rule.group.name if rule.group else ""


def alert_labels(rule: AlertRule, subject: str) -> dict[str, str]:
    """The labels that silences and channels match, without empty ones."""
    labels = {
        "pool": rule.pool.name,
        "group": group_name(rule),
        "replica": subject,
        "rule": rule.name,
        "kind": rule.kind,
        "severity": rule.severity,
    }
    return {name: value for name, value in labels.items() if value}


def scope_of(rule: AlertRule, subject: str) -> Scope:
    return Scope(rule.pool.name, group_name(rule), subject)


def describe(
    rule: AlertRule, kind: Kind, settings: RuleSettings, finding: Finding[Any], now: datetime
) -> dict[str, Any]:
    """Details of an alert when it fires, as JSON. Up to 6 queries."""
    evidence = finding.evidence
    onset = evidence.onset if isinstance(evidence, DropEvidence) else None
    since_s = (now - onset).total_seconds() if onset else settings.step_s
    tokens = evidence.tokens if isinstance(evidence, TrafficEvidence) else None
    extra_tokens = None
    if finding.value is not None and finding.baseline is not None and tokens is not None:
        extra_tokens = round(max(finding.baseline - finding.value, 0.0) * tokens)
    details = {
        "window_s": since_s,
        **finding.figures(),
        "queried_tokens": tokens,
        "extra_recomputed_tokens": extra_tokens,
    }
    if not kind.is_drop:
        return details
    return details | {"lowest_ratio": finding.value} | _breakdown(rule.pool, group_name(rule), since_s, now)


def _breakdown(pool: Pool, group: str, window_s: float, now: datetime) -> dict[str, Any]:
    """The replicas and task groups that recompute most tokens, where a better hit rate helps most. 5 queries."""
    window = Window(now - timedelta(seconds=window_s), now, window_s)
    replicas: dict[int, str] = dict(pool.replicas.values_list("pk", "name"))
    engines = engine_sums(list(replicas), window, whole=True)
    groups, _ = router_sums([pool.name], window, whole=True)
    reachable = reachable_share([pool.name], window)
    own = [row.accounted_ratio for row in groups if group and row.group == group]
    return {
        "reachable": reachable and reachable.as_json(),
        "top_replicas": _top([_replica_line(replicas[row.replica_id], row) for row in engines]),
        "top_groups": _top([_group_line(row) for row in groups]),
        **({"accounted_ratio": own[0]} if own else {}),
    }


def _replica_line(name: str, row: EngineSums) -> dict[str, Any]:
    hits = (row.hits or 0) + (row.external_hits or 0)
    rate = hit_rate_ratio(row.queries, row.hits, row.external_hits)
    return {"name": name, "hit_rate_ratio": rate, "recomputed_tokens": max((row.queries or 0) - hits, 0)}


def _group_line(row: RouterSums) -> dict[str, Any]:
    return {
        "name": row.group,
        "hit_rate_ratio": ratio(row.cached_tokens, row.prompt_tokens),
        "accounted_ratio": row.accounted_ratio,
        "recomputed_tokens": max((row.prompt_tokens or 0) - (row.cached_tokens or 0), 0),
    }


def _top(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(lines, key=lambda line: -line["recomputed_tokens"])[:TOP]


def overview_path(alert: Alert, now: datetime) -> str:
    """The overview page of the alert's pool around the time of the alert."""
    query = {
        "pool": alert.pool.name,
        "from": _iso(alert.started_at - timedelta(seconds=LOOK_BACK_S)),
        "to": _iso(alert.resolved_at or now),
    }
    return f"/?{urlencode(query)}"


def alert_payload(alert: Alert, kind: str, now: datetime, replaced_cause: str | None = None) -> dict[str, Any]:
    """The notification, in the form that Standard Webhooks suggests: type, timestamp, data."""
    path, remedy = overview_path(alert, now), remedy_of(alert)
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
            "started_at": _iso(alert.started_at),
            "fired_at": _iso(alert.fired_at),
            "resolved_at": _iso(alert.resolved_at),
            "acknowledged_by": alert.acknowledged_by or None,
            "causes": alert.causes,
            "remedy": remedy.label or remedy.hint or None,
            "replaced_cause": replaced_cause,
            "detail": alert.detail,
            "links": {
                "alert": reverse("telemetry:alert", args=[alert.pk]),
                **_revision_link(alert),
                **({"remedy": remedy.path} if remedy.path else {}),
                **({"runbook": alert.rule.runbook_url} if alert.rule.runbook_url else {}),
                "silence": f"{reverse('telemetry:silence-new')}?alert={alert.pk}",
                "pool": path,
            },
            "path": path,
        },
    }


def headline(alert: Alert) -> str:
    """What happened, when and why, in one short sentence."""
    onset = DropEvidence.read(alert.detail).onset or alert.started_at
    group = f" of task group {group_name(alert.rule)}" if alert.rule.group else ""
    what = alert.summary.rstrip(".")
    kind = KINDS.get(alert.rule.kind)
    if kind and kind.is_drop and alert.baseline is not None and alert.value is not None:
        lowest = alert.detail.get("lowest_ratio", alert.value)  # the value changes while the alert fires
        what = f"Hit rate{group} fell from {percent(alert.baseline)} to {percent(lowest)} at {onset:%H:%M} UTC"
    return f"{what}: {cause_headline(alert.causes[0])}" if alert.causes else what


def cause_headline(cause: dict[str, Any]) -> str:
    """A cause in a few words: of a revision, who published it; of others, the beginning of their summary."""
    evidence = cause.get("evidence") or {}
    if cause["kind"] != CauseKind.REVISION or "revision" not in evidence:
        return str(cause["summary"]).partition(": ")[0].rstrip(".")
    name = f"{evidence.get('strategy') or 'a policy'} (r{evidence['revision']})"
    return f"{evidence.get('author') or 'the system'} published {name}"


def changed_at(alert: Alert) -> tuple[datetime | None, str]:
    """When what the most likely cause names changed, else when the figure did, and what changed; None: unknown."""
    evidence = next((cause.get("evidence") or {} for cause in alert.causes), {})
    if evidence.get("published_at"):
        return datetime.fromisoformat(evidence["published_at"]), cause_headline(alert.causes[0])
    return DropEvidence.read(alert.detail).onset, "the drop began"


def _revision_link(alert: Alert) -> dict[str, str]:
    """The most likely cause that is a revision, as a link; {} without one. One query if there is one."""
    named: dict[str, Any] = next(
        (cause["evidence"] for cause in alert.causes if cause["kind"] == CauseKind.REVISION), {}
    )
    policy = RoutingPolicy.objects.filter(name=named["policy"], pool=alert.pool).first() if "policy" in named else None
    return {} if policy is None else {"revision": revision_path(policy.pk, named["revision"])}


def revision_path(policy_id: int, number: int) -> str:
    """The history of a policy, from this revision on."""
    return f"{reverse('controlplane:policy-revisions', args=[policy_id])}?before={number + 1}"


def _iso(at: datetime | None) -> str | None:
    return at.isoformat(timespec="seconds") if at else None
