"""Several alerts as one message. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

MOST_TOGETHER = 20  # alerts in one message
_VERBS = {"firing": "fire", "repeated": "still fire", "acknowledged": "were acknowledged", "resolved": "ended"}


def together(payloads: Sequence[Mapping[str, Any]], now: datetime) -> dict[str, Any]:
    """One payload for alerts of one kind of message: that of the one, or ``data.alerts`` with what they share above."""
    if len(payloads) == 1:
        return dict(payloads[0])
    alerts = [payload["data"] for payload in payloads]
    state = str(alerts[0]["state"])
    return {
        "type": payloads[0]["type"],
        "timestamp": now.isoformat(timespec="milliseconds"),
        "data": {
            "state": state,
            "summary": _summary(alerts, state),
            "labels": shared_labels(alerts),
            "alerts": alerts,
            "path": "/alerts/",
        },
    }


def shared_labels(alerts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The labels that all of the alerts have alike."""
    first, *others = [alert.get("labels") or {} for alert in alerts]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _summary(alerts: Sequence[Mapping[str, Any]], state: str) -> str:
    pools = sorted({str(alert["pool"]) for alert in alerts if alert.get("pool")})
    where = f" in pool {pools[0]}" if len(pools) == 1 else f" in {len(pools)} pools" if pools else ""
    return f"{len(alerts)} alerts {_VERBS.get(state, state)}{where}: {alerts[0]['summary']}"
