"""A message as events of PagerDuty's Events API v2. Pure.

Open, acknowledge and resolve incidents by PagerDuty's Events API v2.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from django.conf import settings

from controlplane.services.checks import address_of
from telemetry.channels.base import ChannelKind, DeliveryError, Field, Message, Receipt, origin, text, url
from telemetry.channels.http_post import encoded, open_client, post
from telemetry.channels.message_text import lines, links, one_line

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


PATH = "/v2/enqueue"
WHOLE_S = 30.0  # in which the last event of a message must begin: an outbox's lease is longer than this and a deadline
KEY = re.compile(r"[A-Za-z0-9]{32}\Z")


@dataclass(frozen=True, slots=True)
class PagerDutyChannel:
    """One integration of one service."""

    endpoint: str
    routing_key: str
    source: str
    site: str
    http: httpx.Client

    def send(self, message: Message) -> Receipt:
        """Deliver once: an event for each alert, which a second time change nothing. DeliveryError."""
        receipt, ends_s = Receipt(), time.monotonic() + WHOLE_S
        for event in events_of(message, routing_key=self.routing_key, source=self.source, site=self.site):
            if time.monotonic() > ends_s:
                raise DeliveryError("it is too slow for all of these alerts at once", retryable=True)
            receipt = post(self.http, self.endpoint + PATH, encoded(event), now=message.at, headers={})
        return receipt

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


def open_pagerduty(config: Mapping[str, Any]) -> PagerDutyChannel:
    """The channel of a whole config, with connections of its own."""
    endpoint = config["endpoint"].rstrip("/")
    return PagerDutyChannel(endpoint, config["routing_key"], config["source"], settings.PUBLIC_URL, open_client())


def _routing_key(given: Any) -> str:
    if not isinstance(given, str) or not KEY.match(given):
        raise ValueError("expected 32 letters and digits")
    return given


PAGERDUTY = ChannelKind(
    "pagerduty",
    "PagerDuty",
    "An incident for each alert, acknowledged and resolved with it.",
    (
        Field(
            "routing_key",
            "Integration key",
            "Of an Events API v2 integration: 32 letters and digits.",
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
        Field(
            "source",
            "Source",
            "What incidents name as their origin, and what tells this installation's incidents from another's. Made "
            "where none is given; a change leaves open incidents to people.",
            text(100),
            make=lambda: f"warmpath-{secrets.token_hex(4)}",
        ),
    ),
    open_pagerduty,
    lambda config: origin(config["endpoint"]),
    lambda config: address_of(config["endpoint"]),
)
