"""Channel that POSTs Adaptive Cards to a workflow of Microsoft Teams.

Text is in TextRuns, in which Teams reads no Markdown; a mention would need an entity, and cards have none. A workflow
responds with 202 before it posts the card, and drops what Teams cannot show: a card that is too large, that has a newer
schema, or that is not in the envelope. So none of these is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from telemetry.channels.base import Message, url
from telemetry.channels.http_post import to_json
from telemetry.channels.incoming_webhook import incoming_webhook
from telemetry.channels.message_text import Line, fitting, links, message_lines, title

# Teams shows messages of about 28 KB. Some of its services count UTF-16, which has two bytes for each character.
MAX_UTF16_BYTES = 28_000
MAX_ACTIONS = 6
VERSION = "1.4"  # of the schema: some workflows show no card of a newer one
COLORS = {"firing": "attention", "repeated": "attention", "acknowledged": "warning", "resolved": "good"}
CONNECTORS = ("webhook.office.com", "outlook.office.com", "outlook.office365.com")
FAILED = "Webhook message delivery failed"  # in responses of connectors, whose status is 200


def body_of(message: Message, site: str) -> bytes:
    """The card with as many lines as Teams shows."""
    return fitting(message_lines(message, site), partial(_body, message, site), _fits)


def _fits(body: bytes) -> bool:
    return len(body.decode().encode("utf-16-le")) <= MAX_UTF16_BYTES


def _body(message: Message, site: str, shown: Sequence[Line]) -> bytes:
    color = COLORS.get(message.state, "default")
    head = {"type": "TextRun", "text": title(message.data), "weight": "bolder", "size": "medium", "color": color}
    rows = [[head], *(_runs(line) for line in shown)]
    card: dict[str, Any] = {
        "type": "AdaptiveCard",
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "version": VERSION,
        "msteams": {"width": "Full"},
        "body": [{"type": "RichTextBlock", "inlines": runs} for runs in rows],
        "actions": [_open(address, label) for label, address in links(message.data, site)[:MAX_ACTIONS]],
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return to_json({"type": "message", "attachments": [attachment]})


def _runs(line: Line) -> list[dict[str, Any]]:
    label = [{"type": "TextRun", "text": f"{line.label}: ", "weight": "bolder"}] if line.label else []
    value = {"type": "TextRun", "text": line.value} | ({"selectAction": _open(line.url)} if line.url else {})
    return [*label, value]


def _open(address: str, label: str = "Open alert") -> dict[str, str]:
    return {"type": "Action.OpenUrl", "title": label, "url": address}


def _workflow_url(value: Any) -> str:
    host = (urlsplit(url(value)).hostname or "").lower()
    if any(host == connector or host.endswith(f".{connector}") for connector in CONNECTORS):
        raise ValueError(
            "this is an Office 365 connector, which Microsoft retired: expected the URL of a workflow (in Teams: "
            "Workflows, 'Send webhook alerts to a channel')"
        )
    return str(value)


TEAMS = incoming_webhook(
    "teams",
    "Microsoft Teams",
    "Posts Adaptive Cards to a channel or chat of Teams by a workflow.",
    "Of a workflow that starts when a Teams webhook request is received.",
    body_of,
    read=_workflow_url,
    reject=FAILED,
)
