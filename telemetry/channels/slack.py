"""Channel that POSTs messages as blocks to an incoming webhook of Slack, or of a chat that accepts the same JSON.

Slack reads ``&``, ``<`` and ``>`` as markup, ``<!channel>`` among them; other chats also read a plain ``@channel`` or
``@here``. Both are escaped, so that a name in a label cannot notify people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from telemetry.channels.base import Message
from telemetry.channels.http_post import to_json
from telemetry.channels.incoming_webhook import incoming_webhook
from telemetry.channels.message_text import ZERO_WIDTH, cause_line, cut, lines, links, one_line, title

MAX_FIELDS = 10  # of one section, in two columns
SENTENCES = ("Cause",)  # prefixes of labels whose values are sentences, shown in sections of their own
MAX_HEADER = 150
MAX_FIELD, MAX_SECTION = 2000, 3000  # characters that Slack accepts
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": f"@{ZERO_WIDTH}"}
Block = dict[str, Any]


def escape(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)


def blocks_of(message: Message, site: str) -> dict[str, Any]:
    """The body of the request; notifications and old clients show ``text``."""
    head = title(message.data)
    blocks: list[Block] = [{"type": "header", "text": _plain(head)}]
    if len(message.alerts) < 2:
        if not message.alerts and len(head) > MAX_HEADER:
            blocks.append(_section(escape(one_line(message.data.get("summary")))))
        blocks += _alert_blocks(message.alerts[0] if message.alerts else message.data)
    else:
        blocks += [_section(_alert_line(alert, site)) for alert in message.alerts]
    if pages := links(message.data, site):
        blocks.append(_section("  ".join(link_to(url, escape(label)) for label, url in pages)))
    return {"text": escape(head), "blocks": blocks}


def _alert_blocks(alert: Mapping[str, Any]) -> list[Block]:
    """Values in two columns, then the causes."""
    texts = [(label, f"*{label}*\n{escape(value)}") for label, value in lines(alert)]
    values = [_markdown(text, MAX_FIELD) for label, text in texts if not label.startswith(SENTENCES)]
    columns = (values[start : start + MAX_FIELDS] for start in range(0, len(values), MAX_FIELDS))
    return [
        *({"type": "section", "fields": fields} for fields in columns),
        *(_section(text) for label, text in texts if label.startswith(SENTENCES)),
    ]


def _alert_line(alert: Mapping[str, Any], site: str) -> str:
    """One of several alerts: its summary as a link, and the most likely cause."""
    summary = escape(one_line(alert.get("summary")))
    pages = links(alert, site)
    first = next(iter(alert.get("causes") or []), None)
    cause = f"\n*Cause* {escape(one_line(cause_line(first)))}" if first else ""
    return f"• {link_to(pages[0][1], summary) if pages else summary}{cause}"


def link_to(url: str, text: str) -> str:
    """A link to a URL, of which characters that end it in the markup are percent-encoded."""
    return f"<{url.replace('<', '%3C').replace('>', '%3E').replace('|', '%7C')}|{text}>"


def _section(text: str) -> Block:
    return {"type": "section", "text": _markdown(text, MAX_SECTION)}


def _markdown(text: str, limit: int) -> Block:
    return {"type": "mrkdwn", "text": text[:limit], "verbatim": True}


def _plain(text: str) -> Block:
    text = cut(text, MAX_HEADER)
    return {"type": "plain_text", "text": text.replace("@", f"@{ZERO_WIDTH}")[:MAX_HEADER], "emoji": False}


SLACK = incoming_webhook(
    "slack",
    "Slack",
    "Posts to an incoming webhook of Slack, Mattermost or another chat that accepts Slack's JSON.",
    "From the chat, such as https://hooks.slack.com/services/...",
    lambda message, site: to_json(blocks_of(message, site)),
)
