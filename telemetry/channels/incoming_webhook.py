"""Makes the kinds of channels of chats that have an incoming webhook: one secret URL, and a body of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode, urlsplit

from django.conf import settings

from controlplane.services.checks import origin_of
from telemetry.channels.base import ChannelKind, Config, Field, Message, Receipt, origin, url
from telemetry.channels.http_post import NOTHING, open_client, post


def incoming_webhook(
    name: str,
    label: str,
    about: str,
    help_text: str,
    body_of: Callable[[Message, str], bytes],
    *,
    read: Callable[[Any], str] = url,
    query: Mapping[str, str] = MappingProxyType({}),
    expect: str = "",
    reject: str = NOTHING,
) -> ChannelKind:
    """A kind that POSTs ``body_of(message, site)`` with some parameters added to the URL's own; the rest: ``post``."""

    def send(config: Config, message: Message) -> Receipt:
        parts = urlsplit(config["url"])
        address = parts._replace(query="&".join(filter(None, (parts.query, urlencode(query))))).geturl()
        headers = {"content-type": "application/json; charset=utf-8"}
        body = body_of(message, settings.PUBLIC_URL)
        with open_client() as http:
            return post(http, address, body, now=message.at, headers=headers, expect=expect, reject=reject)

    return ChannelKind(
        name,
        label,
        about,
        (Field("url", "Incoming webhook URL", help_text, read, required=True, secret=True),),
        send,
        lambda config: f"{origin(config['url'])}/...",
        lambda config: origin_of(config["url"]),
    )
