"""Records that the traffic moved between task groups: it changes a pool's hit rate, and is no drop."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from controlplane.models import Event, EventKind
from controlplane.services.events import record_event
from telemetry.models import AlertRule

ONCE_IN = timedelta(minutes=30)  # of a pool, whatever the number of its rules


def record_mix_change(rule: AlertRule, before: Mapping[str, Any], figures: Mapping[str, Any], now: datetime) -> bool:
    """Record an event where a rule's figures tell of a new mix and those of the evaluation before did not.

    Returns whether one was recorded. One query where there is a new mix, and what is written.
    """
    is_new = figures.get("mix_since") and not before.get("mix_since")
    if not is_new or rule.group_id is not None:
        return False
    lately = Event.objects.filter(kind=EventKind.TRAFFIC_MIX_CHANGED, pool=rule.pool, at__gt=now - ONCE_IN)
    if lately.exists():
        return False
    points, groups = figures["mix_points"], figures["mix_groups"]
    detail = {"mix_points": points, "since": figures["mix_since"], "groups": groups}
    record_event(EventKind.TRAFFIC_MIX_CHANGED, _sentence(points, groups), pool=rule.pool, detail=detail, at=now)
    return True


def _sentence(points: float, groups: list[dict[str, Any]]) -> str:
    moved = ", ".join(
        f"{one['name'] or 'no task group'} {one['usual_ratio'] * 100:.0f} to {one['share_ratio'] * 100:.0f} %"
        for one in groups
    )
    return f"The mix of task groups changed ({moved} of the tokens); this moves the hit rate by {points:+.0f} points."
