"""A message as blocks. Pure.

Slack reads ``&``, ``<`` and ``>`` as markup, ``<!channel>`` among them; services that take the same JSON also read a
bare ``@channel`` or ``@here``. Both are taken apart, so that a name in a label can call nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from telemetry.channels.base import Message
from telemetry.channels.words import lines, links, summaries, title

MOST_FIELDS = 10  # of one section
LONGEST_HEADER = 150
LONGEST_FIELD = 1500
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
        several = "\n".join(f"• {escaped(one)}" for one in summaries(message.alerts))
        blocks.append(_section(several))
    else:
        blocks += [_fields(message.alerts[0])] if message.alerts else []
    if found := links(message.data, site):
        blocks.append(_section("  ".join(f"<{url}|{escaped(label)}>" for label, url in found)))
    return {"text": escaped(head), "blocks": blocks}


def _fields(alert: Mapping[str, Any]) -> Block:
    shown: Sequence[tuple[str, str]] = lines(alert)[:MOST_FIELDS]
    return {"type": "section", "fields": [_marked(f"*{label}*\n{escaped(value)}") for label, value in shown]}


def _section(text: str) -> Block:
    return {"type": "section", "text": _marked(text[:3000])}


def _marked(text: str) -> Block:
    return {"type": "mrkdwn", "text": text[: LONGEST_FIELD * 2], "verbatim": True}


def _plain(text: str) -> Block:
    text = text if len(text) <= LONGEST_HEADER else f"{text[: LONGEST_HEADER - 1]}…"
    return {"type": "plain_text", "text": text.replace("@", f"@{_ZERO_WIDTH}")[:LONGEST_HEADER], "emoji": False}
