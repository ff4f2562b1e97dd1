"""A message as blocks. Pure.

Slack reads ``&``, ``<`` and ``>`` as markup, ``<!channel>`` among them; services that take the same JSON also read a
bare ``@channel`` or ``@here``. Both are taken apart, so that a name in a label can call nobody.

POST each message as blocks to an incoming webhook of Slack, or of a chat that takes the same JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from django.conf import settings

from controlplane.services.checks import origin_of
from telemetry.channels.base import ChannelKind, Field, Message, Receipt, origin, url
from telemetry.channels.http_post import encoded, open_client, post
from telemetry.channels.message_text import cause_line, lines, links, one_line, title

MOST_FIELDS = 10  # of one section, in two columns
WIDE = ("Cause",)  # beginnings of labels whose values are sentences: a section each
LONGEST_HEADER = 150
LONGEST_FIELD, LONGEST_SECTION = 2000, 3000  # characters that Slack takes
_ZERO_WIDTH = "\u200b"
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": f"@{_ZERO_WIDTH}"}
Block = dict[str, Any]


def escaped(text: str) -> str:
    """Text that is shown as it is, and calls nobody."""
    return "".join(_ESCAPES.get(character, character) for character in text)


def blocks_of(message: Message, site: str) -> dict[str, Any]:
    """The body of the request; ``text`` is what notifications and old clients show."""
    head = title(message.data)
    blocks: list[Block] = [{"type": "header", "text": _plain(head)}]
    if len(message.alerts) > 1:
        blocks += [_section(_one_of_several(alert, site)) for alert in message.alerts]
    else:
        blocks += _told(message.alerts[0]) if message.alerts else []
    if found := links(message.data, site):
        blocks.append(_section("  ".join(f"<{url}|{escaped(label)}>" for label, url in found)))
    return {"text": escaped(head), "blocks": blocks}


def _told(alert: Mapping[str, Any]) -> list[Block]:
    """Figures and places in two columns, then sentences, the causes first."""
    shown = [(label, f"*{label}*\n{escaped(value)}") for label, value in lines(alert)]
    figures = [text for label, text in shown if not label.startswith(WIDE)]
    return [
        *(_fields(figures[start : start + MOST_FIELDS]) for start in range(0, len(figures), MOST_FIELDS)),
        *(_section(text) for label, text in shown if label.startswith(WIDE)),
    ]


def _one_of_several(alert: Mapping[str, Any], site: str) -> str:
    """Its summary, which leads to its page, and the likeliest cause."""
    summary = escaped(one_line(alert.get("summary")))
    pages = links(alert, site)
    first = next(iter(alert.get("causes") or []), None)
    cause = f"\n*Cause* {escaped(one_line(cause_line(first)))}" if first else ""
    return f"• <{pages[0][1]}|{summary}>{cause}" if pages else f"• {summary}{cause}"


def _fields(texts: Sequence[str]) -> Block:
    return {"type": "section", "fields": [_marked(text, LONGEST_FIELD) for text in texts]}


def _section(text: str) -> Block:
    return {"type": "section", "text": _marked(text, LONGEST_SECTION)}


def _marked(text: str, most: int) -> Block:
    return {"type": "mrkdwn", "text": text[:most], "verbatim": True}


def _plain(text: str) -> Block:
    text = text if len(text) <= LONGEST_HEADER else f"{text[: LONGEST_HEADER - 1]}…"
    return {"type": "plain_text", "text": text.replace("@", f"@{_ZERO_WIDTH}")[:LONGEST_HEADER], "emoji": False}


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
