"""The active configuration of a router, the only way to replace it, and the last known good one on disk.

Theory of operation. A document is checked, prepared and written to disk; only then one reference is swapped, between
two requests. A failure before that leaves everything unchanged. Running requests keep the configuration that they began
with. Documents are applied one at a time, and an older revision never replaces a newer one. The active configuration
may arrive again with a later signature, which is stored with it.

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

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from routing.log import event
from routing.process import create_regular_file, read_regular_file
from routing.schema import ConfigError, LoadedSnapshot, Signature, key_id, load_snapshot

_MAGIC = b"warmpath-config-1"
CURRENT = "config"
PREVIOUS = "config.previous"


class LastKnownGood:
    """Two generations of the configuration in one folder, readable only by the router's account: it has secrets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._current = folder / CURRENT
        self._previous = folder / PREVIOUS

    def save(self, document: bytes) -> None:
        """Make a document the current one, and the current one the previous one. OSError if the disk fails.

        After the last rename no error is raised: if the folder was not flushed, a loss of power may restore the
        previous document.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new_path = self.folder / f"{CURRENT}.new"
        with os.fdopen(create_regular_file(new_path), "wb") as file:
            file.write(b"%b\n%b" % (_header(document), document))
            file.flush()
            os.fsync(file.fileno())
        if _read(self._current) is not None:  # a corrupt one must not replace the last good one
            self._current.replace(self._previous)
        new_path.replace(self._current)
        folder = os.open(self.folder, os.O_RDONLY)
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
        header, _, document = read_regular_file(path).partition(b"\n")
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


logger = logging.getLogger(__name__)


class Source(StrEnum):
    """Where a configuration came from."""

    PUSH = "push"
    FILE = "file"
    LAST_KNOWN_GOOD = "last_known_good"


@dataclass(frozen=True, slots=True)
class Applied:
    """An active configuration."""

    snapshot: LoadedSnapshot
    source: Source
    at: datetime

    def as_ack(self) -> dict[str, Any]:
        """The acknowledgement for the control plane."""
        revision, sha256 = self.snapshot.revision, self.snapshot.sha256
        return {"status": "ack", "revision": revision, "sha256": sha256, "applied_at": self.at.isoformat()}


class NackError(Exception):
    """A document that is rejected. ``is_conflict``: it is valid, but the active configuration precedes it."""

    def __init__(self, reason: str, *, path: str = "$", revision: int | None = None, is_conflict: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.revision = revision
        self.is_conflict = is_conflict
        self.at = datetime.now(UTC)

    def as_json(self) -> dict[str, Any]:
        return {"revision": self.revision, "path": self.path, "reason": self.reason, "at": self.at.isoformat()}


class RetryLaterError(Exception):
    """A document that could not be checked, or not by all workers; the same document may be sent again."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Swap = Callable[[], Awaitable[None]]
Prepare = Callable[[LoadedSnapshot], Awaitable[Swap]]


