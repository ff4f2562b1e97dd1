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

from routing.core.types import BLOCK_BYTES, NoReplicaError, ReplicaId, TargetId
from routing.core.warming.cutting import cut_body
from routing.core.warming.openings import Cut, OpeningKey, Openings
from routing.proxy.log import defect, event
from routing.proxy.metrics.exposition import PREFIX, header, labels
from routing.proxy.serving import active_names
from routing.proxy.warming.tally import Ending, Tally
from routing.proxy.warming.warm_up import ReplicaWarmUp
from routing.schema import PoolConfig, ReplicaState

if TYPE_CHECKING:
    from routing.core.prompt.canonical import CanonicalPrompt
    from routing.placement.decision import Decision
    from routing.proxy.http.request import Request
    from routing.proxy.router import Router
    from routing.schema import RouterConfig

MAX_BODY_BYTES = 1 << 20  # of a request whose opening is cut out: reading it takes half a millisecond

logger = logging.getLogger(__name__)


class WarmUps:
    """One router's."""

    def __init__(self, router: Router) -> None:
        self.part, self.parts = 0, 1  # which of the openings are this process's to send
        self._router = router
        self._ids = count(1)
        self._secret = ""
        self._pools: dict[str, PoolConfig] = {}  # that warm up, by name
        self._openings: dict[str, Openings] = {}  # of those
        self._pool_of: dict[str, str] = {}  # their active replicas
        self._running: dict[str, ReplicaWarmUp] = {}  # by replica
        self._tally = Tally()

    # --- the configuration ---

    def configure(self, config: RouterConfig) -> bool:
        """Go by a configuration; whether any pool warms up. A pool that does not keeps nothing."""
        if config.hash_secret != self._secret:
            self._secret = config.hash_secret
            self._openings.clear()  # their keys and hashes are of another fleet
        self._pools = {pool.name: pool for pool in config.pools if pool.warm_up}
        self._openings = {name: self._openings_of(pool) for name, pool in self._pools.items()}
        active = ReplicaState.ACTIVE
        self._pool_of = {
            it.name: pool.name for pool in self._pools.values() for it in pool.replicas if it.state == active
        }
        takes_traffic = active_names(config)  # in pools that do not warm up, too
        for warm_up in list(self._running.values()):
            if self._pool_of.get(warm_up.replica) != warm_up.pool:
                self.end(warm_up, Ending.WITHDRAWN)
                if warm_up.replica in takes_traffic:
                    self._router.start_slowly(warm_up.replica)
        names = {replica.name for pool in config.pools for replica in pool.replicas}
        self._tally.forget_all_but(names)
        return bool(self._pools)

    def _openings_of(self, pool: PoolConfig) -> Openings:
        settings = pool.warm_up
        if settings is None:
            raise AssertionError(f"pool {pool.name} does not warm up")
        rules = settings.half_life_s, settings.memory_bytes // self.parts, settings.min_tokens
        known = self._openings.get(pool.name)
        if known is None:
            return Openings(*rules)
        known.configure(*rules)
        return known

    # --- what requests teach ---

    def met(self, decision: Decision, request: Request, prompt: CanonicalPrompt) -> None:
        """Count a request for its opening. What it takes to keep one is done behind it."""
        openings, prefix = self._openings.get(decision.pool), decision.keys.tier1
        if openings is None or prefix is None or prefix % self.parts != self.part:
            return
        opening = (decision.group, prefix)
        if openings.count(opening, request.arrived_at, decision.keys):
            path = request.head.path.decode()
            self._router.loop.call_soon(self._keep, decision, path, request.body, prompt)

    def _keep(self, decision: Decision, path: str, body: bytes, prompt: CanonicalPrompt) -> None:
        """Keep the opening of a request, if it is one that can be told."""
        try:
            openings, prefix = self._openings.get(decision.pool), decision.keys.tier1
            end = decision.keys.tier1_bytes
            cut = cut_body(path, body, prompt, end) if len(body) <= MAX_BODY_BYTES else None
            if openings is not None and prefix is not None and cut is not None:
                blocks = array("Q", decision.keys.chain[: end // BLOCK_BYTES])
                kept = Cut(path, cut, decision.keys.ratio.tokens(end), blocks, decision.served.adapter)
                openings.keep((decision.group, prefix), kept)
        except Exception as error:  # noqa: BLE001 - the loop would log it with what it was called with
            defect(logger, error, "opening")

    # --- replicas that join ---

    def begin(self, replica: ReplicaId) -> bool:
        """Warm a replica up that joins; False where it is to take traffic at once."""
        if (before := self._running.get(replica)) is not None:
            self.end(before, Ending.WITHDRAWN)
        pool = self._pools.get(self._pool_of.get(replica, ""))
        if pool is None or pool.warm_up is None or not self._openings[pool.name].bytes or self._router.is_draining:
            return False
        health = self._router.health
        others = (ReplicaId(name) for name, of in self._pool_of.items() if of == pool.name and name != replica)
        if not any(map(health.is_up, others)):
            return False
        health.keep_back(replica, back=True)
        warm_up = self._running[replica] = ReplicaWarmUp(self, self._router, pool.name, replica, pool.warm_up)
        event(logger, "warm_up_begun", replica=replica)
        warm_up.look(self._router.loop.time())
        return True

    def chosen(self, warm_up: ReplicaWarmUp) -> Iterator[tuple[Cut, TargetId]]:
        """What a replica is to be sent, and which of its targets."""
        pool, serving = self._pools[warm_up.pool], self._router.serving
        if serving is None or pool.warm_up is None:
            return iter(())

        def homes(opening: OpeningKey, cut: Cut) -> list[TargetId]:
            health = self._router.health
            return serving.placement.homes(pool.name, opening, warm_up.replica, cut.adapter, health)

        share = self.parts
        limits = -(-pool.warm_up.max_prefixes // share), pool.warm_up.max_tokens // share
        return self._openings[pool.name].chosen(homes, *limits)

    def sent(self, warm_up: ReplicaWarmUp, cut: Cut, target: TargetId, *, ok: bool) -> None:
        """One opening has been sent."""
        self._tally.sent(warm_up.pool, warm_up.replica, cut.tokens, ok=ok)
        if ok and self._router.serving is not None:
            self._router.serving.placement.warmed(warm_up.pool, target, cut)

    def tick(self, now: float) -> None:
        """Look at all that are under way."""
        for warm_up in list(self._running.values()):
            warm_up.look(now)

    def cut_short(self, missing: NoReplicaError) -> bool:
        """Let those take traffic, though they are not warm, that can serve what nobody else can; False without any."""
        needed = [warm_up for warm_up in self._running.values() if self._could_serve(missing, warm_up)]
        for warm_up in needed:
            self.end(warm_up, Ending.NEEDED)
        return bool(needed)

    def _could_serve(self, missing: NoReplicaError, warm_up: ReplicaWarmUp) -> bool:
        serving = self._router.serving
        if serving is None or warm_up.pool != missing.pool:
            return False
        return serving.placement.could_serve(missing, warm_up.replica, self._router.health)

    def end(self, warm_up: ReplicaWarmUp, ending: Ending) -> None:
        """Let a replica take traffic, slowly at first; one that is withdrawn takes none as a rule."""
        if self._running.get(warm_up.replica) is not warm_up:
            return
        del self._running[warm_up.replica]
        warm_up.abandon()
        self._tally.ended(warm_up.pool, warm_up.replica, ending)
        self._router.health.keep_back(warm_up.replica, back=False)
        event(
            logger, "warm_up_ended", replica=warm_up.replica, ending=ending, **msgspec.structs.asdict(warm_up.progress)
        )
        if ending is not Ending.WITHDRAWN:
            self._router.start_slowly(warm_up.replica)

    def close(self) -> None:
        """Send nothing more."""
        for warm_up in self._running.values():
            warm_up.abandon()
        self._running.clear()

    def new_id(self) -> str:
        """A request id."""
        return f"warm-up-{self._router.boot}-{next(self._ids):x}"

    # --- what is shown ---

    def progress(self, replica: str) -> dict[str, int] | None:
        """How far a replica is; None of one that does not warm up."""
        warm_up = self._running.get(replica)
        return None if warm_up is None else msgspec.structs.asdict(warm_up.progress)

    def under_way(self) -> dict[str, dict[str, int]]:
        """How far each replica is that warms up, by name."""
        return {name: msgspec.structs.asdict(warm_up.progress) for name, warm_up in self._running.items()}

    def lines(self) -> Iterator[str]:
        """Figures, where any pool warms up."""
        if not self._pools:
            return
        yield from header("warm_up_kept_bytes", "gauge", "Openings kept for replicas that join.")
        for pool, openings in list(self._openings.items()):
            yield f"{PREFIX}warm_up_kept_bytes{{{labels(pool=pool)}}} {openings.bytes}"
        yield from header("replica_warming", "gauge", "Whether a replica is kept back to warm up.")
        for replica, pool in list(self._pool_of.items()):
            where = labels(pool=pool, replica=replica)
            yield f"{PREFIX}replica_warming{{{where}}} {int(replica in self._running)}"
        yield from self._tally.lines()
