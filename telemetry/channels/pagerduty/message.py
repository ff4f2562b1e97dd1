"""A message as events of PagerDuty's Events API v2. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from telemetry.channels.base import Message
from telemetry.channels.words import lines, links, one_line

ACTIONS = {"firing": "trigger", "repeated": "trigger", "acknowledged": "acknowledge", "resolved": "resolve"}
# Their words are critical, error, warning and info; any other of ours is a warning.
SEVERITIES = {"critical": "critical", "page": "critical", "error": "error", "warning": "warning", "info": "info"}
LONGEST_SUMMARY = 1024
Event = dict[str, Any]


def events_of(message: Message, *, routing_key: str, source: str, site: str) -> list[Event]:
    """One event for each alert. A test triggers and resolves an incident of its own; a notice is one that stays."""
    base = {"routing_key": routing_key, "client": "Warmpath", **({"client_url": site} if site else {})}
    if message.state == "test":
        test = {**base, "dedup_key": f"{source}-{message.id}"}
        told = _told(message.data, source, site, "info")
        return [{**test, "event_action": "trigger", **told}, {**test, "event_action": "resolve"}]
    if not message.alerts:
        told = _told(message.data, source, site, "warning")
        return [{**base, "event_action": "trigger", "dedup_key": f"{source}-{message.id}", **told}]
    return [{**base, **_event(alert, message.state, source, site)} for alert in message.alerts]


def _event(alert: Mapping[str, Any], state: str, source: str, site: str) -> Event:
    event: Event = {"event_action": ACTIONS.get(state, "trigger"), "dedup_key": f"{source}-alert-{alert['alert']}"}
    if event["event_action"] != "trigger":
        return event
    return {**event, **_told(alert, source, site, severity(alert))}


def severity(alert: Mapping[str, Any]) -> str:
    """PagerDuty's word for the severity of an alert."""
    return SEVERITIES.get(str((alert.get("labels") or {}).get("severity")), "warning")


def _told(data: Mapping[str, Any], source: str, site: str, how_bad: str) -> Event:
    labels: Mapping[str, Any] = data.get("labels") or {}
    payload = {
        "summary": one_line(data.get("summary"))[:LONGEST_SUMMARY],
        "source": source,
        "severity": how_bad,
        "custom_details": dict(lines(data)),
        "component": labels.get("pool") or data.get("pool"),
        "group": labels.get("group"),
        "class": data.get("kind"),
        "timestamp": data.get("fired_at") or data.get("started_at"),
    }
    shown = [{"href": url, "text": label} for label, url in links(data, site)]
    return {"payload": {name: value for name, value in payload.items() if value}, "links": shown}
