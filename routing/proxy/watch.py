"""What happens by the clock: replicas that hang are found, those that are out are tried, shares grow, lines move.

Theory of operation. One timer for all, four times a second. It looks only at replicas where requests wait for a first
byte, and reads what connections note anyway: the deadline of a stream moves with every byte, so it tells when the last
one came. So watching costs a request nothing. ``core/silence.py`` says how long is too long; then the breaker decides,
and what waits at the replica goes elsewhere as far as the retry rules allow. Requests that must stay are asked again
with each tick, for the budget fills up.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from routing.core.breaker import Cause, State
from routing.core.silence import UNMEASURED_RATE, UsualSilence
from routing.core.types import ReplicaId
from routing.proxy.log import defect, event

if TYPE_CHECKING:
    from routing.proxy.replica_link import ReplicaLink
    from routing.proxy.router import Router, Serving
    from routing.schema import PoolConfig

logger = logging.getLogger(__name__)

TICK_S = 0.25
BRIEF_S = 0.5  # silences shorter than this are not worth remembering


class Silence(NamedTuple):
    """What was seen of a replica at which a stream waits. Seconds, and loop time."""

    since: float
    lasted_s: float


class Watch:
    """One router's."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._timer: asyncio.TimerHandle | None = None
        self._usual: dict[str, UsualSilence] = {}  # by pool
        self._seen: dict[str, Silence] = {}  # by replica, while a stream waits there

    def start(self) -> None:
        """Begin, if that has not happened yet."""
        if self._timer is None:
            self._tick()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        router = self._router
        self._timer = router.loop.call_later(TICK_S, self._tick)
        now = router.loop.time()
        try:
            router.retry_budget.tick(now, router.requests)
            router.breakers.advance()
            router.slow_starts.advance(now)
            if router.gates is not None:
                router.gates.expire()
            if router.serving is not None:
                self._look_at_all(router.serving, now)
        except Exception as error:  # noqa: BLE001 - the next tick must come
            defect(logger, error, "watch")

    def _look_at_all(self, serving: Serving, now: float) -> None:
        pools = serving.config.pools
        self._usual = {pool.name: self._usual.get(pool.name) or UsualSilence() for pool in pools}
        self._seen = {name: seen for name, seen in self._seen.items() if name in serving.links}
        for pool in pools:
            if pool.breaker.stall_s is None:
                continue
            for replica in pool.replicas:
                if self._router.loads.load(ReplicaId(replica.name)).waiting:
                    self._look_at(pool, serving.links[replica.name], pool.breaker.stall_s, now)
                else:
                    self._seen.pop(replica.name, None)

    def _look_at(self, pool: PoolConfig, link: ReplicaLink, stall_s: float, now: float) -> None:
        """Judge one replica at which somebody waits."""
        name = ReplicaId(link.name)
        breaker = self._router.breakers.troubled.get(name)
        if breaker is not None and breaker.state is State.OPEN:
            self._seen.pop(name, None)
            if breaker.cause is Cause.STALLED:
                _move(link)
            return
        progress = link.progress_at
        self._learn(pool, link, progress, now)
        oldest = next((it for it in link.waiting() if it.waiting and it.waiting.is_stream()), None)
        if oldest is None or oldest.waiting is None:
            return
        since = max(progress, oldest.sent_at)
        self._seen[name] = Silence(since, now - since)
        prefill = self._router.loads.load(name).prefill
        rate = prefill.tokens_per_s if prefill.is_measured else UNMEASURED_RATE
        allowed_s = self._usual[pool.name].allowed_s(stall_s, oldest.waiting.waiting_tokens, rate, now)
        if now - since > allowed_s:
            self._stalled(link, now - since)

    def _learn(self, pool: PoolConfig, link: ReplicaLink, progress: float, now: float) -> None:
        """Remember how long a silence was that has ended with a byte."""
        seen = self._seen.pop(link.name, None)
        if seen is not None and progress > seen.since and seen.lasted_s > BRIEF_S:
            self._usual[pool.name].ended(seen.lasted_s, now)

    def _stalled(self, link: ReplicaLink, silence_s: float) -> None:
        reason = f"no byte for {silence_s:.1f} s"
        if self._router.breakers.stalled(ReplicaId(link.name), reason):
            event(logger, "replica_out", level=logging.WARNING, replica=link.name, reason=reason)
            self._seen.pop(link.name, None)
            _move(link)


def _move(link: ReplicaLink) -> None:
    """Let everybody go elsewhere who waits there and may."""
    for upstream in link.waiting():
        if upstream.waiting is not None:
            upstream.waiting.stalled()
