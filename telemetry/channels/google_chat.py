"""Channel that POSTs a card to an incoming webhook of a Google Chat space; messages about one alert form a thread."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

from telemetry.channels.base import Message, url
from telemetry.channels.http_post import to_json
from telemetry.channels.incoming_webhook import incoming_webhook
from telemetry.channels.message_text import Line, fitting, inert, links, message_lines, title

MAX_BODY_BYTES = 31_000  # Google Chat accepts messages of 32,000


def body_of(message: Message, site: str) -> bytes:
    shown = message_lines(message, site)
    return fitting(shown, partial(_body, message, site), lambda body: len(body) <= MAX_BODY_BYTES)


def _body(message: Message, site: str, shown: Sequence[Line]) -> bytes:
    body: dict[str, Any] = {"text": inert(title(message.data))}  # in which a mention is <users/ID>; cards read HTML
    text = "<br>".join(map(_html, shown))  # one widget, because those after the hundredth are not shown
    widgets: list[dict[str, Any]] = [{"textParagraph": {"text": text}}] if text else []
    if pages := links(message.data, site):
        buttons = [{"text": label, "onClick": {"openLink": {"url": address}}} for label, address in pages]
        widgets.append({"buttonList": {"buttons": buttons}})
    if widgets:
        body["cardsV2"] = [{"cardId": "alert", "card": {"sections": [{"widgets": widgets}]}}]
    if (alert := message.data.get("alert")) is not None:
        body["thread"] = {"threadKey": f"warmpath-alert-{alert}-{message.data.get('started_at')}"}
    return to_json(body)


def _html(line: Line) -> str:
    value = html.escape(inert(line.value))
    value = f'<a href="{html.escape(line.url)}">{value}</a>' if line.url else value
    return f"<b>{html.escape(line.label)}</b> {value}" if line.label else value


def _webhook_url(value: Any) -> str:
    if not {"key", "token"} <= parse_qs(urlsplit(url(value)).query).keys():
        raise ValueError("expected the whole URL of the webhook, with key and token")
    return str(value)


GOOGLE_CHAT = incoming_webhook(
    "google_chat",
    "Google Chat",
    "Posts to a space of Google Chat by an incoming webhook.",
    "Of the space's webhook, https://chat.googleapis.com/v1/spaces/.../messages?key=...&token=...",
    body_of,
    read=_webhook_url,
    query={"messageReplyOption": "REPLY_MESSAGE_FALLBACK_TO_NEW_THREAD"},
    expect='"name"',
)
