"""Warm-ups of all replicas: what is kept for them, which are under way, and what they came to.

Where no pool warms up there is none of it, and a request asks one attribute. Several workers each take their part of
the openings, of the budget and of the memory.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from routing.balancing.warm_up_prefixes import PopularPrefixes, PrefixKey, WarmUpPrompt, extract_prefix
from routing.health.balancer import active_replicas
from routing.health.warm_up import Ending, ReplicaWarmUp, Tally
from routing.log import defect, event
from routing.observability.exposition import PREFIX, header, labels
from routing.schema import PoolConfig, ReplicaState
from routing.types import BLOCK_BYTES, NoReplicaError, ReplicaId, TargetId

if TYPE_CHECKING:
    from routing.balancing.decision import Decision
    from routing.health.balancer import Balancer
    from routing.health.checks import HealthChecks
    from routing.http.request import Request
    from routing.prompt.canonical import CanonicalPrompt
    from routing.schema import RouterConfig


MAX_BODY_BYTES = 1 << 20  # of a request whose opening is cut out: reading it takes half a millisecond

logger = logging.getLogger(__name__)


class WarmUps:
    """One router's."""

    def __init__(self, balancer: Balancer, checks: HealthChecks, boot: str) -> None:
        self.part, self.parts = 0, 1  # which of the openings are this process's to send
        self.is_draining = False  # no replica is warmed up any more
        self._balancer = balancer
        self._checks = checks
        self._boot = boot
        self._ids = count(1)
        self._secret = ""
        self._pools: dict[str, PoolConfig] = {}  # that warm up, by name
        self._popular_prefixes: dict[str, PopularPrefixes] = {}  # of those
        self._pool_of: dict[str, str] = {}  # their active replicas
        self._running: dict[str, ReplicaWarmUp] = {}  # by replica
        self._tally = Tally()

    # --- the configuration ---

    def configure(self, config: RouterConfig) -> bool:
        """Go by a configuration; whether any pool warms up. A pool that does not keeps nothing."""
        if config.hash_secret != self._secret:
            self._secret = config.hash_secret
            self._popular_prefixes.clear()  # their keys and hashes are of another fleet
        self._pools = {pool.name: pool for pool in config.pools if pool.warm_up}
        self._popular_prefixes = {name: self._openings_of(pool) for name, pool in self._pools.items()}
        active = ReplicaState.ACTIVE
        self._pool_of = {
            it.name: pool.name for pool in self._pools.values() for it in pool.replicas if it.state == active
        }
        takes_traffic = active_replicas(config)  # in pools that do not warm up, too
        for warm_up in list(self._running.values()):
            if self._pool_of.get(warm_up.replica) != warm_up.pool:
                self.end(warm_up, Ending.WITHDRAWN)
                if warm_up.replica in takes_traffic:
                    self._balancer.begin_slow_start(warm_up.replica)
        names = {replica.name for pool in config.pools for replica in pool.replicas}
        self._tally.forget_all_but(names)
        return bool(self._pools)

    def _openings_of(self, pool: PoolConfig) -> PopularPrefixes:
        settings = pool.warm_up
        if settings is None:
            raise AssertionError(f"pool {pool.name} does not warm up")
        rules = settings.half_life_s, settings.memory_bytes // self.parts, settings.min_tokens
        known = self._popular_prefixes.get(pool.name)
        if known is None:
            return PopularPrefixes(*rules)
        known.configure(*rules)
        return known

    # --- what requests teach ---

    def record_request(self, decision: Decision, request: Request, prompt: CanonicalPrompt) -> None:
        """Count a request for its opening. What it takes to keep one is done behind it."""
        popular_prefixes, prefix = self._popular_prefixes.get(decision.pool), decision.keys.tier1
        if popular_prefixes is None or prefix is None or prefix % self.parts != self.part:
            return
        prefix_key = (decision.group, prefix)
        if popular_prefixes.count(prefix_key, request.arrived_at, decision.keys):
            path = request.head.path.decode()
            self._balancer.loop.call_soon(self._keep, decision, path, request.body, prompt)

    def _keep(self, decision: Decision, path: str, body: bytes, prompt: CanonicalPrompt) -> None:
        """Keep the opening of a request, if it is one that can be told."""
        try:
            popular_prefixes, prefix = self._popular_prefixes.get(decision.pool), decision.keys.tier1
            end = decision.keys.tier1_bytes
            cut = extract_prefix(path, body, prompt, end) if len(body) <= MAX_BODY_BYTES else None
            if popular_prefixes is not None and prefix is not None and cut is not None:
                blocks = array("Q", decision.keys.chain[: end // BLOCK_BYTES])
                kept = WarmUpPrompt(path, cut, decision.keys.ratio.tokens(end), blocks, decision.served.adapter)
                popular_prefixes.store((decision.group, prefix), kept)
        except Exception as error:  # noqa: BLE001 - the loop would log it with what it was called with
            defect(logger, error, "warm_up_prefix")

    # --- replicas that join ---

    def begin(self, replica: ReplicaId) -> bool:
        """Warm a replica up that joins; False where it is to take traffic at once."""
        if (before := self._running.get(replica)) is not None:
            self.end(before, Ending.WITHDRAWN)
        pool = self._pools.get(self._pool_of.get(replica, ""))
        if pool is None or pool.warm_up is None or not self._popular_prefixes[pool.name].bytes or self.is_draining:
            return False
        health = self._balancer.health
        others = (ReplicaId(name) for name, of in self._pool_of.items() if of == pool.name and name != replica)
        if not any(map(health.is_up, others)):
            return False
        health.set_warming(replica, is_warming=True)
        warm_up = self._running[replica] = ReplicaWarmUp(
            self, self._balancer, self._checks, pool.name, replica, pool.warm_up
        )
        event(logger, "warm_up_begun", replica=replica)
        warm_up.look(self._balancer.loop.time())
        return True

    def chosen(self, warm_up: ReplicaWarmUp) -> Iterator[tuple[WarmUpPrompt, TargetId]]:
        """What a replica is to be sent, and which of its targets."""
        pool, fleet = self._pools[warm_up.pool], self._balancer.fleet
        if fleet is None or pool.warm_up is None:
            return iter(())

        def preferred_replicas(prefix_key: PrefixKey, cut: WarmUpPrompt) -> list[TargetId]:
            health = self._balancer.health
            return fleet.placement.preferred_replicas(pool.name, prefix_key, warm_up.replica, cut.adapter, health)

        share = self.parts
        limits = -(-pool.warm_up.max_prefixes // share), pool.warm_up.max_tokens // share
        return self._popular_prefixes[pool.name].select(preferred_replicas, *limits)

    def sent(self, warm_up: ReplicaWarmUp, cut: WarmUpPrompt, target: TargetId, *, ok: bool) -> None:
        """One opening has been sent."""
        self._tally.sent(warm_up.pool, warm_up.replica, cut.tokens, ok=ok)
        if ok and self._balancer.fleet is not None:
            self._balancer.fleet.placement.record_warm_up(warm_up.pool, target, cut)

    def tick(self, now: float) -> None:
        """Look at all that are under way."""
        for warm_up in list(self._running.values()):
            warm_up.look(now)

    def end_needed(self, missing: NoReplicaError) -> bool:
        """Let those take traffic, though they are not warm, that can serve what nobody else can; False without any."""
        needed = [warm_up for warm_up in self._running.values() if self._could_serve(missing, warm_up)]
        for warm_up in needed:
            self.end(warm_up, Ending.NEEDED)
        return bool(needed)

    def _could_serve(self, missing: NoReplicaError, warm_up: ReplicaWarmUp) -> bool:
        fleet = self._balancer.fleet
        if fleet is None or warm_up.pool != missing.pool:
            return False
        return fleet.placement.could_serve(missing, warm_up.replica, self._balancer.health)

    def end(self, warm_up: ReplicaWarmUp, ending: Ending) -> None:
        """Let a replica take traffic, slowly at first; one that is withdrawn takes none as a rule."""
        if self._running.get(warm_up.replica) is not warm_up:
            return
        del self._running[warm_up.replica]
        warm_up.abandon()
        self._tally.ended(warm_up.pool, warm_up.replica, ending)
        self._balancer.health.set_warming(warm_up.replica, is_warming=False)
        event(
            logger, "warm_up_ended", replica=warm_up.replica, ending=ending, **msgspec.structs.asdict(warm_up.progress)
        )
        if ending is not Ending.WITHDRAWN:
            self._balancer.begin_slow_start(warm_up.replica)

    def close(self) -> None:
        """Send nothing more."""
        for warm_up in self._running.values():
            warm_up.abandon()
        self._running.clear()

    def new_id(self) -> str:
        """A request id."""
        return f"warm-up-{self._boot}-{next(self._ids):x}"

    # --- what is shown ---

    def progress(self, replica: str) -> dict[str, int] | None:
        """How far a replica is; None of one that does not warm up."""
        warm_up = self._running.get(replica)
        return None if warm_up is None else msgspec.structs.asdict(warm_up.progress)

    def progress_by_replica(self) -> dict[str, dict[str, int]]:
        """How far each replica is that warms up, by name."""
        return {name: msgspec.structs.asdict(warm_up.progress) for name, warm_up in self._running.items()}

    def lines(self) -> Iterator[str]:
        """Figures, where any pool warms up."""
        if not self._pools:
            return
        yield from header("warm_up_kept_bytes", "gauge", "Openings kept for replicas that join.")
        for pool, popular_prefixes in list(self._popular_prefixes.items()):
            yield f"{PREFIX}warm_up_kept_bytes{{{labels(pool=pool)}}} {popular_prefixes.bytes}"
        yield from header("replica_warming", "gauge", "Whether a replica is kept back to warm up.")
        for replica, pool in list(self._pool_of.items()):
            where = labels(pool=pool, replica=replica)
            yield f"{PREFIX}replica_warming{{{where}}} {int(replica in self._running)}"
        yield from self._tally.lines()
