"""SMTP over connections that were checked, with an end in seconds and in bytes.

A message as an e-mail: text, and the same as plain HTML.

Send each message by a mail server of the user's choice.
"""

from __future__ import annotations

import contextlib
import smtplib
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from django.conf import settings
from django.template import Context, Engine

from controlplane.egress import EgressDeniedError, Rules, guarded_socket, mail_rules, system_tls
from telemetry.channels.base import (
    ChannelKind,
    ConfigError,
    DeliveryError,
    Field,
    Message,
    Receipt,
    address,
    addresses,
    host,
    one_of,
    port,
    text,
)
from telemetry.channels.http_post import beginning
from telemetry.channels.message_text import lines, links, one_line, title

MOST_REPLY_BYTES = 1 << 16  # of everything that a server says on one connection, before and after STARTTLS
LOCAL_NAME = "warmpath"  # what we call ourselves: the host's own name is nobody's business


class GuardedSMTP(smtplib.SMTP):
    """smtplib's client, connecting only where the rules allow; ``tls`` encrypts from the first byte.

    When ``deadline_s`` is over the connection is cut, whatever it is at: no single wait may be long, but many are. The
    handle for that is a duplicate, because TLS takes the socket itself away while it shakes hands.
    """

    def __init__(self, host: str, port: int, rules: Rules, *, deadline_s: float, tls: ssl.SSLContext | None) -> None:
        self._rules, self._tls = rules, tls
        self._handle: socket.socket | None = None
        self._timer = threading.Timer(deadline_s, self._cut)
        self._timer.daemon = True
        self._timer.start()
        try:
            super().__init__(host, port, local_hostname=LOCAL_NAME, timeout=deadline_s)
        except BaseException:
            self.close()
            raise

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        raw = guarded_socket(host, port, self._rules, timeout_s=timeout)
        self._handle = raw.dup()
        return self._tls.wrap_socket(raw, server_hostname=host) if self._tls else raw

    def getreply(self) -> tuple[int, bytes]:
        """The server's next reply, out of a bounded supply."""
        if self.file is None and self.sock is not None:
            self.file = _Bounded(self.sock.makefile("rb"))
        return super().getreply()

    def close(self) -> None:
        """Let go of the connection."""
        self._timer.cancel()
        super().close()
        if self._handle is not None:
            self._handle.close()

    def _cut(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):
                self._handle.shutdown(socket.SHUT_RDWR)


class _Bounded:
    """A file that ends after so many bytes."""

    def __init__(self, inner: BufferedReader) -> None:
        self._inner, self._left = inner, MOST_REPLY_BYTES

    def readline(self, limit: int = -1) -> bytes:
        """A line; none at the end."""
        line = self._inner.readline(limit)
        self._left -= len(line)
        return line if self._left >= 0 else b""

    def close(self) -> None:
        """Close the file."""
        self._inner.close()


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
    mail.set_content(_rendered("email_message.txt", shown, escape=False))
    mail.add_alternative(_rendered("email_message.html", shown, escape=True), subtype="html")
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


DEADLINE_S = 15.0
STARTTLS, TLS, PLAIN = "starttls", "tls", "none"


