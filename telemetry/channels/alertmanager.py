"""Alerts in the form of Alertmanager's API v2. Pure.

Push alerts to Alertmanager, which silences, groups and routes them on.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import httpx
from django.conf import settings

from controlplane.services.checks import address_of
from telemetry.channels.base import ChannelKind, ConfigError, Field, Message, Receipt, Sender, origin, text, url
from telemetry.channels.http_post import encoded, open_client, post
from telemetry.channels.message_text import lines, links, one_line

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
        "labels": alert_labels(alert),
        "annotations": {
            "summary": one_line(alert.get("summary")),
            "description": "\n".join(f"{label}: {value}" for label, value in [*lines(alert), *shown]),
        },
        "startsAt": alert.get("fired_at") or alert.get("started_at") or now.isoformat(),
        "endsAt": ends or now.isoformat(),
        **({"generatorURL": shown[0][1]} if shown else {}),
    }


def alert_labels(alert: Mapping[str, Any]) -> dict[str, str]:
    """What tells the alert from others: the same when it fires and when it ends."""
    given: Mapping[str, Any] = {"pool": alert.get("pool"), **(alert.get("labels") or {})}
    named = {LABEL.sub("_", str(name)): one_line(value) for name, value in given.items() if value not in (None, "")}
    return {**named, "alertname": one_line(alert.get("rule") or "Warmpath test"), "source": "warmpath"}


PATH = "/api/v2/alerts"
TEST_LASTS = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class AlertmanagerChannel:
    """One Alertmanager."""

    url: str
    headers: Mapping[str, str]
    site: str
    http: httpx.Client

    def send(self, message: Message) -> Receipt:
        """Deliver once; the same alert again changes nothing. DeliveryError."""
        return self.push(message.alerts or [_passing(message)], message.at)

    def push(self, alerts: Sequence[Mapping[str, Any]], now: datetime) -> Receipt:
        """Say that these alerts fire, or that they ended. DeliveryError."""
        body = encoded(posted(alerts, now, self.site))
        return post(self.http, self.url + PATH, body, now=now, headers=self.headers)

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


def _passing(message: Message) -> dict[str, Any]:
    """A test or a notice as an alert that ends by itself."""
    ends = (message.at + TEST_LASTS).isoformat()
    labels = {"severity": "info", "message": message.id}
    return {**message.data, "labels": labels, "started_at": message.at.isoformat(), "resolved_at": ends}


def refresh(sender: Sender, alerts: Sequence[Mapping[str, Any]], now: datetime) -> None:
    """Tell again of what still fires: Alertmanager forgets what it does not hear of."""
    if isinstance(sender, AlertmanagerChannel):
        sender.push(alerts, now)


def open_alertmanager(config: Mapping[str, Any]) -> AlertmanagerChannel:
    """The channel of a whole config, with connections of its own."""
    headers = {}
    if "username" in config:
        pair = f"{config['username']}:{config['password']}".encode()
        headers["authorization"] = f"Basic {b64encode(pair).decode()}"
    elif "bearer_token" in config:
        headers["authorization"] = f"Bearer {config['bearer_token']}"
    return AlertmanagerChannel(config["url"].rstrip("/"), headers, settings.PUBLIC_URL, open_client())


def _check(config: Mapping[str, Any]) -> None:
    if ("username" in config) != ("password" in config):
        raise ConfigError("password", "a user and a password belong together")
    if "username" in config and "bearer_token" in config:
        raise ConfigError("bearer_token", "expected a password or a token, not both")


ALERTMANAGER = ChannelKind(
    "alertmanager",
    "Alertmanager",
    "Alerts for a Prometheus Alertmanager, told again while they fire.",
    (
        Field("url", "URL", "Of Alertmanager itself, such as http://alertmanager:9093.", url, required=True),
        Field("username", "User", "Where it asks for one.", text(200)),
        Field("password", "Password", "Of that user.", text(500), secret=True),
        Field("bearer_token", "Bearer token", "Instead of user and password.", text(2000), secret=True),
    ),
    open_alertmanager,
    lambda config: origin(config["url"]),
    lambda config: address_of(config["url"]),
    check=_check,
    refresh=refresh,
)
