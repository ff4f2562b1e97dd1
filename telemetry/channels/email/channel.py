"""Send each message by a mail server of the user's choice."""

from __future__ import annotations

import smtplib
import ssl
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from django.conf import settings

from controlplane.egress import EgressRefusedError, Rules, mail_rules, system_tls
from telemetry.channels.base import ChannelKind, DeliveryError, Message, Receipt
from telemetry.channels.email.message import mail_of
from telemetry.channels.email.smtp import GuardedSMTP
from telemetry.channels.exchange import beginning
from telemetry.channels.fields import ConfigError, Field, address, addresses, host, one_of, port, text

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
        except EgressRefusedError:
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
