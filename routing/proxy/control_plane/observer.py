"""What becomes of replicas and of the configuration, noticed once a second and put into the spool.

Only what the control plane cannot know by itself: which replicas this router lets go and takes back, and with which
configuration it began, since what it was pushed later was answered. A replica that is out and back within a second is
none of it; breakers and health checks take longer.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from routing.core.health.breaker import State
from routing.proxy.admin.view import View
from routing.proxy.configuration.store import Source
from routing.proxy.control_plane.spool import Spool

LOOK_S = 1.0


class ReplicaStatus(NamedTuple):
    """A replica at one look."""

    is_down: bool  # its health check fails
    is_out: bool  # its breaker keeps requests away


WELL = ReplicaStatus(is_down=False, is_out=False)


class Observer:
    """Compares each look with the one before."""

    def __init__(self, view: View, spool: Spool, version: str) -> None:
        self._view = view
        self._spool = spool
        self._replicas: dict[tuple[str, str], ReplicaStatus] = {}
        self._epoch: int | None = None
        spool.add("router_started", version=version)
        self._note_configuration()

    async def keep_looking(self) -> None:
        """For ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Note what is different."""
        epoch = self._view.health_epoch
        if epoch is not None and epoch == self._epoch:
            return
        rows = {(row["pool"], row["name"]): row for row in await self._view.seen_replicas()}
        now = {
            name: ReplicaStatus(is_down=row["health"] == "down", is_out=row["breaker"] != State.CLOSED)
            for name, row in rows.items()
        }
        for name, seen in now.items():
            before = self._replicas.get(name, WELL)
            facts = {"pool": name[0], "replica": name[1]}
            if seen.is_out != before.is_out:
                self._note("replica_ejected", "replica_readmitted", facts, rows[name]["reason"], ill=seen.is_out)
            if seen.is_down != before.is_down:
                self._note("replica_unreachable", "replica_reachable", facts, rows[name]["reason"], ill=seen.is_down)
        self._replicas, self._epoch = now, epoch

    def _note(self, ill_kind: str, well_kind: str, facts: dict[str, str], reason: str | None, *, ill: bool) -> None:
        if ill:
            self._spool.add(ill_kind, **facts, reason=reason)
        else:
            self._spool.add(well_kind, **facts)

    def _note_configuration(self) -> None:
        """What it began with, and what it could not begin with."""
        applied, nack = self._view.store.applied, self._view.store.last_nack
        if nack is not None:
            self._spool.add("config_refused", path=nack.path, reason=nack.reason)
        if applied is not None and applied.source is not Source.PUSH:
            self._spool.add("config_loaded", source=applied.source, revision=applied.snapshot.revision)