class ConfigStore:
    """Applies documents. ``prepare`` returns the swap, which cannot fail; its RetryLaterError is passed on.

    ``lock`` is held while a document is applied: its holder can rely on the active configuration.
    """

    def __init__(self, prepare: Prepare, files: LastKnownGood | None, signatures: Signatures | None = None) -> None:
        self._prepare = prepare
        self._files = files
        self._signatures = signatures or Signatures()
        self.lock = asyncio.Lock()
        self.applied: Applied | None = None
        self.last_nack: NackError | None = None

    @property
    def revision(self) -> int | None:
        return self.applied.snapshot.revision if self.applied else None

    @property
    def signature(self) -> dict[str, Any] | None:
        """State, key and expiry of the active configuration's signature; None without a configuration."""
        return self._signatures.as_json(self.applied.snapshot) if self.applied else None

    async def apply(self, document: bytes, source: Source) -> Applied:
        """Check, prepare, write and swap; NackError if rejected, RetryLaterError if it could not be checked."""
        async with self.lock:
            try:
                return await self._apply(document, source)
            except NackError as nack:
                self._record(nack, logging.WARNING)
                raise

    async def start(self, document: bytes | None) -> None:
        """Apply the document of a file or one on disk, whichever has the highest revision and can be applied.

        The file wins a tie, because operators edit it by hand. NackError if there is a file and nothing can be applied;
        without a file a router waits for a push.
        """
        candidates = [(snapshot, Source.LAST_KNOWN_GOOD) for snapshot in await asyncio.to_thread(self._load)]
        if document is not None:
            try:
                candidates.append((load_snapshot(document), Source.FILE))
            except ConfigError as error:
                self._record(NackError(error.reason, path=error.path), logging.ERROR)
        candidates.sort(key=lambda candidate: (candidate[0].revision, candidate[1] is Source.FILE), reverse=True)
        for snapshot, source in candidates:
            with suppress(NackError):
                await self.apply(snapshot.document, source)
                if document is not None and source is not Source.FILE:
                    event(logger, "config_file_skipped", level=logging.WARNING, stored_revision=snapshot.revision)
                break
        if self.applied is None and self.last_nack is not None and document is not None:
            raise self.last_nack

    def _record(self, nack: NackError, level: int) -> None:
        self.last_nack = nack
        event(logger, "config_rejected", level=level, **nack.as_json())

    def _load(self) -> list[LoadedSnapshot]:
        """Valid documents on disk. Both are loaded: two routers in one folder may have written an older one last."""
        snapshots = []
        for document in self._files.load() if self._files else ():
            try:
                snapshot = load_snapshot(document)
                self._signatures.check_stored(snapshot)
            except ConfigError as error:
                event(logger, "last_known_good_unreadable", level=logging.WARNING, path=error.path, reason=error.reason)
            else:
                snapshots.append(snapshot)
        return snapshots

    async def _apply(self, document: bytes, source: Source) -> Applied:
        snapshot = await asyncio.to_thread(self._load_checked, document, source)
        if self.applied is not None and _is_active(snapshot, self.applied.snapshot):
            return await self._renew_signature(snapshot, self.applied)
        try:
            swap = await self._prepare(snapshot)
        except (ValueError, OSError) as error:
            raise NackError(str(error), revision=snapshot.revision) from error
        await self._save(snapshot, source)
        await swap()
        self.applied = Applied(snapshot, source, datetime.now(UTC))
        event(logger, "config_applied", revision=snapshot.revision, sha256=snapshot.sha256, source=source)
        return self.applied

    def _load_checked(self, document: bytes, source: Source) -> LoadedSnapshot:
        try:
            snapshot = load_snapshot(document)
            if source is Source.PUSH:
                self._signatures.check_pushed(snapshot)
        except ConfigError as error:
            raise NackError(error.reason, path=error.path) from None
        return snapshot

    async def _renew_signature(self, snapshot: LoadedSnapshot, active: Applied) -> Applied:
        """Store the signature of a document that is active already, if it is later than the stored one."""
        received, stored = snapshot.signature, self._signatures.valid_signature(active.snapshot)
        if received is None or (stored is not None and (stored == received or stored.issued_at > received.issued_at)):
            return active
        await self._save(snapshot, Source.PUSH)
        self.applied = replace(active, snapshot=snapshot)
        event(logger, "config_signature_renewed", revision=snapshot.revision, expires_at=received.expires_at)
        return self.applied

    async def _save(self, snapshot: LoadedSnapshot, source: Source) -> None:
        """Write the document before it is acknowledged, so that it survives a restart.

        The document of a file is applied even if the disk fails: the file is there at the next start.
        """
        if self._files is None or source is Source.LAST_KNOWN_GOOD:
            return
        try:
            await asyncio.to_thread(self._files.save, snapshot.document)
        except OSError as error:
            if source is Source.FILE:
                event(logger, "last_known_good_not_written", level=logging.WARNING, reason=error.strerror)
                return
            reason = f"the last known good configuration cannot be written: {error.strerror}"
            raise NackError(reason, revision=snapshot.revision) from error


def _is_active(snapshot: LoadedSnapshot, active: LoadedSnapshot) -> bool:
    """Whether a snapshot is the active one; NackError if it is older, or different with the same revision."""
    if snapshot.revision > active.revision:
        return False
    if (snapshot.revision, snapshot.sha256) == (active.revision, active.sha256):
        return True
    if snapshot.revision == active.revision:
        reason = f"revision {active.revision} is active with another digest, {active.sha256}"
    else:
        reason = f"revision {snapshot.revision} is older than the active one, {active.revision}"
    raise NackError(reason, path="$.revision", revision=snapshot.revision, is_conflict=True)
