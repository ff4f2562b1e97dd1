"""TLS on both sides: the certificate that clients see, and the authorities that replicas are checked against.

A certificate that was renewed is read anew on SIGHUP, for connections from then on; one that cannot be used leaves the
one before in place. Replicas with an https URL are always verified, name included: there is no setting to turn it off.
"""

from __future__ import annotations

import logging
import ssl
from functools import cached_property

from msgspec import Struct

from routing.log import event

HANDSHAKE_S = 10.0  # that a client has for it; the same as for a request's head by default

logger = logging.getLogger(__name__)


class TlsError(OSError):
    """Files that cannot be used; the message names them."""


class TlsFiles(Struct, frozen=True):
    """Paths of PEM files."""

    certificate: str | None = None  # of a port, its chain included; None: it speaks plain HTTP
    key: str | None = None  # of the certificate, not encrypted
    upstream_ca: str | None = None  # who signs for replicas; None: the system's authorities


class Tls:
    """The contexts of one process."""

    def __init__(self, files: TlsFiles | None = None) -> None:
        self._files = files or TlsFiles()
        self.listening = _listening(self._files) if self._files.certificate else None
        self._newest = self.listening
        if self.listening is not None:
            self.listening.sni_callback = self._show_newest

    @cached_property
    def upstream(self) -> ssl.SSLContext:
        """For connections to replicas; made when the first one asks, because it reads hundreds of certificates."""
        path = self._files.upstream_ca
        try:
            return ssl.create_default_context(cafile=path)
        except OSError as error:
            raise TlsError(f"the authorities in {path} cannot be read: {reason_of(error)}") from None

    @property
    def handshake_s(self) -> float | None:
        """What a client has for its handshake; None where there is none."""
        return HANDSHAKE_S if self.listening else None

    def reload(self) -> None:
        """Read the certificate and its key anew."""
        if self.listening is None:
            return
        try:
            self._newest = _listening(self._files)  # whole and matching, or the one before stays
        except TlsError as error:
            event(logger, "certificate_refused", level=logging.ERROR, reason=str(error))
        else:
            event(logger, "certificate_loaded")

    def _show_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called in each handshake: the sockets that listen hold the first context, whatever was read since."""
        if self._newest is not None:
            connection.context = self._newest


def reason_of(error: OSError) -> str:
    """What to tell people about a connection or a file that failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or type(error).__name__).replace('_', ' ').lower()}"
    return error.strerror or type(error).__name__


def _listening(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Handshakes are dear, and a client gets one; OpenSSL 1.1 would give it any number.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_cert_chain(files.certificate or "", files.key, password=lambda: "")  # never ask the terminal
    except OSError as error:
        raise TlsError(f"{files.certificate} with the key {files.key} cannot be used: {reason_of(error)}") from None
