"""The configuration in force, and the only way to another one.

Theory of operation. A document is checked, made ready to serve and written to disk; only then is one reference
swapped, between two requests. Whatever fails before that leaves everything as it was. Requests under way keep the
configuration they began with. Documents are taken one at a time, and an older revision never replaces a newer one.
The one in force may come again with a later signature, which is kept with it.
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
    """A configuration in force."""

    snapshot: LoadedSnapshot
    source: Source
    at: datetime

    def as_ack(self) -> dict[str, Any]:
        """The acknowledgement that the control plane waits for."""
        snapshot = self.snapshot
        return {
            "status": "ack",
            "revision": snapshot.revision,
            "sha256": snapshot.sha256,
            "applied_at": self.at.isoformat(),
        }


class NackError(Exception):
    """A document that was not taken. ``is_conflict``: it is valid, but another one stands before it."""

    def __init__(self, reason: str, *, path: str = "$", revision: int | None = None, is_conflict: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path
        self.revision = revision
        self.is_conflict = is_conflict
        self.at = datetime.now(UTC)

    def as_json(self) -> dict[str, Any]:
        """What was refused and why."""
        return {"revision": self.revision, "path": self.path, "reason": self.reason, "at": self.at.isoformat()}


class NotNowError(Exception):
    """A document that was not judged, or not by everybody who has to: it may come again as it is."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Swap = Callable[[], Awaitable[None]]
Prepare = Callable[[LoadedSnapshot], Awaitable[Swap]]


class ConfigStore:
    """Takes documents. ``prepare`` makes one ready and returns the swap, which cannot fail; NotNowError passes through.

    ``lock`` is held while one is taken: whoever holds it knows that the one in force stays so.
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
        """The number in force."""
        return self.applied.snapshot.revision if self.applied else None

    @property
    def signature(self) -> dict[str, Any] | None:
        """What is known of the signature of what is in force; None where nothing is."""
        return self._signatures.told(self.applied.snapshot) if self.applied else None

    async def apply(self, document: bytes, source: Source) -> Applied:
        """Check, prepare, write down and swap; NackError if it is refused, NotNowError if nobody judged it."""
        async with self.lock:
            try:
                return await self._apply(document, source)
            except NackError as nack:
                self.last_nack = nack
                event(logger, "config_refused", level=logging.WARNING, **nack.as_json())
                raise

    async def start(self, document: bytes | None) -> None:
        """Begin with a file's document or with what was kept, whichever has the highest revision and can be run.

        Of two equal numbers the file wins: it is what an operator edits by hand. NackError if there is a file, and
        nothing that can be run; without a file a router waits for what it is pushed.
        """
        candidates = [(snapshot, Source.LAST_KNOWN_GOOD) for snapshot in await asyncio.to_thread(self._kept)]
        if document is not None:
            candidates += self._named(document)
        for snapshot, source in sorted(candidates, key=_rank, reverse=True):
            with suppress(NackError):
                await self.apply(snapshot.document, source)
                if document is not None and source is not Source.FILE:
                    event(logger, "config_file_passed_over", level=logging.WARNING, kept_revision=snapshot.revision)
                break
        if self.applied is None and self.last_nack is not None and document is not None:
            raise self.last_nack

    def _named(self, document: bytes) -> list[tuple[LoadedSnapshot, Source]]:
        """What is in a file, if that is a configuration."""
        try:
            return [(load_snapshot(document), Source.FILE)]
        except ConfigError as error:
            self.last_nack = nack = NackError(error.reason, path=error.path)
            event(logger, "config_refused", level=logging.ERROR, **nack.as_json())
            return []

    def _kept(self) -> list[LoadedSnapshot]:
        """What is on disk; the current file is older than the previous one where two routers wrote to one folder."""
        documents = self._files.load() if self._files else ()
        return list(filter(None, map(self._readable, documents)))

    def _readable(self, document: bytes) -> LoadedSnapshot | None:
        try:
            snapshot = load_snapshot(document)
            self._signatures.check_kept(snapshot)
        except ConfigError as error:
            event(logger, "last_known_good_unreadable", level=logging.WARNING, path=error.path, reason=error.reason)
            return None
        return snapshot

    async def _apply(self, document: bytes, source: Source) -> Applied:
        snapshot = await asyncio.to_thread(self._checked, document, source)
        if self.applied is not None and (repeated := _compare(snapshot, self.applied)):
            return await self._repeated(snapshot, repeated)
        try:
            swap = await self._prepare(snapshot)
        except (ValueError, OSError) as error:
            raise NackError(str(error), revision=snapshot.revision) from error
        await self._keep(snapshot, source)
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

    async def _repeated(self, snapshot: LoadedSnapshot, running: Applied) -> Applied:
        """What runs, with a later signature where it came with one."""
        given, known = snapshot.signature, self._signatures.believed(running.snapshot)
        if given is None or (known is not None and (known == given or known.issued_at > given.issued_at)):
            return running
        await self._keep(snapshot, Source.PUSH)
        self.applied = replace(running, snapshot=snapshot)
        event(logger, "config_signature_renewed", revision=snapshot.revision, expires_at=given.expires_at)
        return self.applied

    async def _keep(self, snapshot: LoadedSnapshot, source: Source) -> None:
        """Write the document down before it counts: what was acknowledged survives a restart.

        A file that an operator names is there at the next start, too, and is served though the disk refuses.
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


def _rank(candidate: tuple[LoadedSnapshot, Source]) -> tuple[int, bool]:
    """The higher, the sooner it is begun with."""
    snapshot, source = candidate
    return snapshot.revision, source is Source.FILE


def _compare(snapshot: LoadedSnapshot, applied: Applied) -> Applied | None:
    """What runs already, if this is it; NackError if this is older, or another one under the same number."""
    running = applied.snapshot
    if snapshot.revision > running.revision:
        return None
    if (snapshot.revision, snapshot.sha256) == (running.revision, running.sha256):
        return applied
    if snapshot.revision == running.revision:
        reason = f"revision {running.revision} is running with another digest, {running.sha256}"
    else:
        reason = f"revision {snapshot.revision} is older than the running one, {running.revision}"
    raise NackError(reason, path="$.revision", revision=snapshot.revision, is_conflict=True)
