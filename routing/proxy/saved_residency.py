"""The residency index on disk, beside the last known good configuration, so that a restarted router is warm.

Theory of operation. Each process writes a snapshot of its residency index to a file of its own, every ``SAVE_S`` while
it has requests, and when it has drained. A process that starts reads the files of all processes, before it accepts
requests. It ignores a file that is damaged, belongs to another hash secret, or is older than cached blocks are expected
to live. It also ignores the entries of a replica whose URL has changed.

An engine may have restarted meanwhile, with an empty cache. Its ``/metrics`` has the time of its start, and the
``Date`` header has the current time by the same clock, so the engine's age needs no synchronized clocks. Blocks that
were last used before the engine's start are removed. A router that starts waits up to ``CHECK_S`` for these responses,
and repeats failed requests in the background. Engines with several API servers do not report their start; there, wrong
predictions correct the index.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final

import msgspec

from routing.balancing.replicas import targets_of
from routing.balancing.residency_snapshot import decode_uses, encode_uses, restore_uses
from routing.health.checks import ActiveFleet, Balancer
from routing.health.engine_probe import MAX_METRICS_BYTES
from routing.http.tasks import Background, run_in_slices, run_until_cancelled
from routing.log import event
from routing.process import create_regular_file, read_regular_file
from routing.types import TargetId
from routing.upstream.client import fetch_response
from routing.upstream.pool import Address

SAVE_S: Final = 30.0  # between two snapshots, while there are requests
MAX_BYTES: Final = 64 << 20  # of a file; a full residency index needs less
CHECK_S: Final = 1.0  # how long a starting router waits for the engines' ages
CHECK_ATTEMPTS: Final = 10  # attempts to read an engine's age
CHECK_PAUSE_S: Final = 3.0  # between two attempts; also the timeout of one
CONCURRENT_CHECKS: Final = 16
_MAGIC: Final = f"warmpath-residency-3-{sys.byteorder}".encode()
_start_time = re.compile(rb"^process_start_time_seconds ([0-9.e+]+)", re.MULTILINE).search

logger = logging.getLogger(__name__)


class SavedTarget(msgspec.Struct):
    """The cached blocks of one replica or rank, in the records of ``residency_snapshot``."""

    target: str
    url: str
    capacity_ratio: float  # of its estimated to its reported capacity
    uses: bytes


class Snapshot(msgspec.Struct):
    """The content of a file."""

    saved_at: float  # seconds since 1970
    secret: str  # digest of the hash secret
    targets: list[SavedTarget]


_decode = msgspec.msgpack.Decoder(Snapshot).decode


class SavedResidency:
    """Saves and restores the residency index of one process; ``number`` differs between workers of one router."""

    def __init__(self, balancer: Balancer, folder: Path, number: int = 0) -> None:
        self._balancer = balancer
        self._folder = folder
        self._path = folder / f"residency-{number}"
        self._saving: asyncio.Task[None] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self._restored_s = 0.0  # when the index was restored, by the residency's clock
        self._saved_dispatches = 0  # number of dispatches at the latest snapshot

    # --- saving ---

    def start(self) -> None:
        """Save periodically from now on."""
        if self._saving is None:
            loop = run_until_cancelled(Background.RESIDENCY, self._save_forever)
            self._saving = asyncio.get_running_loop().create_task(loop)

    async def save(self) -> None:
        """Write a snapshot, unless there were no requests since the last one; logs a failed write."""
        fleet, dispatches = self._balancer.fleet, self._balancer.residency.dispatches
        if fleet is None or dispatches == self._saved_dispatches:
            return
        self._saved_dispatches = dispatches
        snapshot = Snapshot(time.time(), _digest(fleet), await self._targets(fleet))
        try:
            await asyncio.to_thread(_write, self._path, snapshot)
        except OSError as error:
            event(logger, "residency_not_saved", level=logging.WARNING, reason=error.strerror)

    async def _save_forever(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save()

    async def _targets(self, fleet: ActiveFleet) -> list[SavedTarget]:
        """All replicas with cached blocks; encoded in slices, between requests."""
        residency, now_s, now_at = self._balancer.residency, self._balancer.loads.clock(), time.time()
        found = [
            (target.id, target.replica.url, blocks)
            for pool in fleet.config.pools
            for replica in pool.replicas
            for target in targets_of(replica)
            if (blocks := residency.replica(target.id)) is not None and blocks.runs
        ]
        targets = []
        for name, url, blocks in found:
            records = await run_in_slices(encode_uses(blocks, now_s, now_at, MAX_BYTES // len(found)))
            targets.append(SavedTarget(name, url, blocks.capacity_ratio, b"".join(records)))
        return targets

    # --- restoring ---

    async def restore(self) -> None:
        """Restore the cached blocks of the active configuration's replicas, from the files of all processes."""
        fleet = self._balancer.fleet
        if fleet is None:
            return
        now_at = time.time()
        snapshots = await asyncio.to_thread(_read_all, self._folder, now_at - self._balancer.residency.ttl_s)
        snapshots = [snapshot for snapshot in snapshots if snapshot.secret == _digest(fleet)]
        if not snapshots:
            return
        prompts = await run_in_slices(self._restore(fleet, snapshots, now_at))
        self._restored_s = self._balancer.loads.clock()
        event(logger, "residency_restored", prompts=len(prompts), blocks=sum(prompts), files=len(snapshots))
        await self._check_engines(fleet)

    def _restore(self, fleet: ActiveFleet, snapshots: list[Snapshot], now_at: float) -> Iterator[int]:
        residency, now_s = self._balancer.residency, self._balancer.loads.clock()
        for target, saved in _by_target(fleet, snapshots).items():
            blocks = residency.replica(target)
            if blocks is not None:
                blocks.set_capacity_ratio(max(item.capacity_ratio for item in saved))
                uses = [decode_uses(item.uses) for item in saved]
                yield from restore_uses(residency, target, uses, now_s, now_at, residency.ttl_s)

    async def _check_engines(self, fleet: ActiveFleet) -> None:
        """Remove blocks that were cached before their engine started; waits up to ``CHECK_S`` for the engines' ages."""
        limit, loop = asyncio.Semaphore(CONCURRENT_CHECKS), asyncio.get_running_loop()
        for pool in fleet.config.pools:
            for replica in pool.replicas:
                targets = [target.id for target in targets_of(replica)]
                if any((blocks := self._balancer.residency.replica(target)) and blocks.runs for target in targets):
                    address = fleet.connection_pools[replica.name].address
                    task = loop.create_task(self._check_engine(address, targets, limit))
                    self._checks.add(task)
                    task.add_done_callback(self._checks.discard)
        if self._checks:
            await asyncio.wait(set(self._checks), timeout=CHECK_S)

    async def _check_engine(self, address: Address, targets: list[TargetId], limit: asyncio.Semaphore) -> None:
        for _ in range(CHECK_ATTEMPTS):
            async with limit:
                is_known, age_s = await engine_age_s(address)
            if is_known:
                if age_s is not None:
                    started_s = min(self._balancer.loads.clock() - age_s, self._restored_s)
                    for target in targets:
                        self._balancer.residency.evict_before(target, started_s)
                return
            await asyncio.sleep(CHECK_PAUSE_S)

    def close(self) -> None:
        """Cancel all tasks."""
        for task in (*self._checks, *((self._saving,) if self._saving else ())):
            task.cancel()


