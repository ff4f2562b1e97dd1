"""Events on disk until somebody has taken them, so that none is lost with the process or with the control plane.

Theory of operation. An event is one line with its own checksum, appended when it happens; its number counts within one
life of the router (``boot``), so that (router, boot, number) names it for ever. Events go out oldest first, and are
dropped here once they were taken; whoever takes them may see some again, and knows them by their names. A line that is
torn or altered is passed over; each begins with a line break of its own, so that it is not glued to such a one. What a
full disk did not take is written with the next event that it takes. What is kept is bounded: of too many the oldest
go, and the gap in the numbers says so. The file survives the process; a loss of power may cost its last lines.

What becomes of replicas and of the configuration, noticed once a second and put into the spool.

Only what the control plane cannot know by itself: which replicas this router lets go and takes back, and with which
configuration it began, since what it was pushed later was answered. A replica that is out and back within a second is
none of it; breakers and health checks take longer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from routing.admin.api import View
from routing.health.circuit_breaker import State
from routing.log import event
from routing.proxy.config_store import Source

logger = logging.getLogger(__name__)

CAPACITY = 1000  # events
FILE = "events"


class RouterEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. ``at`` is Unix time by this machine's clock; the texts are names, or a reason."""

    boot: str
    seq: int
    at: float
    kind: str
    facts: dict[str, str] = {}


class EventSpool:
    """The events of this life and of those before that nobody has taken."""

    def __init__(self, folder: Path, boot: str, capacity: int = CAPACITY) -> None:
        self._path = folder / FILE
        self._boot = boot
        self._capacity = capacity
        self._waiting: deque[RouterEvent] = deque(_read(self._path), maxlen=capacity)
        self._lines = len(self._waiting)  # in the file
        self._seq = 0
        self._is_on_disk = True  # all that waits
        self.news = asyncio.Event()  # set when something is appended; whoever waits clears it

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, kind: str, **facts: object) -> None:
        """Keep an event. A disk that refuses costs its keeping, not its telling."""
        self._seq += 1
        told = {name: str(value)[:500] for name, value in facts.items() if value is not None}
        happening = RouterEvent(self._boot, self._seq, time.time(), kind, told)
        self._waiting.append(happening)
        self.news.set()
        if self._lines >= 2 * self._capacity or not self._is_on_disk:
            self._rewrite()
        elif self._write("ab", [happening], self._path):
            self._lines += 1

    def oldest(self, limit: int) -> list[RouterEvent]:
        """What has waited the longest."""
        return [happening for happening, _ in zip(self._waiting, range(limit), strict=False)]

    def acknowledge(self, happenings: list[RouterEvent]) -> None:
        """These need not be kept any more."""
        gone = {(happening.boot, happening.seq) for happening in happenings}
        self._waiting = deque(
            (kept for kept in self._waiting if (kept.boot, kept.seq) not in gone), maxlen=self._capacity
        )
        if gone:
            self._rewrite()

    def _rewrite(self) -> None:
        """Put a file with what waits in the place of the old one."""
        fresh = self._path.with_suffix(".new")
        if self._write("wb", self._waiting, fresh, becomes=self._path):
            self._lines = len(self._waiting)

    def _write(self, mode: str, happenings: Iterable[RouterEvent], path: Path, *, becomes: Path | None = None) -> bool:
        """Whether the disk took it; a refusal is said once."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open(mode) as file:
                file.write(b"".join(map(_line, happenings)))
            if becomes is not None:
                path.replace(becomes)
        except OSError as error:
            if self._is_on_disk:
                event(logger, "events_not_kept", level=logging.WARNING, reason=error.strerror)
            self._is_on_disk = False
        else:
            self._is_on_disk = True
        return self._is_on_disk


def _line(happening: RouterEvent) -> bytes:
    text = msgspec.json.encode(happening)
    return b"\n%08x %b" % (zlib.crc32(text), text)


def _read(path: Path) -> list[RouterEvent]:
    """What the lines of a file say; those that are torn, altered or strange are left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        checksum, _, text = line.partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            try:
                found.append(msgspec.json.decode(text, type=RouterEvent))
            except msgspec.MsgspecError:
                continue
    return found


LOOK_S = 1.0


class ReplicaStatus(NamedTuple):
    """A replica at one look."""

    is_down: bool  # its health check fails
    is_out: bool  # its breaker keeps requests away


WELL = ReplicaStatus(is_down=False, is_out=False)


class StateObserver:
    """Compares each look with the one before."""

    def __init__(self, view: View, spool: EventSpool, version: str) -> None:
        self._view = view
        self._spool = spool
        self._replicas: dict[tuple[str, str], ReplicaStatus] = {}
        self._epoch: int | None = None
        spool.add("router_started", version=version)
        self._note_configuration()

    async def observe_forever(self) -> None:
        """For ever."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Note what is different."""
        epoch = self._view.health_epoch
        if epoch is not None and epoch == self._epoch:
            return
        rows = {(row["pool"], row["name"]): row for row in await self._view.last_polled_replicas()}
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
