"""Open, acknowledge and resolve incidents by PagerDuty's Events API v2."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from django.conf import settings

from controlplane.secret_destinations import address_of
from telemetry.channels.base import ChannelKind, DeliveryError, Message, Receipt, origin
from telemetry.channels.exchange import encoded, open_client, post
from telemetry.channels.fields import Field, text, url
from telemetry.channels.pagerduty.message import events_of

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
