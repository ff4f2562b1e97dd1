"""Alerts in the form of Alertmanager's API v2. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from telemetry.channels.words import lines, links, one_line

REFRESH_S = 60.0  # how often a firing alert is told again
KEPT_S = 4 * REFRESH_S  # how long Alertmanager is to believe in it without hearing more
LABEL = re.compile(r"[^a-zA-Z0-9_]")
FIRING = frozenset({"firing", "repeated", "acknowledged"})


def posted(alerts: Sequence[Mapping[str, Any]], now: datetime, site: str) -> list[dict[str, Any]]:
    """The body of ``POST /api/v2/alerts``."""
    return [_alert(alert, now, site) for alert in alerts]


def _alert(alert: Mapping[str, Any], now: datetime, site: str) -> dict[str, Any]:
    ends = (now + timedelta(seconds=KEPT_S)).isoformat() if alert.get("state") in FIRING else alert.get("resolved_at")
    shown = links(alert, site)
    return {
        "labels": labels_of(alert),
        "annotations": {
            "summary": one_line(alert.get("summary")),
            "description": "\n".join(f"{label}: {value}" for label, value in [*lines(alert), *shown]),
        },
        "startsAt": alert.get("fired_at") or alert.get("started_at") or now.isoformat(),
        "endsAt": ends or now.isoformat(),
        **({"generatorURL": shown[0][1]} if shown else {}),
    }


def labels_of(alert: Mapping[str, Any]) -> dict[str, str]:
    """What tells the alert from others: the same when it fires and when it ends."""
    given: Mapping[str, Any] = {"pool": alert.get("pool"), **(alert.get("labels") or {})}
    named = {LABEL.sub("_", str(name)): one_line(value) for name, value in given.items() if value not in (None, "")}
    return {**named, "alertname": one_line(alert.get("rule") or "Warmpath test"), "source": "warmpath"}
