"""A message as an e-mail: text, and the same as plain HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path
from typing import Any

from django.template import Context, Engine

from telemetry.channels.base import Message
from telemetry.channels.words import lines, links, one_line, title

_TEMPLATES = {
    escape: Engine(dirs=[str(Path(__file__).parent)], autoescape=escape, libraries={}) for escape in (True, False)
}


def mail_of(message: Message, *, sender: str, recipients: Sequence[str], site: str) -> EmailMessage:
    """The mail, under an id that is the same at every attempt; mails of one alert form one thread."""
    mail = EmailMessage()
    domain = sender.rpartition("@")[2]
    mail["From"] = Address("Warmpath", addr_spec=sender)
    mail["To"] = ", ".join(recipients)
    mail["Subject"] = title(message.data)
    mail["Date"] = format_datetime(message.at)
    mail["Message-ID"] = f"<{message.id}@{domain}>"
    if (thread := message.data.get("alert")) is not None:
        mail["References"] = f"<warmpath-alert-{thread}@{domain}>"
    mail["Auto-Submitted"] = "auto-generated"
    shown = _shown(message, site)
    mail.set_content(_rendered("message.txt", shown, escape=False))
    mail.add_alternative(_rendered("message.html", shown, escape=True), subtype="html")
    return mail


def _shown(message: Message, site: str) -> Mapping[str, Any]:
    return {
        "id": message.id,
        "title": title(message.data),
        "summary": one_line(message.data.get("summary")),
        "several": len(message.alerts) > 1,
        "alerts": [_alert(alert, site) for alert in message.alerts],
        "links": links(message.data, site),
    }


def _alert(alert: Mapping[str, Any], site: str) -> dict[str, Any]:
    return {"summary": one_line(alert.get("summary")), "lines": lines(alert), "links": links(alert, site)}


def _rendered(name: str, shown: Mapping[str, Any], *, escape: bool) -> str:
    return _TEMPLATES[escape].get_template(name).render(Context(dict(shown), autoescape=escape))
