"""POST each message as blocks to an incoming webhook of Slack, or of a chat that takes the same JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from django.conf import settings

from controlplane.secret_destinations import origin_of
from telemetry.channels.base import ChannelKind, Message, Receipt, origin
from telemetry.channels.exchange import encoded, open_client, post
from telemetry.channels.fields import Field, url
from telemetry.channels.slack.message import blocks_of


@dataclass(frozen=True, slots=True)
class SlackChannel:
    """One incoming webhook."""

    url: str
    site: str
    http: httpx.Client

    def send(self, message: Message) -> Receipt:
        """Deliver once. DeliveryError."""
        return post(self.http, self.url, encoded(blocks_of(message, self.site)), now=message.at, headers={})

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


def open_slack(config: Mapping[str, Any]) -> SlackChannel:
    """The channel of a whole config, with connections of its own."""
    return SlackChannel(config["url"], settings.PUBLIC_URL, open_client())


SLACK = ChannelKind(
    "slack",
    "Slack",
    "A message to an incoming webhook of Slack, Mattermost or another chat that takes Slack's JSON.",
    (
        Field(
            "url",
            "Incoming webhook URL",
            "As the chat gave it, such as https://hooks.slack.com/services/...",
            url,
            required=True,
            secret=True,
        ),
    ),
    open_slack,
    lambda config: f"{origin(config['url'])}/...",
    lambda config: origin_of(config["url"]),
)