async def engine_age_s(address: Address) -> tuple[bool, float | None]:
    """Whether an engine responded, and the seconds since it started; None if it does not report that."""
    try:
        async with asyncio.timeout(CHECK_PAUSE_S):
            response = await fetch_response(address, "/metrics", max_bytes=MAX_METRICS_BYTES)
    except (TimeoutError, OSError, ValueError):
        return False, None
    found = _start_time(response.body) if response.status == 200 else None
    if found is None:
        return response.status < 500, None
    now_at = time.time()
    with suppress(KeyError, ValueError):
        now_at = parsedate_to_datetime(response.headers[b"date"].decode("latin-1")).timestamp()
    try:
        return True, max(0.0, now_at - float(found[1]))
    except ValueError:  # not a number
        return True, None


def _by_target(fleet: ActiveFleet, snapshots: list[Snapshot]) -> dict[TargetId, list[SavedTarget]]:
    """The saved entries of each configured target whose URL is the same as in the snapshot."""
    urls = {
        target.id: target.replica.url
        for pool in fleet.config.pools
        for replica in pool.replicas
        for target in targets_of(replica)
    }
    found: dict[TargetId, list[SavedTarget]] = {}
    for snapshot in snapshots:
        for saved in snapshot.targets:
            target = TargetId(saved.target)
            if urls.get(target) == saved.url:
                found.setdefault(target, []).append(saved)
    return found


def _digest(fleet: ActiveFleet) -> str:
    return hashlib.sha256(b"residency " + fleet.config.hash_secret.encode()).hexdigest()


def _write(path: Path, snapshot: Snapshot) -> None:
    """Replace a file atomically, readable only by the router's account; OSError if the disk fails."""
    content = msgspec.msgpack.encode(snapshot)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new_path = path.with_name(f"{path.name}.new")
    with os.fdopen(create_regular_file(new_path), "wb") as file:
        file.write(b"%b %b\n" % (_MAGIC, hashlib.sha256(content).hexdigest().encode()))
        file.write(content)
    new_path.replace(path)


def _read_all(folder: Path, oldest_at: float) -> list[Snapshot]:
    """The valid snapshots in a folder since a time in seconds since 1970; removes older files."""
    snapshots = []
    for path in sorted(folder.glob("residency-*[0-9]")):
        snapshot = _read(path)
        if snapshot is not None and snapshot.saved_at >= oldest_at:
            snapshots.append(snapshot)
        else:
            path.unlink(missing_ok=True)
    return snapshots


def _read(path: Path) -> Snapshot | None:
    try:
        if path.stat().st_size > 2 * MAX_BYTES:
            return None
        header, _, content = read_regular_file(path).partition(b"\n")
        if header != b"%b %b" % (_MAGIC, hashlib.sha256(content).hexdigest().encode()):
            event(logger, "residency_file_ignored", level=logging.WARNING, file=path.name, reason="damaged")
            return None
        return _decode(content)
    except (OSError, msgspec.DecodeError) as error:
        event(logger, "residency_file_ignored", level=logging.WARNING, file=path.name, reason=str(error))
        return None
