"""Channel that pushes alerts to Alertmanager's API v2, which silences, groups and routes them."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings

from controlplane.services.checks import address_of
from telemetry.channels.base import ChannelKind, Config, ConfigError, Field, Message, Receipt, origin, text, url
from telemetry.channels.http_post import open_client, post, to_json
from telemetry.channels.message_text import lines, links, one_line

RESEND_S = 60.0  # interval at which firing alerts are pushed again
EXPIRES_S = 4 * RESEND_S  # time after which Alertmanager resolves an alert that is not pushed again
NOT_IN_LABEL_NAME = re.compile(r"[^a-zA-Z0-9_]")
FIRING = frozenset({"firing", "repeated", "acknowledged"})
TEST_LASTS = timedelta(minutes=1)


def to_alerts(alerts: Sequence[Mapping[str, Any]], now: datetime, site: str) -> list[dict[str, Any]]:
    """The body of ``POST /api/v2/alerts``."""
    return [_to_alert(alert, now, site) for alert in alerts]


def _to_alert(alert: Mapping[str, Any], now: datetime, site: str) -> dict[str, Any]:
    expires = (now + timedelta(seconds=EXPIRES_S)).isoformat()
    ends_at = expires if alert.get("state") in FIRING else alert.get("resolved_at")
    pages = links(alert, site)
    return {
        "labels": labels_of(alert),
        "annotations": {
            "summary": one_line(alert.get("summary")),
            "description": "\n".join(f"{label}: {value}" for label, value in [*lines(alert), *pages]),
        },
        "startsAt": alert.get("fired_at") or alert.get("started_at") or now.isoformat(),
        "endsAt": ends_at or now.isoformat(),
        **({"generatorURL": pages[0][1]} if pages else {}),
    }


def labels_of(alert: Mapping[str, Any]) -> dict[str, str]:
    """The labels that identify the alert: the same when it fires and when it resolves."""
    labels: Mapping[str, Any] = {"pool": alert.get("pool"), **(alert.get("labels") or {})}
    valid = {NOT_IN_LABEL_NAME.sub("_", str(name)): one_line(value) for name, value in labels.items() if value}
    return {**valid, "alertname": one_line(alert.get("rule") or "Warmpath test"), "source": "warmpath"}


def _send(config: Config, message: Message) -> Receipt:
    return _push(config, message.alerts or [_temporary_alert(message)], message.at)


def _temporary_alert(message: Message) -> dict[str, Any]:
    """A test or a notice as an alert that resolves by itself."""
    ends_at = (message.at + TEST_LASTS).isoformat()
    labels = {"severity": "info", "message": message.id}
    return {**message.data, "labels": labels, "started_at": message.at.isoformat(), "resolved_at": ends_at}


def _push(config: Config, alerts: Sequence[Mapping[str, Any]], now: datetime) -> Receipt:
    headers = {}
    if "username" in config:
        pair = f"{config['username']}:{config['password']}".encode()
        headers["authorization"] = f"Basic {b64encode(pair).decode()}"
    elif "bearer_token" in config:
        headers["authorization"] = f"Bearer {config['bearer_token']}"
    body = to_json(to_alerts(alerts, now, settings.PUBLIC_URL))
    with open_client() as http:
        return post(http, f"{config['url'].rstrip('/')}/api/v2/alerts", body, now=now, headers=headers)


def _resend(config: Config, alerts: Sequence[Mapping[str, Any]], now: datetime) -> None:
    _push(config, alerts, now)


def _check(config: Config) -> None:
    if ("username" in config) != ("password" in config):
        raise ConfigError("password", "expected both a user and a password, or neither")
    if "username" in config and "bearer_token" in config:
        raise ConfigError("bearer_token", "expected a password or a token, not both")


ALERTMANAGER = ChannelKind(
    "alertmanager",
    "Alertmanager",
    "Pushes alerts to a Prometheus Alertmanager, again and again while they fire.",
    (
        Field("url", "URL", "URL of Alertmanager, such as http://alertmanager:9093.", url, required=True),
        Field("username", "User", "If it requires one.", text(200)),
        Field("password", "Password", "Of this user.", text(500), secret=True),
        Field("bearer_token", "Bearer token", "Instead of user and password.", text(2000), secret=True),
    ),
    _send,
    lambda config: origin(config["url"]),
    lambda config: address_of(config["url"]),
    topics=(),
    check=_check,
    resend=_resend,
)
