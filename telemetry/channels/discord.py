"""Channel that POSTs an embed to a webhook of Discord, and waits until Discord has posted it (``wait``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from telemetry.channels.base import Message, url
from telemetry.channels.http_post import to_json
from telemetry.channels.incoming_webhook import incoming_webhook
from telemetry.channels.message_text import Line, cut, fitting, inert, links, message_lines, title

MAX_TITLE, MAX_DESCRIPTION, MAX_FIELD = 256, 4096, 1024  # characters; together less than an embed's 6000
COLORS = {"firing": 0xD1242F, "repeated": 0xD1242F, "acknowledged": 0xBF8700, "resolved": 0x1A7F37}
OTHER_COLOR = 0x57606A
_WEBHOOKS = re.compile(r"/api/(v\d+/)?webhooks/")
_MARKDOWN = re.compile(r"[\\*_~`|>\[\]#<]")


def escape(text: str) -> str:
    """A text in which Discord reads no Markdown, no mention and no URL."""
    return _MARKDOWN.sub(r"\\\g<0>", inert(text))


def body_of(message: Message, site: str) -> bytes:
    state, bracket, summary = title(message.data).partition("] ")
    head = f"{state}{bracket}{escape(summary)}"  # no backslash in the state: notifications show the title as it is
    shown = message_lines(message, site, title_limit=MAX_TITLE - len(escape(summary)) + len(summary))
    description = fitting(shown, _description, lambda text: len(text.decode()) <= MAX_DESCRIPTION)
    embed: dict[str, Any] = {
        "title": cut(head, MAX_TITLE),
        "color": COLORS.get(message.state, OTHER_COLOR),
        **({"description": description.decode()} if description else {}),
    }
    pages = [_link(escape(label), address) for label, address in links(message.data, site)]
    while len("\n".join(pages)) > MAX_FIELD:
        pages.pop()
    if pages:
        embed["fields"] = [{"name": "Links", "value": "\n".join(pages)}]
    return to_json({"embeds": [embed], "allowed_mentions": {"parse": []}})


def _description(shown: Sequence[Line]) -> bytes:
    texts = []
    for line in shown:
        value = _link(escape(line.value), line.url) if line.url else escape(line.value)
        texts.append(f"**{escape(line.label)}** {value}" if line.label else value)
    return "\n".join(texts).encode()


def _link(text: str, address: str) -> str:
    """A link to a URL, of which characters that end it in Markdown are percent-encoded."""
    return f"[{text}]({address.replace('(', '%28').replace(')', '%29').replace(' ', '%20')})"


def _webhook_url(value: Any) -> str:
    """With the version of the API, because Retry-After has milliseconds in the oldest, which is the default."""
    return _WEBHOOKS.sub("/api/v10/webhooks/", url(value), count=1)


DISCORD = incoming_webhook(
    "discord",
    "Discord",
    "Posts to a channel of Discord by a webhook.",
    "Of the channel's webhook, https://discord.com/api/webhooks/...",
    body_of,
    read=_webhook_url,
    query={"wait": "true"},
    expect='"id"',
)
