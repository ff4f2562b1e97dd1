"""All KV event streams of a router, and the task that takes their events between requests.

Theory of operation. One task takes what has arrived every ``TICK_S``, at most ``SLICE_S`` at a time, and then lets
requests go first. So events cost little where they are frequent, and what other routers have stored is known a tenth of
a second later. While a connection is made or a replay is awaited, ticks last ``URGENT_TICK_S``. Each tick also learns
from responses that have ended. Another task opens streams, again if their connection was lost.

While a stream is followed, the replica's responses are matched with its events. While its state is ``following``, the
replica's entries in the residency index have no age limit. In all other states the index is estimated, as for a replica
without events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_address
from socket import SOCK_STREAM
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from routing.balancing.replicas import targets_of
from routing.balancing.routes import uses_residency
from routing.http.tasks import SLICE_S, Background, run_until_cancelled
from routing.kv_events.event_stream import EventStream, Host
from routing.kv_events.followed_engine import Clock, FollowedEngine
from routing.kv_events.known_prompts import KnownPrompts, NewKey
from routing.kv_events.message_order import MessageOrder, StreamState
from routing.log import defect, event
from routing.observability.metrics import PREFIX, header, labels
from routing.schema import ReplicaState
from routing.upstream.pool import Address, permitted_hosts

if TYPE_CHECKING:
    from routing.balancing.residency import Residency
    from routing.schema import KvEvents, ReplicaConfig, ReplicaNetworks, RouterConfig
    from routing.types import TargetId

TICK_S: Final = 0.1
URGENT_TICK_S: Final = 0.01
REOPEN_S: Final = 0.1  # after a lost connection; doubled while none is made, up to MAX_REOPEN_S
MAX_REOPEN_S: Final = 2.0
FAULT_PAUSE_S: Final = 5.0  # after a stream that was of no use
OPEN_S: Final = 2.0  # to resolve the host names of a stream
MAX_BLOCKS: Final = 1 << 20  # of all engines together; 0.2 to 0.5 KiB each
MAX_BLOCKS_PER_ENGINE: Final = 1 << 18
MIN_GROWTH: Final = 1.05  # of the capacity of all cache tiers, before the index follows
UNUSED: Final = "unused"  # state in a pool whose policies do not use the residency

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """The engine and settings of a stream. A stream whose source does not change survives a new configuration."""

    pool: str
    replica: str
    target: TargetId
    rank: int | None  # data-parallel
    events: KvEvents
    networks: ReplicaNetworks | None


class Follower:
    """One engine: its source, its blocks and its stream."""

    def __init__(self, source: Source, order: MessageOrder, stream: EventStream) -> None:
        self.source = source
        self.order = order
        self.stream = stream
        self.open_at = 0.0  # loop time before which the stream is not opened again
        self.failure = ""  # why the last attempt to open it failed; "" after a success
        self._pause_s = REOPEN_S

    @property
    def engine(self) -> FollowedEngine:
        """The engine's blocks."""
        return self.order.engine

    def is_due(self, now: float) -> bool:
        """Whether the stream has to be opened, or opened again."""
        return now >= self.open_at and not self.stream.is_open

    def pause(self, now: float) -> None:
        """Delay the next attempt, twice as long each time until a connection is made."""
        self._pause_s = min(2 * self._pause_s, MAX_REOPEN_S)
        self.open_at = now + self._pause_s

    def note_connection(self, now: float) -> None:
        """If there is a connection, reset the delay of the next attempt; after a fault, wait for longer."""
        if self.stream.fault and not self.stream.is_open:
            fault, self.stream.fault = self.stream.fault, ""
            self.failure, self.open_at = fault, now + FAULT_PAUSE_S
            event(logger, "kv_events_ended", level=logging.WARNING, target=self.source.target, reason=fault)
        elif self.stream.is_connected:
            self._pause_s, self.open_at = REOPEN_S, 0.0

    async def open(self) -> None:
        """Resolve the hosts and connect in the background; OSError if one has no permitted address."""
        replay = self.source.events.replay_endpoint
        host = await self._host(self.source.events.endpoint)
        replay_host = None if replay is None else await self._host(replay)
        if self.stream.is_open:
            self.stream.close()
        self.stream.open(host, replay_host, self.source.events.topic)

    async def _host(self, endpoint: str) -> Host:
        """A permitted address of this rank's endpoint; names are resolved each time that the stream is opened."""
        address = Address(f"http{endpoint.removeprefix('tcp')}", networks=self.source.networks)
        host = (await permitted_hosts(address))[0]
        if not _is_address(host):
            host = await _resolve(host)
        return host, address.port + (self.source.rank or 0)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


