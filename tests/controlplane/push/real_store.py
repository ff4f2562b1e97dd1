"""A router as the control plane sees it: the real configuration store and its files, without sockets."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from routing.proxy.config_store import Applied, ConfigStore, LastKnownGood, NackError, Source, Swap
from routing.schema import LoadedSnapshot

Response = tuple[str, int, str, str, int | None]  # "ack" or "nack", number, digest, reason, running number


class StoredRouter:
    """A router; ``peak`` is the highest number that it ran since it last lost its disk."""

    def __init__(self, name: str, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.boot = 0
        self.peak = 0
        self.rejects = False
        self._folder = folder / name
        self._loop = loop
        self.restart(keeps_disk=True)

    @property
    def applied(self) -> Applied | None:
        """The configuration that the router runs."""
        return self._store.applied

    @property
    def running(self) -> tuple[int, str] | None:
        """Number and digest of the configuration that the router runs."""
        return (self.applied.snapshot.revision, self.applied.snapshot.sha256) if self.applied else None

    @property
    def stored_document(self) -> bytes | None:
        """The document on disk, which the router loads at its next start."""
        return next(iter(LastKnownGood(self._folder).load()), None)

    def restart(self, *, keeps_disk: bool) -> None:
        """Start again with the configuration on disk."""
        if not keeps_disk:
            shutil.rmtree(self._folder, ignore_errors=True)
            self.peak = 0
        self.boot += 1
        self.rejects = False
        self._store = ConfigStore(self._prepare, LastKnownGood(self._folder))
        self._wait(self._store.start(None))

    def receive_push(self, document: bytes, number: int, sha256: str) -> Response:
        """Apply a pushed document; the acknowledgement or rejection."""
        try:
            applied = self._wait(self._store.apply(document, Source.PUSH))
        except NackError as nack:
            return "nack", number, sha256, nack.reason, self._store.revision
        self.peak = max(self.peak, applied.snapshot.revision)
        return "ack", applied.snapshot.revision, applied.snapshot.sha256, "", self._store.revision

    def heartbeat(self) -> dict[str, object]:
        """The fields of its next heartbeat."""
        number, sha256 = self.running or (None, None)
        running = {"revision": number, "sha256": sha256}
        return {"name": self.name, "boot": f"b{self.boot}", "admin_url": "http://127.0.0.1:1", **running}

    async def _prepare(self, snapshot: LoadedSnapshot) -> Swap:
        if self.rejects:
            raise ValueError(f"there is no room for {snapshot.revision}")
        return _swap

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(coroutine, 10))


async def _swap() -> None:
    """Do nothing: no server uses the configuration."""
