"""SMTP over connections that were checked, with an end in seconds and in bytes."""

from __future__ import annotations

import contextlib
import smtplib
import socket
import ssl
import threading
from io import BufferedReader

from controlplane.egress import Rules, guarded_socket

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
