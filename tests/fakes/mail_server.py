"""An SMTP server (aiosmtpd) on loopback that records mail and sends scripted responses."""

from __future__ import annotations

import asyncio
import email
import email.policy
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage

from aiosmtpd.smtp import SMTP, AuthResult


class MailServer:
    """Records ``mails``; ``replies`` are the next responses to DATA, ``refused`` are rejected recipients."""

    def __init__(self, *, starttls: ssl.SSLContext | None, tls: ssl.SSLContext | None, login: tuple[str, str] | None):
        self.mails: list[EmailMessage] = []
        self.envelopes: list[tuple[str, list[str]]] = []
        self.replies: list[str] = []
        self.refused: set[str] = set()
        self.encrypted: list[bool] = []
        self._login = login
        self._starttls, self._tls = starttls, tls
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            self._loop.create_server(self._protocol, "127.0.0.1", 0, ssl=self._tls)
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def _protocol(self) -> SMTP:
        return SMTP(
            self,
            hostname="mail.test",
            tls_context=self._starttls,
            authenticator=self._authenticate if self._login else None,
            auth_required=bool(self._login),
            auth_require_tls=self._tls is None,
            loop=self._loop,
        )

    def _authenticate(self, _server, _session, _envelope, _mechanism, data) -> AuthResult:
        return AuthResult(success=(data.login.decode(), data.password.decode()) == self._login, handled=False)

    async def handle_RCPT(self, _server, _session, envelope, address, _options):  # noqa: N802 - aiosmtpd's name
        if address in self.refused:
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server, session, envelope):  # noqa: N802 - as above
        reply = self.replies.pop(0) if self.replies else "250 OK"
        if reply.startswith("250"):
            self.mails.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
            self.envelopes.append((envelope.mail_from, envelope.rcpt_tos))
            self.encrypted.append(session.ssl is not None or self._tls is not None)
        return reply

    def serve(self) -> None:
        self._loop.run_forever()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def close(self) -> None:
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()


@contextmanager
def mail_server(*, starttls=None, tls=None, login=None) -> Iterator[MailServer]:
    server = MailServer(starttls=starttls, tls=tls, login=login)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(timeout=5)
        server.close()
