"""All KV event streams of a router, and the task that takes their events between requests.

Theory of operation. One task takes what has arrived, at most ``SLICE_S`` at a time, and then lets requests go first.
Every ``TICK_S`` it also gives up replays without a response and learns from responses that have ended. Another task
opens streams, again if there was no connection for ``REOPEN_S``.

A replica's prompts are reported to its engine's stream only while that follows the events, and only while it knows all
of them do the replica's entries in the residency index have no age limit. In all other cases the index works by its
estimate, as for a replica without events.

Without pyzmq (the extra ``events``) nothing is followed, which is logged and shown in ``/admin/replicas``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from routing.balancing.replicas import targets_of
from routing.balancing.routes import uses_residency
from routing.http.tasks import SLICE_S, Background, run_until_cancelled
from routing.kv_events.followed_engine import Clock, FollowedEngine
from routing.kv_events.known_prompts import KnownPrompts
from routing.kv_events.message_order import MessageOrder, StreamState
from routing.log import defect, event
from routing.observability.metrics import PREFIX, header, labels
from routing.schema import ReplicaState
from routing.upstream.pool import Address, permitted_hosts

if TYPE_CHECKING:
    from routing.balancing.residency import Residency
    from routing.kv_events.event_stream import EventStream
    from routing.schema import KvEvents, ReplicaConfig, ReplicaNetworks, RouterConfig
    from routing.types import TargetId

TICK_S: Final = 0.1
SWEEP_TICKS: Final = 10
REOPEN_S: Final = 5.0
OPEN_S: Final = 2.0  # to resolve the host names of a stream
MAX_BLOCKS: Final = 1 << 20  # of all engines together; about 0.3 KiB each
MAX_BLOCKS_PER_ENGINE: Final = 1 << 18
UNAVAILABLE: Final = "unavailable"  # state without pyzmq
UNUSED: Final = "unused"  # state in a pool whose policies do not use the residency

logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """What a stream is opened for; a stream whose source stays the same continues under a new configuration."""

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
        self.failure = ""  # why it could not be opened the last time

    @property
    def engine(self) -> FollowedEngine:
        """The engine's blocks."""
        return self.order.engine

    def is_due(self, now: float) -> bool:
        """Whether the stream has to be opened, or opened again."""
        return now >= self.open_at and not (self.stream.is_open and now - self.stream.disconnected_at < REOPEN_S)

    async def open(self) -> None:
        """Resolve the hosts and connect; OSError if one has no permitted address."""
        replay = self.source.events.replay_endpoint
        endpoint = await self._address(self.source.events.endpoint)
        replay_endpoint = None if replay is None else await self._address(replay)
        if self.stream.is_open:
            self.stream.close()
        self.stream.open(endpoint, replay_endpoint, self.source.events.topic)

    async def _address(self, endpoint: str) -> str:
        """The endpoint of this rank with a permitted address; names are resolved again at each opening."""
        address = Address(f"http{endpoint.removeprefix('tcp')}", networks=self.source.networks)
        host = (await permitted_hosts(address))[0]
        return f"tcp://{f'[{host}]' if ':' in host else host}:{address.port + (self.source.rank or 0)}"


