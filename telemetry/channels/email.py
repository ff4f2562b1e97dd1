"""Channel that sends messages by SMTP as text and HTML, on connections with limits in seconds and in bytes."""

from __future__ import annotations

import contextlib
import smtplib
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
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
    Config,
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

MAX_REPLY_BYTES = 1 << 16  # of all replies on one connection, before and after STARTTLS
LOCAL_NAME = "warmpath"  # in EHLO, so that the host's name is not disclosed
DEADLINE_S = 15.0
TLS_PORT = 465  # RFC 8314
NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")  # OpenSSL's reasons, by version
NO_GREETING = (
    "it sent no greeting: if its port speaks TLS from the start, choose that, or that of STARTTLS, usually 587"
)
SPEAKS_PLAIN = "this port does not speak TLS from the start: choose STARTTLS, or the port of TLS, usually 465"
STARTTLS, TLS, PLAIN = "starttls", "tls", "none"
_TEMPLATES = {
    escape: Engine(dirs=[str(Path(__file__).parent)], autoescape=escape, libraries={}) for escape in (True, False)
}


class GuardedSMTP(smtplib.SMTP):
    """smtplib's client, restricted by egress rules; if ``encrypted``, with TLS from the first byte.

    A server that sends no greeting may wait for TLS: DeliveryError. It is not tried out on a second connection, because
    a client that speaks before a late greeting looks like a sender of spam.
    A timer shuts the connection down after ``deadline_s``, because timeouts of single reads may add up. The timer has a
    duplicate of the socket, because TLS detaches the socket itself during the handshake.
    """

    def __init__(
        self, host: str, port: int, rules: Rules, *, deadline_s: float, tls: ssl.SSLContext, encrypted: bool
    ) -> None:
        self._rules, self._tls, self._encrypted = rules, tls, encrypted
        self._handle: socket.socket | None = None
        self._timer = threading.Timer(deadline_s, self._shut_down)
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
        if self._encrypted:
            return self._tls.wrap_socket(raw, server_hostname=host)
        with suppress(TimeoutError):
            if raw.recv(1, socket.MSG_PEEK):
                return raw
        raw.close()
        raise DeliveryError(NO_GREETING, retryable=True)

    def getreply(self) -> tuple[int, bytes]:
        """The server's next reply, of limited size."""
        if self.file is None and self.sock is not None:
            self.file = _Bounded(self.sock.makefile("rb"))
        return super().getreply()

    def close(self) -> None:
        self._timer.cancel()
        super().close()
        if self._handle is not None:
            self._handle.close()

    def _shut_down(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):
                self._handle.shutdown(socket.SHUT_RDWR)


class _Bounded:
    """A file that ends after ``MAX_REPLY_BYTES``."""

    def __init__(self, inner: BufferedReader) -> None:
        self._inner, self._left = inner, MAX_REPLY_BYTES

    def readline(self, limit: int = -1) -> bytes:
        line = self._inner.readline(limit)
        self._left -= len(line)
        return line if self._left >= 0 else b""

    def close(self) -> None:
        self._inner.close()


def mail_of(message: Message, *, sender: str, recipients: Sequence[str], site: str) -> EmailMessage:
    """The mail. Its id is the same at every attempt; mails about one alert form a thread."""
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
    context = {
        "id": message.id,
        "title": title(message.data),
        "summary": one_line(message.data.get("summary")),
        "several": len(message.alerts) > 1,
        "alerts": [
            {"summary": one_line(alert.get("summary")), "lines": lines(alert), "links": links(alert, site)}
            for alert in message.alerts or [message.data]
        ],
        "links": links(message.data, site),
    }
    mail.set_content(_render("email_message.txt", context, escape=False))
    mail.add_alternative(_render("email_message.html", context, escape=True), subtype="html")
    return mail


def _render(name: str, context: Mapping[str, Any], *, escape: bool) -> str:
    return _TEMPLATES[escape].get_template(name).render(Context(dict(context), autoescape=escape))


