"""Events of replicas and of the configuration, kept on disk until the control plane has acknowledged them.

Theory of operation. An event is one line with its own checksum, appended when it happens; its number counts within one
run of the router (``boot``), so that (router, boot, number) identifies it. Events are sent oldest first and dropped
once they are acknowledged; the control plane may receive some twice and recognizes them. A damaged line is skipped;
each line starts with a line break of its own, so that it does not continue a damaged one. Events that a full disk
rejected are written with the next event that it accepts. The spool is bounded: if there are too many events, the oldest
are dropped, and the gap in the numbers shows it. The file survives the process; a power failure may cost the last
lines.

``StateObserver`` adds only what the control plane cannot know otherwise: which replicas this router ejects, readmits or
finds down, and the configuration that it started with (pushed configurations are acknowledged). It compares states
once a second; breakers and health checks take longer to change.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import msgspec

from routing.admin.api import View
from routing.health.circuit_breaker import State
from routing.log import event
from routing.process import check_regular_file, read_regular_file
from routing.proxy.config_store import Source

logger = logging.getLogger(__name__)

CAPACITY = 1000  # events
FILE = "events"
PERIOD_S = 1.0  # of the state observer


class RouterEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. ``at`` is Unix time by this machine's clock; the values of ``facts`` are names, or a reason."""

    boot: str
    seq: int
    at: float
    kind: str
    facts: dict[str, str] = {}


class EventSpool:
    """The events of this run and earlier ones that have not been acknowledged."""

    def __init__(self, folder: Path, boot: str, capacity: int = CAPACITY) -> None:
        self._path = folder / FILE
        self._boot = boot
        self._capacity = capacity
        self._events: deque[RouterEvent] = deque(_read(self._path), maxlen=capacity)
        self._lines = len(self._events)  # in the file
        self._seq = 0
        self._is_on_disk = True  # whether the file has all events
        self.has_new_events = asyncio.Event()  # set when an event is added; the reader clears it

    def __len__(self) -> int:
        return len(self._events)

    def add(self, kind: str, **facts: object) -> None:
        """Add an event. If the disk rejects it, it is only kept in memory."""
        self._seq += 1
        texts = {name: str(value)[:500] for name, value in facts.items() if value is not None}
        added = RouterEvent(self._boot, self._seq, time.time(), kind, texts)
        self._events.append(added)
        self.has_new_events.set()
        if self._lines >= 2 * self._capacity or not self._is_on_disk:
            self._rewrite()
        elif self._write("ab", [added], self._path):
            self._lines += 1

    def oldest(self, limit: int) -> list[RouterEvent]:
        """The oldest events, at most ``limit``."""
        return list(islice(self._events, limit))

    def acknowledge(self, events: list[RouterEvent]) -> None:
        """Drop these events."""
        if events:
            keys = {(stored.boot, stored.seq) for stored in events}
            remaining = (stored for stored in self._events if (stored.boot, stored.seq) not in keys)
            self._events = deque(remaining, maxlen=self._capacity)
            self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file by one with the present events."""
        new_path = self._path.with_suffix(".new")
        if self._write("wb", self._events, new_path, replaces=self._path):
            self._lines = len(self._events)

    def _write(self, mode: str, events: Iterable[RouterEvent], path: Path, *, replaces: Path | None = None) -> bool:
        """Whether the disk accepted the events; a rejection is logged once."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_regular_file(path)
            with path.open(mode) as file:
                file.write(b"".join(map(_line, events)))
            if replaces is not None:
                path.replace(replaces)
        except OSError as error:
            if self._is_on_disk:
                event(logger, "events_not_stored", level=logging.WARNING, reason=error.strerror)
            self._is_on_disk = False
        else:
            self._is_on_disk = True
        return self._is_on_disk


def _line(stored: RouterEvent) -> bytes:
    text = msgspec.json.encode(stored)
    return b"\n%08x %b" % (zlib.crc32(text), text)


def _read(path: Path) -> list[RouterEvent]:
    """The events of a file, without damaged lines."""
    try:
        lines = read_regular_file(path).split(b"\n")
    except OSError:
        return []
    events = []
    for line in lines:
        checksum, _, text = line.partition(b" ")
        if checksum == b"%08x" % zlib.crc32(text):
            try:
                events.append(msgspec.json.decode(text, type=RouterEvent))
            except msgspec.MsgspecError:
                continue
    return events


class StateObserver:
    """Adds an event for each change of a replica's health or breaker since the previous observation."""

    def __init__(self, view: View, spool: EventSpool, version: str) -> None:
        self._view = view
        self._spool = spool
        self._states: dict[tuple[str, str], tuple[bool, bool]] = {}  # by pool and replica: is ejected, is down
        self._epoch: int | None = None
        spool.add("router_started", version=version)
        applied, nack = view.store.applied, view.store.last_nack
        if nack is not None:
            spool.add("config_rejected", path=nack.path, reason=nack.reason)
        if applied is not None and applied.source is not Source.PUSH:
            spool.add("config_loaded", source=applied.source, revision=applied.snapshot.revision)

    async def observe_forever(self) -> None:
        """Observe every ``PERIOD_S``."""
        while True:
            await self.observe()
            await asyncio.sleep(PERIOD_S)

    async def observe(self) -> None:
        """Compare all replicas with the previous observation."""
        epoch = self._view.health_epoch
        if epoch is not None and epoch == self._epoch:
            return
        states: dict[tuple[str, str], tuple[bool, bool]] = {}
        for row in await self._view.last_polled_replicas():
            key = (row["pool"], row["name"])
            was_ejected, was_down = self._states.get(key, (False, False))
            is_ejected, is_down = states[key] = (row["breaker"] != State.CLOSED, row["health"] == "down")
            facts = {"pool": row["pool"], "replica": row["name"]}
            if is_ejected and not was_ejected:
                self._spool.add("replica_ejected", **facts, reason=row["reason"])
            elif was_ejected and not is_ejected:
                self._spool.add("replica_readmitted", **facts)
            if is_down and not was_down:
                self._spool.add("replica_unreachable", **facts, reason=row["reason"])
            elif was_down and not is_down:
                self._spool.add("replica_reachable", **facts)
        self._states, self._epoch = states, epoch
