"""A message as blocks. Pure.

Slack reads ``&``, ``<`` and ``>`` as markup, ``<!channel>`` among them; services that take the same JSON also read a
bare ``@channel`` or ``@here``. Both are taken apart, so that a name in a label can call nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from telemetry.channels.base import Message
from telemetry.channels.words import cause_line, lines, links, one_line, title

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
