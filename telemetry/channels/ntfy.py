"""Channel that publishes messages as JSON to a topic of ntfy, of ntfy.sh or a server of your own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from django.conf import settings

from controlplane.services.checks import address_of
from telemetry.channels.base import ChannelKind, Config, Field, Message, Receipt, origin, text, url
from telemetry.channels.http_post import open_client, post, to_json
from telemetry.channels.message_text import Line, cut, fitting, inert, links, message_lines, title

# ntfy makes a file of a message above 4096 bytes, and Firebase cuts one whose JSON is above 4000.
MAX_BODY_BYTES = 3600
MAX_TITLE, MAX_LABEL, MAX_ACTIONS = 250, 40, 3
URGENT, DEFAULT = 5, 3
PRIORITIES = {"firing": 4, "repeated": 4, "acknowledged": 2, "notice": 4}
TAGS = {
    "firing": "rotating_light",
    "repeated": "rotating_light",
    "acknowledged": "eyes",
    "resolved": "white_check_mark",
}
_TOPIC = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def body_of(message: Message, site: str, topic: str) -> bytes:
    shown = message_lines(message, site, title_limit=MAX_TITLE)
    return fitting(shown, partial(_body, message, site, topic), lambda body: len(body) <= MAX_BODY_BYTES)


def _body(message: Message, site: str, topic: str, shown: Sequence[Line]) -> bytes:
    head = cut(inert(title(message.data)), MAX_TITLE)
    labels = message.data.get("labels") or {}
    is_urgent = message.state in {"firing", "repeated"} and labels.get("severity") in {"critical", "page"}
    pages = links(message.data, site)[:MAX_ACTIONS]
    return to_json(
        {
            "topic": topic,
            "title": head,
            "message": "\n".join(inert(line.text) for line in shown) or head,
            "priority": URGENT if is_urgent else PRIORITIES.get(message.state, DEFAULT),
            "tags": [TAGS.get(message.state, "information_source")],
            "actions": [{"action": "view", "label": cut(label, MAX_LABEL), "url": address} for label, address in pages],
            **({"click": pages[0][1]} if pages else {}),
        }
    )


def _send(config: Config, message: Message) -> Receipt:
    headers = {"authorization": f"Bearer {config['token']}"} if "token" in config else {}
    body = body_of(message, settings.PUBLIC_URL, config["topic"])
    with open_client() as http:
        return post(http, config["server"], body, now=message.at, headers=headers, expect='"id"')


def _server(value: Any) -> str:
    if url(value).rstrip("/") != origin(value):
        raise ValueError("expected only scheme and host, without the topic, such as https://ntfy.sh")
    return str(value)


def _topic(value: Any) -> str:
    if not isinstance(value, str) or not _TOPIC.match(value):
        raise ValueError("expected 1 to 64 letters, digits, _ and -")
    return value


NTFY = ChannelKind(
    "ntfy",
    "ntfy",
    "Notifies phones by a topic of ntfy.sh or of a server of your own.",
    (
        Field("server", "Server", "Root of the server, without the topic.", _server, default="https://ntfy.sh"),
        Field("topic", "Topic", "Anyone who knows a public topic can read it.", _topic, required=True, secret=True),
        Field("token", "Access token", "If the topic requires one: tk_...", text(200), secret=True),
    ),
    _send,
    lambda config: f"{origin(config['server'])}/...",
    lambda config: address_of(config["server"]),
)