@dataclass(frozen=True, slots=True)
class EmailChannel:
    """One mail server and whom to write to."""

    config: Mapping[str, Any]
    site: str
    rules: Rules
    tls: ssl.SSLContext

    def send(self, message: Message) -> Receipt:
        """Deliver once; DeliveryError, retryable on timeouts and answers of 4xx."""
        try:
            with closing(self._server()) as server:
                receipt = self._sent(server, message)
                with suppress(smtplib.SMTPException, OSError):
                    server.quit()  # it has the mail: how it says goodbye is all one
                return receipt
        except EgressDeniedError:
            raise DeliveryError("its address is one that channels may not reach", retryable=False) from None
        except smtplib.SMTPException as error:
            raise _refused(error) from None
        except ssl.SSLCertVerificationError:
            raise DeliveryError("its certificate is not to be trusted", retryable=True) from None
        except ssl.SSLError:
            raise DeliveryError("it does not speak TLS as is needed", retryable=True) from None
        except TimeoutError:
            raise DeliveryError(f"no answer within {DEADLINE_S:g} s", retryable=True) from None
        except OSError:
            raise DeliveryError("it cannot be reached", retryable=True) from None

    def close(self) -> None:
        """Nothing is kept open."""

    def _server(self) -> GuardedSMTP:
        at_once = self.tls if self.config["security"] == TLS else None
        return GuardedSMTP(self.config["host"], self.config["port"], self.rules, deadline_s=DEADLINE_S, tls=at_once)

    def _sent(self, server: GuardedSMTP, message: Message) -> Receipt:
        if self.config["security"] == STARTTLS:
            server.starttls(context=self.tls)  # an error where it is not offered: nothing goes in the clear
        if "username" in self.config:
            server.login(self.config["username"], self.config["password"])
        # What we say of ourselves is also for whoever made the channel that failed.
        recipients = list(dict.fromkeys([*self.config["recipients"], *message.data.get("also_to", ())]))
        mail = mail_of(message, sender=self.config["sender"], recipients=recipients, site=self.site)
        refused = server.send_message(mail)
        note = f"refused for {len(refused)} of {len(recipients)} recipients" if refused else ""
        return Receipt(250, note or f"taken for {len(recipients)} recipients")


def _refused(error: smtplib.SMTPException) -> DeliveryError:
    if isinstance(error, smtplib.SMTPServerDisconnected):
        return DeliveryError("the server ended the connection", retryable=True)
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return DeliveryError("the server does not offer what is needed (STARTTLS or sign-in)", retryable=False)
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        code, said = next(iter(error.recipients.values()))
        return _answered("it refused every recipient", code, said)
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return _answered("it refused the user or the password", error.smtp_code, error.smtp_error)
    if isinstance(error, smtplib.SMTPResponseException):
        return _answered(f"it answered with code {error.smtp_code}", error.smtp_code, error.smtp_error)
    return DeliveryError(f"the exchange failed ({type(error).__name__})", retryable=True)


def _answered(reason: str, code: int, said: bytes | str) -> DeliveryError:
    """Codes of 5xx are final, all others are not (RFC 5321, 4.2.1)."""
    text_of = beginning(said.encode() if isinstance(said, str) else said)
    status = code if 200 <= code < 600 else None
    return DeliveryError(reason, retryable=not 500 <= code < 600, status=status, answer=text_of)


def open_email(config: Mapping[str, Any]) -> EmailChannel:
    """The channel of a whole config."""
    return EmailChannel(config, settings.PUBLIC_URL, mail_rules(), system_tls())


def _check(config: Mapping[str, Any]) -> None:
    if ("username" in config) != ("password" in config):
        raise ConfigError("password", "a user and a password belong together")
    if "password" in config and config["security"] == PLAIN:
        raise ConfigError("security", "a password is only sent encrypted: expected starttls or tls")


EMAIL = ChannelKind(
    "email",
    "E-mail",
    "A mail as text and HTML, by a mail server of yours.",
    (
        Field("recipients", "To", "Addresses, with commas between them.", addresses, required=True),
        Field("sender", "From", "The address that mails come from.", address, required=True),
        Field("host", "Mail server", "Its name, such as smtp.example.org.", host, required=True),
        Field("port", "Port", "Usually 587 for STARTTLS, 465 for TLS, 25 without.", port, default=587),
        Field(
            "security",
            "Encryption",
            "Certificates are verified.",
            one_of(STARTTLS, TLS, PLAIN),
            default=STARTTLS,
            choices=((STARTTLS, "STARTTLS"), (TLS, "TLS from the start"), (PLAIN, "None")),
        ),
        Field("username", "User", "Where the server asks for one.", text(200)),
        Field("password", "Password", "Of that user. Only sent encrypted.", text(500), secret=True),
    ),
    open_email,
    lambda config: f"{', '.join(config['recipients'])} by {config['host']}:{config['port']}",
    lambda config: f"[{config['host'].lower().rstrip('.')}]:{config['port']}",
    check=_check,
)