def send_mail(config: Config, message: Message, *, site: str, rules: Rules, tls: ssl.SSLContext) -> Receipt:
    """Deliver once; DeliveryError, retryable for timeouts and codes 4xx."""
    encrypted = config["security"] == TLS
    try:
        with closing(
            GuardedSMTP(config["host"], config["port"], rules, deadline_s=DEADLINE_S, tls=tls, encrypted=encrypted)
        ) as server:
            if config["security"] == STARTTLS:
                server.starttls(context=tls)  # an error if it is not offered: nothing is sent unencrypted
            if "username" in config:
                server.login(config["username"], config["password"])
            # A notice about a disabled channel also goes to the owner of that channel.
            recipients = list(dict.fromkeys([*config["recipients"], *message.data.get("also_to", ())]))
            mail = mail_of(message, sender=config["sender"], recipients=recipients, site=site)
            rejected = server.send_message(mail)
            with suppress(smtplib.SMTPException, OSError):
                server.quit()  # the mail is accepted, whatever the response to this is
    except EgressDeniedError:
        raise DeliveryError("its address is not allowed for channels", retryable=False) from None
    except smtplib.SMTPException as error:
        raise _smtp_error(error) from None
    except ssl.SSLCertVerificationError:
        raise DeliveryError("its certificate is not trusted", retryable=True) from None
    except ssl.SSLError as error:
        reason = SPEAKS_PLAIN if encrypted and error.reason in NOT_TLS else "the TLS handshake failed"
        raise DeliveryError(reason, retryable=True) from None
    except TimeoutError:
        raise DeliveryError(f"no response within {DEADLINE_S:g} s", retryable=True) from None
    except OSError:
        raise DeliveryError("connection failed", retryable=True) from None
    note = f"rejected for {len(rejected)} of {len(recipients)} recipients" if rejected else ""
    return Receipt(250, note or f"accepted for {len(recipients)} recipients")


def _smtp_error(error: smtplib.SMTPException) -> DeliveryError:
    if isinstance(error, smtplib.SMTPServerDisconnected):
        return DeliveryError("the server closed the connection", retryable=True)
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return DeliveryError("the server does not support what is needed (STARTTLS or sign-in)", retryable=False)
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        code, reply = next(iter(error.recipients.values()))
        return _reply_error("it rejected every recipient", code, reply)
    if isinstance(error, smtplib.SMTPAuthenticationError):
        return _reply_error("it rejected the user or the password", error.smtp_code, error.smtp_error)
    if isinstance(error, smtplib.SMTPResponseException):
        return _reply_error(f"it responded with code {error.smtp_code}", error.smtp_code, error.smtp_error)
    return DeliveryError(f"the connection failed ({type(error).__name__})", retryable=True)


def _reply_error(reason: str, code: int, reply: bytes | str) -> DeliveryError:
    """Codes 5xx are final, all others are not (RFC 5321, 4.2.1)."""
    response = beginning(reply.encode() if isinstance(reply, str) else reply)
    status = code if 200 <= code < 600 else None
    return DeliveryError(reason, retryable=not 500 <= code < 600, status=status, response=response)


def _send(config: Config, message: Message) -> Receipt:
    return send_mail(config, message, site=settings.PUBLIC_URL, rules=mail_rules(), tls=system_tls())


def _check(config: Config) -> None:
    if ("username" in config) != ("password" in config):
        raise ConfigError("password", "expected both a user and a password, or neither")
    if "password" in config and config["security"] == PLAIN:
        raise ConfigError("security", "a password is sent only encrypted: expected starttls or tls")
    if config["port"] == TLS_PORT and config["security"] != TLS:
        raise ConfigError("security", "port 465 speaks TLS from the start: expected tls, or the port of STARTTLS, 587")


EMAIL = ChannelKind(
    "email",
    "E-mail",
    "Sends a mail as text and HTML by your mail server.",
    (
        Field("recipients", "To", "Addresses, separated by commas.", addresses, required=True),
        Field("sender", "From", "Sender address of the mails.", address, required=True),
        Field("host", "Mail server", "Host name, such as smtp.example.org.", host, required=True),
        Field("port", "Port", "Usually 587 for STARTTLS, 465 for TLS, 25 without.", port, default=587),
        Field(
            "security",
            "Encryption",
            "Certificates are verified.",
            one_of(STARTTLS, TLS, PLAIN),
            default=STARTTLS,
            choices=((STARTTLS, "STARTTLS"), (TLS, "TLS from the start"), (PLAIN, "None")),
        ),
        Field("username", "User", "If the server requires one.", text(200)),
        Field("password", "Password", "Of this user. Sent only encrypted.", text(500), secret=True),
    ),
    _send,
    lambda config: f"{', '.join(config['recipients'])} by {config['host']}:{config['port']}",
    lambda config: f"[{config['host'].lower().rstrip('.')}]:{config['port']}",
    check=_check,
)