async def _resolve(host: str) -> str:
    """The first address of a name; OSError if there is none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=SOCK_STREAM)
    return str(found[0][4][0])


class KvEventSubscriptions:
    """The followers of all replicas with ``kv_events``."""

    def __init__(self, residency: Residency, clock: Clock) -> None:
        self._residency = residency
        self._clock = clock
        self._followers: dict[Source, Follower] = {}
        self._configured: tuple[tuple[str, str], ...] = ()  # pool and name of each replica with events
        self._known: dict[str, KnownPrompts] = {}  # by pool
        self._tasks: list[asyncio.Task[None]] = []
        self._has_due = asyncio.Event()  # a stream has to be opened

    # --- configuration ---

    def configure(self, config: RouterConfig) -> None:
        """Follow the engines of a configuration; existing streams continue."""
        self._configured = tuple(
            (pool.name, replica.name)
            for pool in config.pools
            for replica in pool.replicas
            if replica.kv_events is not None and replica.state is not ReplicaState.DISABLED
        )
        pools = [pool for pool in config.pools if uses_residency(pool)]
        sources = [
            Source(pool.name, replica.name, target.id, target.rank, replica.kv_events, config.replica_networks)
            for pool in pools
            for replica in pool.replicas
            if replica.kv_events is not None and replica.state is not ReplicaState.DISABLED
            for target in targets_of(replica)
        ]
        for source in self._followers.keys() - set(sources):
            self._drop(source)
        self._known = {pool: self._known.get(pool) or KnownPrompts() for pool in {source.pool for source in sources}}
        for source in sources:
            if source not in self._followers:
                self._followers[source] = self._follow(source, len(sources))
        if self._followers and not self._tasks:
            loops = (self._run, self._open_streams)
            self._tasks = [asyncio.create_task(run_until_cancelled(Background.KV_EVENTS, work)) for work in loops]

    def close(self) -> None:
        """Close all sockets."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        for source in list(self._followers):
            self._drop(source)

    def _follow(self, source: Source, engines: int) -> Follower:
        clock, known = self._clock, self._known[source.pool]
        max_blocks = min(MAX_BLOCKS_PER_ENGINE, MAX_BLOCKS // engines)
        engine = FollowedEngine(source.target, self._residency, known, clock, max_blocks)
        can_replay = source.events.replay_endpoint is not None
        order = MessageOrder(engine, clock, can_replay=can_replay, rank=source.rank)
        return Follower(source, order, EventStream(order, clock))

    def _drop(self, source: Source) -> None:
        follower = self._followers.pop(source)
        follower.stream.close()
        if (replica := self._residency.replica(source.target)) is not None:
            replica.on_response, replica.expires = None, True

    # --- the task ---

    async def _run(self) -> None:
        """Process events until cancelled."""
        time = asyncio.get_running_loop().time
        while True:
            await self._in_slices(self._tick())
            if self._due(time()):
                self._has_due.set()
            is_urgent = any(follower.stream.is_urgent for follower in self._followers.values())
            await asyncio.sleep(URGENT_TICK_S if is_urgent else TICK_S)

    async def _in_slices(self, steps: Iterator[None]) -> None:
        """Run all steps in slices of ``SLICE_S``; other tasks run between slices."""
        until = perf_counter() + SLICE_S
        for _ in steps:
            if perf_counter() > until:
                await asyncio.sleep(0)
                until = perf_counter() + SLICE_S

    def _tick(self) -> Iterator[None]:
        for follower in list(self._followers.values()):
            if follower.stream.is_open:
                yield from self._isolate_errors(follower, follower.stream.pump)
                follower.note_connection(asyncio.get_running_loop().time())
            if follower.engine.has_unmatched_responses:
                yield from self._isolate_errors(follower, partial(self._learn, follower))

    def _isolate_errors(self, follower: Follower, steps: Callable[[], Iterator[None]]) -> Iterator[None]:
        """Run steps of one follower. A programming error closes only its stream, for a while."""
        try:
            yield from steps()
        except Exception as error:  # noqa: BLE001 - other engines must be followed
            defect(logger, error, "kv events")
            follower.engine.forget()
            follower.stream.close()
            follower.pause(asyncio.get_running_loop().time())
        self._update_index(follower)
        yield

    def _learn(self, follower: Follower) -> Iterator[None]:
        if follower.order.is_followed:
            for keys in follower.engine.learn():
                yield from self._share(follower, keys)
                yield

    def _share(self, learner: Follower, keys: list[NewKey]) -> Iterator[None]:
        """Give newly known blocks to the followers of the pool's other engines."""
        for follower in list(self._followers.values()) if keys else ():
            if follower is not learner and follower.source.pool == learner.source.pool:
                follower.engine.add_longest_cached(keys)
                yield

    async def _open_streams(self) -> None:
        """Open new streams, and streams that have had no connection for a while, until cancelled."""
        time = asyncio.get_running_loop().time
        while True:
            await self._has_due.wait()
            self._has_due.clear()
            await asyncio.gather(*map(self._open, self._due(time())))

    def _due(self, now: float) -> list[Follower]:
        return [follower for follower in self._followers.values() if follower.is_due(now)]

    async def _open(self, follower: Follower) -> None:
        follower.pause(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(OPEN_S):
                await follower.open()
        except (OSError, TimeoutError) as error:
            reason = str(error) or "its host name was not resolved in time"
            if reason != follower.failure:  # logged once for each reason
                target = follower.source.target
                event(logger, "kv_events_not_opened", level=logging.WARNING, target=target, reason=reason)
            follower.failure = reason
        else:
            follower.failure = ""
        if follower.source not in self._followers:  # it was removed meanwhile
            follower.stream.close()

    def _update_index(self, follower: Follower) -> None:
        """Apply the state of a stream to its replica in the residency index."""
        replica = self._residency.replica(follower.source.target)
        if replica is None or self._followers.get(follower.source) is not follower:  # it was removed meanwhile
            return
        order, engine = follower.order, follower.engine
        replica.on_response = engine.on_response if order.is_followed else None
        replica.expires = order.state is not StreamState.FOLLOWING
        seen_tokens = engine.seen_tokens if order.is_followed else 0
        self._residency.set_seen_tokens(follower.source.target, seen_tokens, was_full=engine.was_full)
        if order.is_followed and engine.capacity_ratio > MIN_GROWTH * replica.capacity_ratio:
            replica.set_capacity_ratio(engine.capacity_ratio)

    # --- state for the admin port and metrics ---

    def rows(self, replica: ReplicaConfig) -> list[dict[str, Any]] | None:
        """The streams of a replica, one for each rank; None if it has none."""
        if replica.kv_events is None:
            return None
        rows = [_row(follower) for source, follower in self._followers.items() if source.replica == replica.name]
        return rows or [{"state": UNUSED}]

    def lines(self) -> Iterator[str]:
        """Prometheus text."""
        yield from self._state_lines()
        for name, kind, field, text in _METRICS:
            yield from header(f"kv_events_{name}", kind, text)
            for source, follower in list(self._followers.items()):
                value = _row(follower)[field]
                if value is None:
                    continue
                pairs = labels(pool=source.pool, replica=source.replica, rank=source.rank or 0)
                yield f"{PREFIX}kv_events_{name}{{{pairs}}} {float(value):.10g}"

    def _state_lines(self) -> Iterator[str]:
        """The state of each stream, and of replicas with events that have no stream."""
        yield from header("kv_events_state", "gauge", "Processes of this router whose KV event stream has this state.")
        for source, follower in list(self._followers.items()):
            pairs = labels(pool=source.pool, replica=source.replica, rank=source.rank or 0, state=follower.order.state)
            yield f"{PREFIX}kv_events_state{{{pairs}}} 1"
        followed = {(source.pool, source.replica) for source in self._followers}
        for pool, replica in self._configured:
            if (pool, replica) not in followed:
                pairs = labels(pool=pool, replica=replica, rank=0, state=UNUSED)
                yield f"{PREFIX}kv_events_state{{{pairs}}} 1"


_METRICS: Final = (
    ("state_timestamp_seconds", "gauge", "since_s", "Unix time since which a KV event stream has its state."),
    ("followed", "gauge", "is_followed", "Whether a replica's cached blocks are corrected by its KV events."),
    ("received_total", "counter", "events", "KV events applied."),
    ("gaps_total", "counter", "gaps", "Gaps in the numbers of KV event messages."),
    ("lost_total", "counter", "lost", "Gaps that could not be replayed."),
    ("malformed_total", "counter", "malformed", "KV event messages that could not be decoded."),
    ("restarts_total", "counter", "restarts", "Engine restarts seen in the numbers of messages."),
    ("blocks", "gauge", "blocks", "Known KV blocks that the engine has cached in device memory."),
    ("offloaded_blocks", "gauge", "offloaded", "Known KV blocks that only lower cache tiers of the engine have."),
    ("matched_total", "counter", "matched", "Responses whose blocks were found among the events."),
    ("lag_seconds", "gauge", "lag_s", "Time from the engine's latest applied message to its application."),
)


def _row(follower: Follower) -> dict[str, Any]:
    order, engine = follower.order, follower.engine
    return {
        "rank": follower.source.rank or 0,
        "state": order.state,
        "reason": follower.failure or None,
        "since_s": order.since_s,
        "is_followed": order.is_followed,
        "snapshot": order.snapshot,
        "messages": order.messages,
        "events": order.events,
        "gaps": order.gaps,
        "lost": order.lost,
        "malformed": order.malformed,
        "restarts": order.restarts,
        "blocks": engine.blocks.blocks if order.is_followed else None,
        "offloaded": engine.blocks.offloaded if order.is_followed else None,
        "capacity_tokens": engine.capacity_tokens,
        "matched": engine.matched,
        "lag_s": order.lag_s,
    }
