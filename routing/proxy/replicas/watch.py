"""Replicas that hang or crawl are found.

Theory of operation. A look at all, four times a second (``upkeep.py``), but only at replicas where requests are. It
reads what connections note anyway: the deadline of a stream moves with every byte, so it tells when the last one came.
So watching costs a request nothing. ``core/health`` says how long no byte is too long (``silence.py``) and when few
bytes are too few (``slowness.py``); then the breaker decides, and what waits at the replica goes elsewhere as far as
the retry rules allow. Requests that must stay are asked again with each tick, for the budget fills up; whether the
replica is well again is seen by those alone that were sent there to try it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from routing.core.health.breaker import Cause, State
from routing.core.health.silence import UNMEASURED_RATE, UsualSilence, prefill_allowance_s
from routing.core.health.slowness import Observation, Slowness, observation
from routing.core.types import ReplicaId
from routing.proxy.log import event
from routing.schema import ReplicaState

if TYPE_CHECKING:
    from routing.core.loads.book import Load
    from routing.proxy.replicas.link import ReplicaLink
    from routing.proxy.router import Router
    from routing.proxy.serving import Serving
    from routing.schema import PoolConfig

logger = logging.getLogger(__name__)

MOVED = {Cause.STALLED, Cause.SLOW}  # causes for which what waits goes elsewhere
BRIEF_S = 0.5  # silences shorter than this are not worth remembering


class Silence(NamedTuple):
    """What was seen of a replica at which a stream waits. Seconds, and loop time."""

    since: float
    lasted_s: float


class Watch:
    """One router's."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._usual: dict[str, UsualSilence] = {}  # by pool
        self._slowness: dict[str, Slowness] = {}  # by pool
        self._seen: dict[str, Silence] = {}  # by replica, while a stream waits there

    def look(self, serving: Serving, now: float) -> None:
        """Look at all, once; ``now`` is loop time."""
        pools = serving.config.pools
        self._usual = {pool.name: self._usual.get(pool.name) or UsualSilence() for pool in pools}
        self._slowness = {pool.name: self._slowness.get(pool.name) or Slowness() for pool in pools}
        self._seen = {name: seen for name, seen in self._seen.items() if name in serving.links}
        for pool in pools:
            if pool.breaker.stall_s is None:
                continue
            for replica in pool.replicas:
                if any(load.waiting for load in self._loads(replica.name)):
                    self._look_at(pool, serving.links[replica.name], pool.breaker.stall_s, now)
                else:
                    self._seen.pop(replica.name, None)
            self._compare(pool, serving.links, pool.breaker.stall_s, now)

    def _loads(self, replica: str) -> list[Load]:
        """Of a replica's ranks; one of most."""
        serving, loads = self._router.serving, self._router.loads
        return [loads.load(target) for target in serving.placement.targets_by_replica[replica]] if serving else []

    def _look_at(self, pool: PoolConfig, link: ReplicaLink, stall_s: float, now: float) -> None:
        """Judge one replica at which somebody waits."""
        name = ReplicaId(link.name)
        breaker = self._router.breakers.troubled.get(name)
        if breaker is not None and breaker.state is State.OPEN:
            self._seen.pop(name, None)
            if breaker.cause in MOVED:
                _move(link)
            return
        progress = link.progress_at
        self._learn(pool, link, progress, now)
        waiting = link.waiting(self._router.breakers.probed_since_s(name))
        oldest = next((it for it in waiting if it.waiting and it.waiting.is_stream()), None)
        if oldest is None or oldest.waiting is None:
            return
        since = max(progress, oldest.sent_at)
        self._seen[name] = Silence(since, now - since)
        rate = _rate(self._loads(name))
        if now - since > self._usual[pool.name].allowed_s(stall_s, oldest.waiting.waiting_tokens, rate, now):
            self._out(link, f"no byte for {now - since:.1f} s", Cause.STALLED)

    def _learn(self, pool: PoolConfig, link: ReplicaLink, progress: float, now: float) -> None:
        """Remember how long a silence was that has ended with a byte."""
        seen = self._seen.pop(link.name, None)
        if seen is not None and progress > seen.since and seen.lasted_s > BRIEF_S:
            self._usual[pool.name].ended(seen.lasted_s, now)

    def _compare(self, pool: PoolConfig, links: dict[str, ReplicaLink], stall_s: float, now: float) -> None:
        """Judge replicas beside each other."""
        weights = {ReplicaId(it.name): it.capacity for it in pool.replicas if it.state is ReplicaState.ACTIVE}
        if len(weights) < 2:
            return
        observations = {
            name: seen for name in weights if (seen := self._seen_of(name, links[name], stall_s, now)) is not None
        }
        slow = self._slowness[pool.name].judge(
            observations, stall_s, now, held=lambda name: links[name].held_tokens / weights[name]
        )
        for name, reason in slow:
            self._out(links[name], reason, Cause.SLOW)

    def _seen_of(self, name: ReplicaId, link: ReplicaLink, stall_s: float, now: float) -> Observation | None:
        """What a replica shows; None of one that is out or down."""
        router = self._router
        state = router.breakers.state(name)
        if state is State.OPEN or (state is State.CLOSED and not router.health.is_up(name)):
            return None
        loads, ended_s, is_probed = self._loads(name), now - link.last_end_at, state is State.HALF_OPEN
        since = router.breakers.probed_since_s(name)
        if not any(load.running for load in loads):
            return observation((), (), ended_s=ended_s, is_probed=is_probed)
        rate = _rate(loads)
        lates_s = [
            now - upstream.sent_at - prefill_allowance_s(listener.tokens_ahead, rate)
            for upstream in link.waiting(since)
            if now - upstream.sent_at > stall_s / 4 and (listener := upstream.waiting) and listener.is_stream()
        ]
        prefill_s = prefill_allowance_s(max(load.waiting_tokens for load in loads), rate)
        return observation(lates_s, link.silences(now, since), prefill_s, ended_s=ended_s, is_probed=is_probed)

    def _out(self, link: ReplicaLink, reason: str, cause: Cause) -> None:
        if self._router.breakers.stalled(ReplicaId(link.name), reason, cause):
            event(logger, "replica_out", level=logging.WARNING, replica=link.name, reason=reason)
            self._seen.pop(link.name, None)
            _move(link)


def _rate(loads: list[Load]) -> float:
    """Tokens/s that a replica prefills; of ranks the slowest."""
    return min((it.prefill.tokens_per_s for it in loads if it.prefill.is_measured), default=UNMEASURED_RATE)


def _move(link: ReplicaLink) -> None:
    """Let everybody go elsewhere who waits there and may."""
    for upstream in link.waiting():
        if upstream.waiting is not None:
            upstream.waiting.stalled()
