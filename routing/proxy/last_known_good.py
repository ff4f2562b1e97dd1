"""The last known good configuration on disk, and the signatures of configurations.

Theory of operation of the files. A file is one line with the length and digest of the document, then the document. It
is written under a temporary name and flushed to disk; then the current file is renamed to the previous one, and the
new one to the current one. So at any time, and after a loss of power, at least one whole file exists. A file that does
not match its digest is skipped, and the previous one is read.

Theory of operation of signatures. A router with public keys accepts pushed configurations only with a signature by one
of the keys that has not expired. On disk a signature may have expired: a control plane that is down must not stop its
routers. Two keys are accepted while one replaces the other. A router without keys checks no signature and trusts every
client with the admin port's token. A file named on the command line is trusted as the command line is.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from routing.log import event
from routing.schema import ConfigError, LoadedSnapshot, Signature, key_id

logger = logging.getLogger(__name__)

_MAGIC = b"warmpath-config-1"
CURRENT = "config"
PREVIOUS = "config.previous"


class LastKnownGood:
    """Two generations of the configuration in one folder, readable only by the router's account: it has secrets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current = folder / CURRENT
        self._previous = folder / PREVIOUS

    def save(self, document: bytes) -> None:
        """Make a document the current one, and the current one the previous one. OSError if the disk fails.

        After the last rename no error is raised: if the folder was not flushed, a loss of power may restore the
        previous document.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._folder / f"{CURRENT}.new"
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(b"%b\n%b" % (_header(document), document))
            file.flush()
            os.fsync(file.fileno())
        if _read(self._current) is not None:  # a corrupt one must not replace the last good one
            self._current.replace(self._previous)
        new.replace(self._current)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        except OSError as error:
            event(logger, "last_known_good_not_flushed", level=logging.WARNING, reason=error.strerror)
        finally:
            os.close(folder)

    def load(self) -> list[bytes]:
        """The documents that match their digests, the current one first."""
        return [document for path in (self._current, self._previous) if (document := _read(path)) is not None]


def _read(path: Path) -> bytes | None:
    """The document of a file; None if the file is missing or corrupt."""
    try:
        header, _, document = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if header != _header(document):
        event(logger, "last_known_good_corrupt", level=logging.WARNING, file=path.name)
        return None
    return document


def _header(document: bytes) -> bytes:
    return b"%b %d %b" % (_MAGIC, len(document), hashlib.sha256(document).hexdigest().encode())


SKEW_S = 300  # between the clocks of the control plane and the router
SIGNATURE = "$.signature"


class SignatureState(StrEnum):
    """State of the active configuration's signature."""

    VERIFIED = "verified"
    EXPIRED = "expired"  # verified, and not renewed in time by the control plane
    UNSIGNED = "unsigned"  # of a file: without a valid signature, although there are keys
    UNCHECKED = "unchecked"  # there are no keys


class Signatures:
    """Checks signatures against public keys, each of 64 hexadecimal digits; without keys it checks nothing."""

    def __init__(self, keys: Sequence[str] = (), now: Callable[[], float] = time.time) -> None:
        self._keys = {key_id(key): bytes.fromhex(key) for key in keys}
        for key in self._keys.values():
            _verify(key, b"", b"")  # ValueError unless it is a point of the curve
        self._now = now

    def check_pushed(self, snapshot: LoadedSnapshot) -> None:
        """ConfigError unless the signature is valid and has not expired."""
        self.check_stored(snapshot)
        expires_at = snapshot.signature.expires_at if self._keys and snapshot.signature else None
        if expires_at is not None and expires_at + SKEW_S < self._now():
            expiry = datetime.fromtimestamp(expires_at, UTC).isoformat(timespec="seconds")
            raise ConfigError(
                f"{SIGNATURE}.expires_at", f"the signature expired at {expiry}; old documents are rejected"
            )

    def check_stored(self, snapshot: LoadedSnapshot) -> None:
        """ConfigError unless the signature is valid, even if it has expired."""
        if not self._keys:
            return
        signature = snapshot.signature
        if signature is None:
            raise ConfigError(SIGNATURE, "it is not signed, and this router accepts only signed configurations")
        key = self._keys.get(signature.key)
        if key is None:
            accepted = ", ".join(self._keys)
            raise ConfigError(f"{SIGNATURE}.key", f"it is signed with {signature.key}; this router accepts {accepted}")
        if not _verify(key, bytes.fromhex(signature.value), snapshot.signed_text):
            raise ConfigError(f"{SIGNATURE}.value", "the signature is not of this document: it was altered")

    def valid_signature(self, snapshot: LoadedSnapshot) -> Signature | None:
        """The signature, if it is valid or there are no keys, even if it has expired."""
        try:
            self.check_stored(snapshot)
        except ConfigError:
            return None
        return snapshot.signature

    def as_json(self, snapshot: LoadedSnapshot) -> dict[str, Any]:
        signature = self.valid_signature(snapshot)
        if not self._keys:
            state = SignatureState.UNCHECKED
        elif signature is None:
            state = SignatureState.UNSIGNED
        else:
            state = SignatureState.EXPIRED if signature.expires_at < self._now() else SignatureState.VERIFIED
        return {
            "state": state,
            "key": signature.key if signature else None,
            "expires_at": signature.expires_at if signature else None,
        }


def _verify(key: bytes, signature: bytes, text: bytes) -> bool:
    """Whether a signature is valid; ValueError for an invalid key. A router without keys never imports the library."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - see above
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415 - see above

    public_key = Ed25519PublicKey.from_public_bytes(key)
    try:
        public_key.verify(signature, text)
    except InvalidSignature:
        return False
    return True
