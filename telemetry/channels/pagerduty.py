"""Channel that triggers, acknowledges and resolves incidents by PagerDuty's Events API v2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from django.conf import settings

from controlplane.services.checks import address_of
from telemetry.channels.base import ChannelKind, Config, Field, Message, Receipt, origin, source_field, url
from telemetry.channels.http_post import post_each
from telemetry.channels.message_text import lines, links, one_line
from telemetry.models import Topic

ACTIONS = {"firing": "trigger", "repeated": "trigger", "acknowledged": "acknowledge", "resolved": "resolve"}
# PagerDuty's severities are critical, error, warning and info; any other severity becomes a warning.
SEVERITIES = {"critical": "critical", "page": "critical", "error": "error", "warning": "warning", "info": "info"}
MAX_SUMMARY = 1024
KEY = re.compile(r"[A-Za-z0-9]{32}\Z")
Event = dict[str, Any]


def events_of(message: Message, *, routing_key: str, source: str, site: str) -> list[Event]:
    """One event per alert. A test triggers and resolves an incident of its own; a notice triggers one; a step of a
    rollout is a change event, which opens none.
    """
    base = {"routing_key": routing_key, "client": "Warmpath", **({"client_url": site} if site else {})}
    if message.alerts:
        return [{**base, **_alert_event(alert, message.state, source, site)} for alert in message.alerts]
    if message.state == "rollout":
        return [{"routing_key": routing_key, **_details(message.data, source, site)}]
    is_test = message.state == "test"
    base["dedup_key"] = f"{source}-{message.id}"
    details = _details(message.data, source, site, "info" if is_test else "warning")
    trigger = {**base, "event_action": "trigger", **details}
    return [trigger, {**base, "event_action": "resolve"}] if is_test else [trigger]


def _alert_event(alert: Mapping[str, Any], state: str, source: str, site: str) -> Event:
    event: Event = {"event_action": ACTIONS.get(state, "trigger"), "dedup_key": f"{source}-alert-{alert['alert']}"}
    if event["event_action"] != "trigger":
        return event
    severity = SEVERITIES.get(str((alert.get("labels") or {}).get("severity")), "warning")
    return {**event, **_details(alert, source, site, severity)}


def _details(data: Mapping[str, Any], source: str, site: str, severity: str | None = None) -> Event:
    labels: Mapping[str, Any] = data.get("labels") or {}
    payload = {
        "summary": one_line(data.get("summary"))[:MAX_SUMMARY],
        "source": source,
        "severity": severity,
        "custom_details": dict(lines(data)),
        "component": labels.get("pool") or data.get("pool"),
        "group": labels.get("group"),
        "class": data.get("kind"),
        "timestamp": data.get("fired_at") or data.get("started_at"),
    }
    pages = [{"href": url, "text": label} for label, url in links(data, site)]
    return {"payload": {name: value for name, value in payload.items() if value}, "links": pages}


def _send(config: Config, message: Message) -> Receipt:
    endpoint = f"{config['endpoint'].rstrip('/')}/v2/{'change/' if message.state == 'rollout' else ''}enqueue"
    events = events_of(message, routing_key=config["routing_key"], source=config["source"], site=settings.PUBLIC_URL)
    return post_each(((endpoint, event) for event in events), now=message.at)


def _routing_key(value: Any) -> str:
    if not isinstance(value, str) or not KEY.match(value):
        raise ValueError("expected 32 letters and digits")
    return value


PAGERDUTY = ChannelKind(
    "pagerduty",
    "PagerDuty",
    "Opens, acknowledges and resolves an incident for each alert.",
    (
        Field(
            "routing_key",
            "Integration key",
            "Integration key of an Events API v2 integration: 32 letters and digits.",
            _routing_key,
            required=True,
            secret=True,
        ),
        Field(
            "endpoint",
            "Endpoint",
            "https://events.eu.pagerduty.com for accounts in the EU.",
            url,
            default="https://events.pagerduty.com",
        ),
        source_field("incidents", "resolved"),
    ),
    _send,
    lambda config: origin(config["endpoint"]),
    lambda config: address_of(config["endpoint"]),
    topics=(Topic.ROLLOUTS,),
)
