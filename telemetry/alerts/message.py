"""What an alert tells people: figures, the likeliest places, the last change, where to look."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from controlplane.models import Event, EventKind, Pool
from telemetry.alerts.evaluate import DropSettings, Verdict
from telemetry.metrics.rates import hit_rate_ratio, ratio
from telemetry.metrics.windows import Window
from telemetry.models import Alert
from telemetry.storage.sums import EngineSums, RouterSums, engine_sums, router_sums

TOP = 3
CHANGES = (
    EventKind.POLICY_PUBLISHED,
    EventKind.CONFIG_APPLIED,
    EventKind.GROUP_CHANGED,
    EventKind.REPLICA_ADDED,
    EventKind.REPLICA_REMOVED,
    EventKind.REPLICA_STATE_CHANGED,
    EventKind.REPLICA_RESTARTED,
)
LOOK_BACK_S = 3600.0  # what a deep link shows before the alert


def describe_drop(pool: Pool, settings: DropSettings, verdict: Verdict, now: datetime) -> dict[str, Any]:
    """What is known of a drop at this moment, as JSON. 5 queries."""
    window = Window(now - timedelta(seconds=settings.window_s), now, settings.window_s)
    replicas: dict[int, str] = dict(pool.replicas.values_list("pk", "name"))
    engines = engine_sums(list(replicas), window, whole=True)
    groups, _ = router_sums([pool.name], window, whole=True)
    ceiling = ratio(
        sum(group.cacheable_tokens or 0 for group in groups if group.cacheable_tokens is not None),
        sum(group.ceiling_prompt_tokens or 0 for group in groups),
    )
    return {
        "window_s": settings.window_s,
        "requests": verdict.requests,
        "queried_tokens": verdict.queries,
        "extra_recomputed_tokens": _extra_tokens(verdict),
        "ceiling_ratio": ceiling,
        "top_replicas": _top([_replica_line(replicas[row.replica_id], row) for row in engines]),
        "top_groups": _top([_group_line(row) for row in groups]),
        "last_change": _last_change(pool, now),
    }


def _extra_tokens(verdict: Verdict) -> int | None:
    """Tokens computed anew that the baseline would have had in the cache."""
    if verdict.value_ratio is None or verdict.baseline_ratio is None or verdict.queries is None:
        return None
    return round(max(verdict.baseline_ratio - verdict.value_ratio, 0.0) * verdict.queries)


def _replica_line(name: str, row: EngineSums) -> dict[str, Any]:
    found = (row.hits or 0) + (row.external_hits or 0)
    rate = hit_rate_ratio(row.queries, row.hits, row.external_hits)
    return {"name": name, "hit_rate_ratio": rate, "recomputed_tokens": max((row.queries or 0) - found, 0)}


def _group_line(row: RouterSums) -> dict[str, Any]:
    recomputed = max((row.prompt_tokens or 0) - (row.cached_tokens or 0), 0)
    rate = ratio(row.cached_tokens, row.prompt_tokens)
    return {"name": row.group, "hit_rate_ratio": rate, "recomputed_tokens": recomputed}


def _top(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that recompute the most: there a better hit rate would help the most."""
    return sorted(lines, key=lambda line: -line["recomputed_tokens"])[:TOP]


def _last_change(pool: Pool, now: datetime) -> dict[str, Any] | None:
    events = Event.objects.filter(kind__in=CHANGES, at__lte=now)
    event = (events.filter(pool=pool) | events.filter(pool=None)).order_by("-at", "-pk").first()
    return None if event is None else {"at": event.at.isoformat(), "kind": event.kind, "summary": event.summary}


def summary_of(pool: Pool, verdict: Verdict) -> str:
    """One sentence for people."""
    if verdict.value_ratio is None or verdict.baseline_ratio is None:
        return f"Hit rate of pool {pool.name} dropped."
    value, baseline = verdict.value_ratio * 100, verdict.baseline_ratio * 100
    return (
        f"Hit rate of pool {pool.name} is {value:.1f} %, {baseline - value:.1f} points below its baseline "
        f"of {baseline:.1f} %."
    )


def payload_of(alert: Alert, kind: str, now: datetime) -> dict[str, Any]:
    """The message, in the form that Standard Webhooks suggests: type, timestamp, data."""
    end = alert.resolved_at or now
    around = {
        "pool": alert.pool.name,
        "from": (alert.started_at - timedelta(seconds=LOOK_BACK_S)).isoformat(timespec="seconds"),
        "to": end.isoformat(timespec="seconds"),
    }
    return {
        "type": f"alert.{kind}",
        "timestamp": now.isoformat(timespec="milliseconds"),
        "data": {
            "alert": alert.pk,
            "rule": alert.rule.name,
            "kind": alert.rule.kind,
            "pool": alert.pool.name,
            "state": kind,
            "summary": alert.summary,
            "value_ratio": alert.value_ratio,
            "baseline_ratio": alert.baseline_ratio,
            "ceiling_ratio": alert.ceiling_ratio,
            "started_at": alert.started_at.isoformat(timespec="seconds"),
            "fired_at": alert.fired_at.isoformat(timespec="seconds") if alert.fired_at else None,
            "resolved_at": alert.resolved_at.isoformat(timespec="seconds") if alert.resolved_at else None,
            "detail": alert.detail,
            "path": f"/?{urlencode(around)}",
        },
    }