class KvEventSubscriptions:
    """The followers of all replicas with ``kv_events``."""

    def __init__(self, residency: Residency, clock: Clock) -> None:
        self._residency = residency
        self._clock = clock
        self._followers: dict[Source, Follower] = {}
        self._configured: tuple[tuple[str, str], ...] = ()  # pool and name of each replica with events
        self._known: dict[str, KnownPrompts] = {}  # by pool
        self._readable: set[Source] = set()
        self._wake = asyncio.Event()
        self._ticks = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._context: Any = None  # of ZeroMQ; None: not needed yet, or not installed
        self._is_unavailable = False

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
        if sources and not self._load_zmq():
            return
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
        if self._context is not None:
            self._context.destroy(0)
            self._context = None

    def _load_zmq(self) -> bool:
        """Whether pyzmq is installed; logs its absence once."""
        if self._context is not None:
            return True
        try:
            import zmq  # noqa: PLC0415 - optional
        except ImportError:
            if not self._is_unavailable:
                event(logger, "kv_events_unavailable", level=logging.WARNING, reason="pyzmq is not installed")
            self._is_unavailable = True
            return False
        self._context = zmq.Context()
        return True

    def _follow(self, source: Source, engines: int) -> Follower:
        from routing.kv_events.event_stream import EventStream  # noqa: PLC0415 - needs pyzmq

        clock, known = self._clock, self._known[source.pool]
        max_blocks = min(MAX_BLOCKS_PER_ENGINE, MAX_BLOCKS // engines)
        engine = FollowedEngine(source.target, self._residency, known, clock, max_blocks)
        can_replay = source.events.replay_endpoint is not None
        order = MessageOrder(engine, clock, can_replay=can_replay, rank=source.rank)

        def on_readable() -> None:
            self._readable.add(source)
            self._wake.set()

        return Follower(source, order, EventStream(self._context, order, on_readable))

    def _drop(self, source: Source) -> None:
        follower = self._followers.pop(source)
        follower.stream.close()
        if (replica := self._residency.replica(source.target)) is not None:
            replica.on_response, replica.expires = None, True

    # --- the task ---

    async def _run(self) -> None:
        """Take events until cancelled."""
        next_tick_at = 0.0
        while True:
            if (now := perf_counter()) >= next_tick_at:
                next_tick_at = now + TICK_S
                await self._in_slices(self._tick())
            if not self._readable:
                self._wake.clear()
                try:
                    async with asyncio.timeout(max(0.0, next_tick_at - perf_counter())):
                        await self._wake.wait()
                except TimeoutError:
                    continue
            await self._in_slices(self._take_events())

    async def _in_slices(self, steps: Iterator[None]) -> None:
        """Run all steps, and let requests go first after each slice."""
        until = perf_counter() + SLICE_S
        for _ in steps:
            if perf_counter() > until:
                await asyncio.sleep(0)
                until = perf_counter() + SLICE_S

    def _take_events(self) -> Iterator[None]:
        while self._readable:
            follower = self._followers.get(self._readable.pop())
            if follower is not None:
                yield from self._contained(follower, follower.stream.pump)

    def _tick(self) -> Iterator[None]:
        self._ticks += 1
        is_sweep = self._ticks % SWEEP_TICKS == 0
        for follower in list(self._followers.values()):
            if follower.stream.is_replaying:
                yield from self._contained(follower, follower.stream.check_replay)
            if follower.engine.has_served:
                yield from self._contained(follower, partial(self._learn, follower))
            if follower.stream.is_replaying or is_sweep:  # in case a socket's descriptor did not tell
                self._readable.add(follower.source)

    def _contained(self, follower: Follower, steps: Callable[[], Iterator[None]]) -> Iterator[None]:
        """Run steps of one follower. A programming error closes its stream for a while, and no other."""
        try:
            yield from steps()
        except Exception as error:  # noqa: BLE001 - other engines must be followed
            defect(logger, error, "kv events")
            follower.engine.forget()
            follower.stream.close()
            follower.open_at = asyncio.get_running_loop().time() + REOPEN_S
        self._update_index(follower)
        yield

    def _learn(self, follower: Follower) -> Iterator[None]:
        if follower.order.is_followed:
            for keys in follower.engine.learn():
                yield from self._share(follower, keys)
                yield

    def _share(self, learner: Follower, keys: list[tuple[int, int]]) -> Iterator[None]:
        """Tell other engines' followers of the pool what was learnt."""
        for follower in list(self._followers.values()) if keys else ():
            if follower is not learner and follower.source.pool == learner.source.pool:
                follower.engine.adopt(keys)
                yield

    async def _open_streams(self) -> None:
        """Open new streams, and streams that have had no connection for a while, until cancelled."""
        time = asyncio.get_running_loop().time
        while True:
            due = [follower for follower in self._followers.values() if follower.is_due(time())]
            await asyncio.gather(*map(self._open, due))
            await asyncio.sleep(TICK_S)

    async def _open(self, follower: Follower) -> None:
        follower.open_at = asyncio.get_running_loop().time() + REOPEN_S
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
        """Let the residency index use what is known of an engine now."""
        replica = self._residency.replica(follower.source.target)
        if replica is None or self._followers.get(follower.source) is not follower:  # it was removed meanwhile
            return
        order, blocks = follower.order, follower.engine.blocks
        replica.on_response = follower.engine.on_response if order.is_followed else None
        replica.expires = order.state is not StreamState.FOLLOWING
        tokens = follower.engine.capacity_tokens
        if tokens is None:
            tokens = max(replica.capacity_tokens, blocks.blocks * blocks.block_tokens)
        if order.is_followed and tokens != replica.capacity_tokens:
            self._residency.add_replica(follower.source.target, tokens)

    # --- what is shown ---

    def rows(self, replica: ReplicaConfig) -> list[dict[str, Any]] | None:
        """The streams of a replica, one for each rank; None if it has none."""
        if replica.kv_events is None:
            return None
        rows = [_row(follower) for source, follower in self._followers.items() if source.replica == replica.name]
        return rows or [{"state": self._state_without_stream}]

    @property
    def _state_without_stream(self) -> str:
        return UNAVAILABLE if self._is_unavailable else UNUSED

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
                pairs = labels(pool=pool, replica=replica, rank=0, state=self._state_without_stream)
                yield f"{PREFIX}kv_events_state{{{pairs}}} 1"


_METRICS: Final = (
    ("state_timestamp_seconds", "gauge", "since_s", "Unix time since which a KV event stream has its state."),
    ("followed", "gauge", "is_followed", "Whether a replica's cached blocks are corrected by its KV events."),
    ("received_total", "counter", "events", "KV events applied."),
    ("gaps_total", "counter", "gaps", "Gaps in the numbers of KV event messages."),
    ("lost_total", "counter", "lost", "Gaps that could not be replayed."),
    ("malformed_total", "counter", "malformed", "KV event messages that could not be decoded."),
    ("restarts_total", "counter", "restarts", "Engine restarts seen in the numbers of messages."),
    ("blocks", "gauge", "blocks", "Known KV blocks that the engine has cached."),
    ("matched_total", "counter", "matched", "Responses whose blocks were found among the events."),
    ("lag_seconds", "gauge", "lag_s", "Time from the engine's latest applied message to its application."),
)


def _row(follower: Follower) -> dict[str, Any]:
    order, engine = follower.order, follower.engine
    return {
        "rank": follower.source.rank or 0,
        "state": order.state,
        "since_s": order.since_s,
        "is_followed": order.is_followed,
        "messages": order.messages,
        "events": order.events,
        "gaps": order.gaps,
        "lost": order.lost,
        "malformed": order.malformed,
        "restarts": order.restarts,
        "blocks": engine.blocks.blocks if order.is_followed else None,
        "capacity_tokens": engine.capacity_tokens,
        "matched": engine.matched,
        "lag_s": order.lag_s,
    }
