"""TLS on both sides: the router's certificate, and the authorities that sign the certificates of replicas.

SIGHUP reads a renewed certificate for new connections; files that cannot be used leave the current certificate in
place. The certificate of a replica with an https URL is always verified, host name included; no setting disables that.
"""

from __future__ import annotations

import logging
import ssl
from functools import cached_property

from msgspec import Struct

from routing.log import event

HANDSHAKE_S = 10.0  # for a client's handshake; equals the default time for a request's head

logger = logging.getLogger(__name__)


class TlsError(OSError):
    """Files that cannot be used; the message names them."""


class TlsFiles(Struct, frozen=True):
    """Paths of PEM files."""

    certificate: str | None = None  # of a port, with its chain; None: the port speaks plain HTTP
    key: str | None = None  # private key of the certificate, not encrypted
    upstream_ca: str | None = None  # authorities of replicas; None: the system's authorities


class Tls:
    """The TLS contexts of one process."""

    def __init__(self, files: TlsFiles | None = None) -> None:
        self._files = files or TlsFiles()
        self.server_context = _server_context(self._files) if self._files.certificate else None
        self._newest = self.server_context
        if self.server_context is not None:
            self.server_context.sni_callback = self._use_newest

    @cached_property
    def upstream_context(self) -> ssl.SSLContext:
        """For connections to replicas. Made on first use, because it reads hundreds of certificates."""
        path = self._files.upstream_ca
        try:
            return ssl.create_default_context(cafile=path)
        except OSError as error:
            raise TlsError(f"the authorities in {path} cannot be read: {describe_os_error(error)}") from None

    @property
    def handshake_s(self) -> float | None:
        """Seconds for a client's handshake; None without TLS."""
        return HANDSHAKE_S if self.server_context else None

    def reload(self) -> None:
        """Read the certificate and its key again."""
        if self.server_context is None:
            return
        try:
            self._newest = _server_context(self._files)
        except TlsError as error:
            event(logger, "certificate_rejected", level=logging.ERROR, reason=str(error))
        else:
            event(logger, "certificate_loaded")

    def _use_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called in each handshake, because listening sockets keep the first context."""
        if self._newest is not None:
            connection.context = self._newest


def describe_os_error(error: OSError) -> str:
    """Describe why a connection or a file failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or type(error).__name__).replace('_', ' ').lower()}"
    return error.strerror or type(error).__name__


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Handshakes are expensive. OpenSSL 1.1 would let a client repeat them on one connection.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.certificate or "", files.key, password=lambda: "")  # never ask on the terminal
    except OSError as error:
        problem = f"{files.certificate} with the key {files.key} cannot be used: {describe_os_error(error)}"
        raise TlsError(problem) from None
    return context
