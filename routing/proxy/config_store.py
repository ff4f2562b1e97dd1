"""The active configuration of a router, and the only way to replace it.

Theory of operation. A document is checked, prepared and written to disk; only then one reference is swapped, between
two requests. A failure before that leaves everything unchanged. Running requests keep the configuration that they began
with. Documents are applied one at a time, and an older revision never replaces a newer one. The active configuration
may arrive again with a later signature, which is stored with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from routing.log import event
from routing.proxy.last_known_good import LastKnownGood, Signatures
from routing.schema import ConfigError, LoadedSnapshot, load_snapshot

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
        snapshot = await asyncio.to_thread(self._checked, document, source)
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

    def _checked(self, document: bytes, source: Source) -> LoadedSnapshot:
        try:
            snapshot = load_snapshot(document)
            if source is Source.PUSH:
                self._signatures.check_pushed(snapshot)
        except ConfigError as error:
            raise NackError(error.reason, path=error.path) from None
        return snapshot

    async def _renew_signature(self, snapshot: LoadedSnapshot, active: Applied) -> Applied:
        """Store the signature of a document that is active already, if it is later than the stored one."""
        new, stored = snapshot.signature, self._signatures.valid_signature(active.snapshot)
        if new is None or (stored is not None and (stored == new or stored.issued_at > new.issued_at)):
            return active
        await self._save(snapshot, Source.PUSH)
        self.applied = replace(active, snapshot=snapshot)
        event(logger, "config_signature_renewed", revision=snapshot.revision, expires_at=new.expires_at)
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
        reason = f"revision {active.revision} is running with another digest, {active.sha256}"
    else:
        reason = f"revision {snapshot.revision} is older than the running one, {active.revision}"
    raise NackError(reason, path="$.revision", revision=snapshot.revision, is_conflict=True)
