"""Warm-ups of joining replicas: counts prefixes, sends them, and exposes metrics.

If no pool has ``warm_up``, a request costs one attribute access here. With several workers each sends its part of the
prefixes, with its part of the token budget, the concurrency and the memory.

Theory of operation. A joining replica gets no clients' requests. Once its health check passes, it is sent the
prefixes that it will own, the most valuable first, a few at a time; when all have ended, successfully or not, it takes
traffic with a slow start. The time limit, ``MAX_FAILURES`` failed requests in a row, or a client's request that no
other replica can serve end the warm-up early. If the replica goes down meanwhile, its warm-up starts again when it is
up again. Nothing here waits: the router's housekeeping and the ends of its own requests advance a warm-up.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict

from routing.balancing.replicas import rank_of
from routing.balancing.warm_up_prefixes import PopularPrefixes, PrefixKey, WarmUpPrompt, extract_prefix
from routing.engines import rejects_priorities
from routing.health.checks import active_replicas
from routing.http.request import Request, RequestHead
from routing.http.usage import ResponseTail
from routing.log import defect, event
from routing.observability.metrics import PREFIX, header, labels
from routing.prompt.parsing import with_member
from routing.schema import PoolConfig, ReplicaState
from routing.types import BLOCK_BYTES, NoReplicaError, ReplicaId, TargetId
from routing.upstream.connection import OwnCall

MAX_FAILURES = 3  # requests that fail in a row, after which no more are sent
BAD_REQUEST = 400

if TYPE_CHECKING:
    from routing.balancing.placement import Decision
    from routing.health.checks import Balancer, HealthChecks
    from routing.health.engine_probe import OwnRequests
    from routing.http.request import Request
    from routing.http.response_json import Usage
    from routing.prompt.canonical import CanonicalPrompt
    from routing.schema import RouterConfig
    from routing.schema import WarmUp as WarmUpSettings


class Ending(StrEnum):
    """Why a warm-up ended."""

    COMPLETE = "complete"  # everything was sent
    TIME_LIMIT = "time_limit"
    FAILING = "failing"  # ``MAX_FAILURES`` of its requests failed in a row
    NEEDED = "needed"  # no other replica could serve a request
    WITHDRAWN = "withdrawn"  # the replica went down, left, or is no longer to take traffic or to warm up


class Progress(Struct):
    """Progress of a warm-up. Tokens are estimated."""

    prefixes_done: int = 0
    prefixes: int = 0
    tokens_done: int = 0
    tokens: int = 0


class ReplicaWarmUp:
    """The warm-up of one replica."""

    def __init__(
        self,
        warm_ups: WarmUps,
        balancer: Balancer,
        checks: HealthChecks,
        pool: str,
        replica: ReplicaId,
        settings: WarmUpSettings,
    ) -> None:
        self.pool = pool
        self.replica = replica
        self.progress = Progress()
        self._warm_ups = warm_ups
        self._balancer = balancer
        self._checks = checks
        self._settings = settings
        self._deadline = balancer.loop.time() + settings.time_limit_s
        self._priority = settings.priority
        self._pending: deque[tuple[WarmUpPrompt, TargetId]] | None = None  # None: the replica is not up yet
        self._calls: dict[OwnCall, tuple[WarmUpPrompt, TargetId, bool]] = {}  # whether it names a priority
        self._failures = 0  # in a row

    def advance(self, now: float) -> None:
        """Start once the replica is up; end if it went down or the time limit is over."""
        is_up = self._checks.status(self.replica).is_up
        if is_up is False:
            self._warm_ups.end(self, Ending.WITHDRAWN)
        elif now >= self._deadline:
            self._warm_ups.end(self, Ending.TIME_LIMIT)
        elif is_up and self._pending is None:
            self._pending = deque(self._warm_ups.prompts_for(self))
            self.progress.prefixes = len(self._pending)
            self.progress.tokens = sum(prompt.tokens for prompt, _ in self._pending)
            self._send_more()

    def _on_call_ended(self, call: OwnCall) -> None:
        """Account for a request, and send the next ones."""
        prompt, target, has_priority = self._calls.pop(call)
        if has_priority and call.status == BAD_REQUEST and rejects_priorities(call.body) and self._pending is not None:
            self._priority = None
            self._pending.appendleft((prompt, target))
            self._send_more()
            return
        ok = not call.failure and call.status < BAD_REQUEST
        self.progress.prefixes_done += 1
        self.progress.tokens_done += prompt.tokens
        self._failures = 0 if ok else self._failures + 1
        self._warm_ups.on_sent(self, prompt, target, _usage(call) if ok else None, ok=ok)
        if self._failures >= MAX_FAILURES:
            self._warm_ups.end(self, Ending.FAILING)
        else:
            self._send_more()

    def abort(self) -> None:
        """Stop sending, and abort the requests in flight."""
        self._pending = deque()
        for call in list(self._calls):
            call.abort()
        self._calls.clear()

    def _send_more(self) -> None:
        fleet, pending = self._balancer.fleet, self._pending
        concurrency = math.ceil(self._settings.concurrency / self._warm_ups.parts)
        while fleet is not None and pending and len(self._calls) < concurrency:
            prompt, target = pending.popleft()
            body = prompt.body if self._priority is None else with_member(prompt.body, "priority", self._priority)
            head = RequestHead(b"POST", prompt.path.encode(), http11=True)
            head.lines = b"Content-Type: application/json\r\n"
            request = Request(head, body, self._warm_ups.new_request_id())
            call = OwnCall(
                fleet.config.limits,
                request,
                rank_of(target),
                self._on_call_ended,
                tokens=prompt.tokens,
                queued_tokens=prompt.tokens,  # without those queued before: it waits as long as it takes
            )
            self._calls[call] = prompt, target, self._priority is not None
            call.open(fleet.connection_pools[self.replica])
        if not self._calls and not pending:
            self._warm_ups.end(self, Ending.COMPLETE)


def _usage(call: OwnCall) -> Usage | None:
    """What the response reports."""
    tail = ResponseTail()
    tail.add(call.body)
    return tail.usage()


MAX_BODY_BYTES = 1 << 20  # of a request whose prefix is extracted, which takes half a millisecond
_COUNTERS = (
    ("warm_ups_total", "ending", "Warm-ups that ended, by reason."),
    ("warm_up_prefixes_total", "outcome", "Prefixes sent to joining replicas."),
    ("warm_up_tokens_total", "outcome", "Estimated tokens of the prefixes sent to joining replicas."),
)

logger = logging.getLogger(__name__)


class WarmUps:
    """The warm-ups of one router."""

    def __init__(self, balancer: Balancer, checks: HealthChecks, own_requests: OwnRequests, boot: str) -> None:
        self.part, self.parts = 0, 1  # this process sends part ``part`` of ``parts`` of the prefixes
        self.is_draining = False  # no warm-up starts any more
        self._balancer = balancer
        self._checks = checks
        self._own_requests = own_requests
        self._boot = boot
        self._request_ids = count(1)
        self._secret = ""
        self._pools: dict[str, PoolConfig] = {}  # with ``warm_up``, by name
        self._popular_prefixes: dict[str, PopularPrefixes] = {}  # by pool
        self._pool_by_replica: dict[str, str] = {}  # pool of each active replica
        self._running: dict[str, ReplicaWarmUp] = {}  # by replica
        self._counts: dict[str, Counter[tuple[str, str, str]]] = {  # by metric; pool, replica, label value
            name: Counter() for name, _, _ in _COUNTERS
        }

    def configure(self, config: RouterConfig) -> bool:
        """Apply a configuration; whether any pool has ``warm_up``. Prefixes of other pools are dropped."""
        if config.hash_secret != self._secret:
            self._secret = config.hash_secret
            self._popular_prefixes.clear()  # their keys and hashes belong to the old secret
        self._pools = {pool.name: pool for pool in config.pools if pool.warm_up}
        self._popular_prefixes = {name: self._configured_prefixes(pool) for name, pool in self._pools.items()}
        active = ReplicaState.ACTIVE
        self._pool_by_replica = {
            replica.name: pool.name
            for pool in self._pools.values()
            for replica in pool.replicas
            if replica.state == active
        }
        takes_traffic = active_replicas(config)  # pools without ``warm_up`` included
        for warm_up in list(self._running.values()):
            if self._pool_by_replica.get(warm_up.replica) != warm_up.pool:
                self.end(warm_up, Ending.WITHDRAWN)
                if warm_up.replica in takes_traffic:
                    self._balancer.begin_slow_start(warm_up.replica)
        names = {replica.name for pool in config.pools for replica in pool.replicas}
        for counts in self._counts.values():
            for key in [key for key in counts if key[1] not in names]:
                del counts[key]
        own = self._own_requests
        own.counts = {name: counts for name, counts in own.counts.items() if name in names}
        return bool(self._pools)

    def _configured_prefixes(self, pool: PoolConfig) -> PopularPrefixes:
        settings = pool.warm_up
        if settings is None:
            raise AssertionError(f"pool {pool.name} has no warm-up")
        values = settings.half_life_s, settings.memory_bytes // self.parts, settings.min_tokens
        prefixes = self._popular_prefixes.get(pool.name)
        if prefixes is None:
            return PopularPrefixes(*values)
        prefixes.configure(*values)
        return prefixes

    # --- prefixes of requests ---

    def record_request(self, decision: Decision, request: Request, prompt: CanonicalPrompt) -> None:
        """Count a request's tier-1 prefix. A prefix to store is extracted after the request was sent."""
        prefixes, tier1 = self._popular_prefixes.get(decision.pool), decision.keys.tier1
        if prefixes is None or tier1 is None or tier1 % self.parts != self.part:
            return
        if prefixes.count((decision.group, tier1), request.arrived_at, decision.keys):
            path = request.head.path.decode()
            self._balancer.loop.call_soon(self._store, decision, path, request.body, prompt)

    def _store(self, decision: Decision, path: str, body: bytes, prompt: CanonicalPrompt) -> None:
        """Store the prefix of a request, if it can be extracted."""
        try:
            prefixes, tier1 = self._popular_prefixes.get(decision.pool), decision.keys.tier1
            end = decision.keys.tier1_bytes
            prefix = extract_prefix(path, body, prompt, end) if len(body) <= MAX_BODY_BYTES else None
            if prefixes is not None and tier1 is not None and prefix is not None:
                blocks = array("Q", decision.keys.chain[: end // BLOCK_BYTES])
                tokens = decision.keys.ratio.tokens(end)
                prefixes.store(
                    (decision.group, tier1), WarmUpPrompt(path, prefix, tokens, blocks, decision.served.adapter)
                )
        except Exception as error:  # noqa: BLE001 - the loop would log the arguments, which hold a prompt
            defect(logger, error, "warm_up_prefix")

    # --- joining replicas ---

    def start(self, replica: ReplicaId) -> bool:
        """Warm up a joining replica; False if it is to take traffic at once."""
        if (previous := self._running.get(replica)) is not None:
            self.end(previous, Ending.WITHDRAWN)
        pool = self._pools.get(self._pool_by_replica.get(replica, ""))
        if pool is None or pool.warm_up is None or not self._popular_prefixes[pool.name].bytes or self.is_draining:
            return False
        health = self._balancer.health
        others = (
            ReplicaId(name)
            for name, pool_name in self._pool_by_replica.items()
            if pool_name == pool.name and name != replica
        )
        if not any(map(health.is_up, others)):
            return False
        health.set_warming(replica, is_warming=True)
        warm_up = ReplicaWarmUp(self, self._balancer, self._checks, pool.name, replica, pool.warm_up)
        self._running[replica] = warm_up
        event(logger, "warm_up_started", replica=replica)
        warm_up.advance(self._balancer.loop.time())
        return True

    def prompts_for(self, warm_up: ReplicaWarmUp) -> Iterator[tuple[WarmUpPrompt, TargetId]]:
        """The prompts to send to a replica, and which of its targets they go to."""
        pool, fleet = self._pools[warm_up.pool], self._balancer.fleet
        if fleet is None or pool.warm_up is None:
            return iter(())

        def preferred_replicas(prefix_key: PrefixKey, prompt: WarmUpPrompt) -> list[TargetId]:
            health = self._balancer.health
            return fleet.placement.preferred_replicas(pool.name, prefix_key, warm_up.replica, prompt.adapter, health)

        limits = -(-pool.warm_up.max_prefixes // self.parts), pool.warm_up.max_tokens // self.parts
        return self._popular_prefixes[pool.name].select(preferred_replicas, *limits)

    def on_sent(
        self, warm_up: ReplicaWarmUp, prompt: WarmUpPrompt, target: TargetId, usage: Usage | None, *, ok: bool
    ) -> None:
        """Account for one prefix. ``usage``: what the response reports."""
        if ok:
            self._own_requests.add(warm_up.replica, usage)
        key = (warm_up.pool, warm_up.replica, "ok" if ok else "failed")
        self._counts["warm_up_prefixes_total"][key] += 1
        self._counts["warm_up_tokens_total"][key] += prompt.tokens
        if ok and self._balancer.fleet is not None:
            self._balancer.fleet.placement.record_warm_up(warm_up.pool, target, prompt)

    def tick(self, now: float) -> None:
        """Advance all warm-ups."""
        for warm_up in list(self._running.values()):
            warm_up.advance(now)

    def end_early(self, error: NoReplicaError) -> bool:
        """End the warm-ups of replicas that could serve a request that no other can; False if there are none."""
        fleet = self._balancer.fleet
        needed = [
            warm_up
            for warm_up in self._running.values()
            if warm_up.pool == error.pool
            and fleet is not None
            and fleet.placement.could_serve(error, warm_up.replica, self._balancer.health)
        ]
        for warm_up in needed:
            self.end(warm_up, Ending.NEEDED)
        return bool(needed)

    def end(self, warm_up: ReplicaWarmUp, ending: Ending) -> None:
        """Let a replica take traffic with a slow start, unless its warm-up was withdrawn."""
        if self._running.get(warm_up.replica) is not warm_up:
            return
        del self._running[warm_up.replica]
        warm_up.abort()
        self._counts["warm_ups_total"][warm_up.pool, warm_up.replica, ending] += 1
        self._balancer.health.set_warming(warm_up.replica, is_warming=False)
        event(logger, "warm_up_ended", replica=warm_up.replica, ending=ending, **asdict(warm_up.progress))
        if ending is not Ending.WITHDRAWN:
            self._balancer.begin_slow_start(warm_up.replica)

    def close(self) -> None:
        """Abort all warm-ups."""
        for warm_up in self._running.values():
            warm_up.abort()
        self._running.clear()

    def new_request_id(self) -> str:
        """A unique request id."""
        return f"warm-up-{self._boot}-{next(self._request_ids):x}"

    # --- state and metrics ---

    def progress_by_replica(self) -> dict[str, dict[str, int]]:
        """The progress of each replica that warms up, by name."""
        return {name: asdict(warm_up.progress) for name, warm_up in self._running.items()}

    def lines(self) -> Iterator[str]:
        """Prometheus text; nothing if no pool has ``warm_up``."""
        if not self._pools:
            return
        yield from header("warm_up_kept_bytes", "gauge", "Memory that the stored warm-up prefixes take.")
        for pool, prefixes in list(self._popular_prefixes.items()):
            yield f"{PREFIX}warm_up_kept_bytes{{{labels(pool=pool)}}} {prefixes.bytes}"
        yield from header("replica_warming", "gauge", "1 while a replica warms up and gets no requests.")
        for replica, pool in list(self._pool_by_replica.items()):
            pairs = labels(pool=pool, replica=replica)
            yield f"{PREFIX}replica_warming{{{pairs}}} {int(replica in self._running)}"
        for name, label, text in _COUNTERS:
            yield from header(name, "counter", text)
            for (pool, replica, value), number in list(self._counts[name].items()):
                yield f"{PREFIX}{name}{{{labels(pool=pool, replica=replica, **{label: value})}}} {number}"
