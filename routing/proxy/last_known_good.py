"""The last configuration that worked, on disk, so that a router starts without its control plane.

Theory of operation. A file is one line with the length and digest of what follows, then the snapshot as it came. It
is written beside its final name and flushed to the disk; then the current one is renamed to be the previous one, and it
to be the current one. So at every moment, and after a loss of power at any moment, at least one whole file is there. A
file that does not match its own digest is passed over, and the previous one read. Processes that share a folder, which
is a mistake, write one at a time.

Whether a configuration is the control plane's own word.

Theory of operation. A router that was given public keys takes what is pushed to it only with a signature by one of
them that has not ended, and what lies on its disk only with one that may have ended since: a control plane that is
away must not end anybody's service. Two keys are accepted while one takes the place of the other. A router without
keys looks at no signature; it believes whoever has the admin port's token. A file that an operator names on the
command line is believed as the command line is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routing.log import event
from routing.schema import ConfigError, LoadedSnapshot, Signature, key_id

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


logger = logging.getLogger(__name__)

_MAGIC = b"warmpath-config-1"
CURRENT = "config"
PREVIOUS = "config.previous"
LOCK_S = 2.0  # that another process may take to write


class LastKnownGood:
    """Two generations of the configuration in one folder, readable by the router's account alone: it holds a secret."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current = folder / CURRENT
        self._previous = folder / PREVIOUS

    def save(self, document: bytes) -> None:
        """Make a document the current one, and the current one the previous. OSError where the disk refuses.

        Once it has its final name it stays: should the folder not be flushed then, a loss of power may bring back the
        one before, and nothing worse.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._folder) as handle:
            fresh = self._folder / f"{CURRENT}.new"
            _write_through(fresh, b"%b %d %b\n%b" % (_MAGIC, len(document), _digest(document), document))
            if _read(self._current) is not None:  # a torn one must not push out the last good one
                self._current.replace(self._previous)
            fresh.replace(self._current)
            _flush(handle)

    def load(self) -> list[bytes]:
        """The documents that are whole, the current one first."""
        return [document for path in (self._current, self._previous) if (document := _read(path)) is not None]


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """The folder's handle, which nobody else has locked until the end of the block; OSError if somebody keeps it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + LOCK_S
        while not _lock(handle):
            if time.monotonic() > until:
                raise OSError(errno.EBUSY, "another router writes to the same folder")
            time.sleep(0.01)
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Whether nobody else has it now. A file system without locks has nobody to tell."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _flush(folder: int) -> None:
    """Make the renames survive a loss of power."""
    try:
        os.fsync(folder)
    except OSError as error:
        event(logger, "last_known_good_not_flushed", level=logging.WARNING, reason=error.strerror)


def _write_through(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> bytes | None:
    """A file's document, or None if the file is missing, torn or altered."""
    try:
        head, _, document = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if head != b"%b %d %b" % (_MAGIC, len(document), _digest(document)):
        event(logger, "last_known_good_torn", level=logging.WARNING, file=path.name)
        return None
    return document


def _digest(document: bytes) -> bytes:
    return hashlib.sha256(document).hexdigest().encode()


SKEW_S = 300  # that clocks may differ by
SIGNATURE = "$.signature"


class SignatureState(StrEnum):
    """What is known of the configuration in force."""

    VERIFIED = "verified"
    EXPIRED = "expired"  # verified, and its time is over: the control plane has not renewed it
    UNSIGNED = "unsigned"  # or not so that it holds, although there are keys: it came from a file
    UNCHECKED = "unchecked"  # there are no keys


class Signatures:
    """The public keys that a router accepts, each of 64 hex digits; without any it checks nothing."""

    def __init__(self, keys: Sequence[str] = (), now: Callable[[], float] = time.time) -> None:
        self._keys = {key_id(key): _public_key(key) for key in keys}
        self._now = now

    def check_pushed(self, snapshot: LoadedSnapshot) -> None:
        """ConfigError unless the signature holds and has not ended."""
        self.check_kept(snapshot)
        ends = snapshot.signature.expires_at if self._keys and snapshot.signature else None
        if ends is not None and ends + SKEW_S < self._now():
            said = datetime.fromtimestamp(ends, UTC).isoformat(timespec="seconds")
            raise ConfigError(
                f"{SIGNATURE}.expires_at", f"the signature ended at {said}: an old document was sent again"
            )

    def check_kept(self, snapshot: LoadedSnapshot) -> None:
        """ConfigError unless the signature holds, whether or not it has ended."""
        if fault := self._fault(snapshot):
            raise fault

    def believed(self, snapshot: LoadedSnapshot) -> Signature | None:
        """Its signature, where that holds or there are no keys to tell by, whether or not it has ended."""
        return None if self._fault(snapshot) else snapshot.signature

    def told(self, snapshot: LoadedSnapshot) -> dict[str, Any]:
        """What is known of a configuration in force, for whoever asks."""
        signature = self.believed(snapshot)
        return {
            "state": self._state(signature),
            "key": signature.key if signature else None,
            "expires_at": signature.expires_at if signature else None,
        }

    def _state(self, believed: Signature | None) -> SignatureState:
        if not self._keys:
            return SignatureState.UNCHECKED
        if believed is None:
            return SignatureState.UNSIGNED
        return SignatureState.EXPIRED if believed.expires_at < self._now() else SignatureState.VERIFIED

    def _fault(self, snapshot: LoadedSnapshot) -> ConfigError | None:
        """Why the signature does not hold; None where it does, or there are no keys."""
        if not self._keys:
            return None
        signature = snapshot.signature
        if signature is None:
            return ConfigError(SIGNATURE, "it is not signed, and this router takes signed configurations alone")
        key = self._keys.get(signature.key)
        if key is None:
            known = ", ".join(self._keys)
            return ConfigError(f"{SIGNATURE}.key", f"it is signed with {signature.key}; this router accepts {known}")
        if not _verifies(key, bytes.fromhex(signature.value), snapshot.signed_text):
            return ConfigError(f"{SIGNATURE}.value", "the signature is not of this document: it was altered")
        return None


def _public_key(text: str) -> Ed25519PublicKey:
    """ValueError for what is no point of the curve. Imported here: a router without keys does without."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415 - see above

    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))


def _verifies(key: Ed25519PublicKey, value: bytes, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - as above

    try:
        key.verify(value, text)
    except InvalidSignature:
        return False
    return True
