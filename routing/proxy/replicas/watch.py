"""Replicas that hang or crawl are found.

Theory of operation. A look at all, four times a second (``upkeep.py``), but only at replicas where requests are. It
reads what connections note anyway: the deadline of a stream moves with every byte, so it tells when the last one came.
So watching costs a request nothing. A response that is not streamed has no byte until it is whole: where one waits and
nothing else comes, ``engine_check.py`` finds out whether the engine makes progress by itself. ``core/health`` says how
long no progress is too long (``silence.py``) and when few bytes are too few (``slowness.py``); then the breaker
decides, and what waits at the replica goes elsewhere as far as the retry rules allow. Requests that must stay are asked
again with each tick, for the budget fills up; whether the replica is well again is seen by those alone that were sent
there to try it. A response that does not come in time counts against its replica only where the engine shows no
progress either.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from routing.core.health.breaker import Cause, State
from routing.core.health.silence import UNMEASURED_RATE, UsualSilence, prefill_allowance_s
from routing.core.health.slowness import Observation, Slowness, observation
from routing.core.types import ReplicaId
from routing.proxy.log import event
from routing.proxy.replicas.engine_check import EngineCheck, Probe
from routing.proxy.replicas.upstream import Failure
from routing.schema import ReplicaState

if TYPE_CHECKING:
    from routing.core.loads.book import Load
    from routing.proxy.replicas.link import ReplicaLink
    from routing.proxy.replicas.upstream import Listener, Upstream
    from routing.proxy.router import Router
    from routing.proxy.serving import Serving
    from routing.schema import PoolConfig

logger = logging.getLogger(__name__)

MOVED = {Cause.STALLED, Cause.SLOW}  # causes for which what waits goes elsewhere
BRIEF_S = 0.5  # silences shorter than this are not worth remembering
CHECKED_S = 3.0  # in place of ``stall_s`` where that is null: engines are examined, and none is taken out


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
        self._checks: dict[str, EngineCheck] = {}  # by replica

    def look(self, serving: Serving, now: float) -> None:
        """Look at all, once; ``now`` is loop time."""
        pools = serving.config.pools
        self._usual = {pool.name: self._usual.get(pool.name) or UsualSilence() for pool in pools}
        self._slowness = {pool.name: self._slowness.get(pool.name) or Slowness() for pool in pools}
        self._seen = {name: seen for name, seen in self._seen.items() if name in serving.links}
        self._keep_checks(serving)
        for pool in pools:
            for replica in pool.replicas:
                if any(load.running for load in self._loads(replica.name)):
                    self._look_at(pool, serving.links[replica.name], now)
                else:
                    self._seen.pop(replica.name, None)
            if pool.breaker.stall_s is not None:
                self._compare(pool, serving.links, pool.breaker.stall_s, now)

    def timed_out(self, replica: str, *, was_probe: bool) -> None:
        """A response did not come in time: its replica failed, unless its engine makes progress or answers a probe."""
        router, check = self._router, self._checks.get(replica)
        if check is None:
            router.failed(replica, Failure.TIMEOUT, was_probe=was_probe)
        elif router.loop.time() - max(router.progress_at(replica), check.moved_at) > check.stall_s:
            if was_probe:
                router.failed(replica, Failure.TIMEOUT, was_probe=True)
            else:
                check.probe(partial(self._probed, replica))

    def _probed(self, replica: str, probe: Probe) -> None:
        """How the probe of a replica ended that had not answered in time."""
        if probe is not Probe.ANSWERED:
            self._router.failed(replica, Failure.TIMEOUT, was_probe=False)

    def close(self) -> None:
        """Examine nothing more."""
        for check in self._checks.values():
            check.close()

    def _keep_checks(self, serving: Serving) -> None:
        """Have one check for each replica that may be examined, by the settings of now."""
        pools = {replica.name: pool for pool in serving.config.pools for replica in pool.replicas}
        for name in self._checks.keys() - pools.keys():
            self._checks.pop(name).close()
        for name, pool in pools.items():
            check, link = self._checks.get(name), serving.links[name]
            if check is None or check.address != link.address:
                if check is not None:
                    check.close()
                check = self._checks[name] = EngineCheck(name, link.address)
            check.stall_s = pool.breaker.stall_s or CHECKED_S
            check.model = pool.models[0] if pool.models else None

    def _loads(self, replica: str) -> list[Load]:
        """Of a replica's ranks; one of most."""
        serving, loads = self._router.serving, self._router.loads
        return [loads.load(target) for target in serving.placement.targets_by_replica[replica]] if serving else []

    def _look_at(self, pool: PoolConfig, link: ReplicaLink, now: float) -> None:
        """Judge one replica at which requests are."""
        name = ReplicaId(link.name)
        breaker = self._router.breakers.troubled.get(name)
        if breaker is not None and breaker.state is State.OPEN and breaker.cause in MOVED:
            self._seen.pop(name, None)
            _move(link)
            return
        self._learn(pool, link, now)
        waiting = link.waiting(self._router.breakers.probed_since_s(name))
        if not waiting or waiting[0].waiting is None:
            return
        progress, check = link.progress_at, self._checks[name]
        if progress > now - check.stall_s / 3:
            check.rest()
        since = max(progress, check.moved_at, waiting[0].sent_at)
        check.look(since, now)
        if pool.breaker.stall_s is None:
            return
        reason = self._hung_stream(pool, name, waiting, progress, now)
        if reason is None and check.is_hung(since, self._allowed_s(pool, check, waiting[0].waiting, now), now):
            reason = f"its engine shows no progress for {now - since:.1f} s"
        if reason is not None:
            self._out(link, reason, Cause.STALLED)

    def _hung_stream(
        self, pool: PoolConfig, name: ReplicaId, waiting: list[Upstream], progress: float, now: float
    ) -> str | None:
        """Why a replica hangs by the streams that wait there; None if it does not. Bytes and engine steps count."""
        oldest = next((it for it in waiting if it.waiting and it.waiting.is_stream()), None)
        if oldest is None or oldest.waiting is None or pool.breaker.stall_s is None:
            return None
        since = max(progress, oldest.sent_at, self._checks[name].moved_at)
        self._seen[name] = Silence(since, now - since)
        tokens, rate = oldest.waiting.waiting_tokens, _rate(self._loads(name))
        is_over = now - since > self._usual[pool.name].allowed_s(pool.breaker.stall_s, tokens, rate, now)
        return f"no byte for {now - since:.1f} s" if is_over else None

    def _allowed_s(self, pool: PoolConfig, check: EngineCheck, oldest: Listener, now: float) -> float:
        """What an engine may stand still while ``oldest`` has waited there the longest; seconds."""
        loads, usual = self._loads(check.name), self._usual[pool.name]
        tokens, rate = oldest.prompt_tokens, _rate(loads)
        if check.has_counters is False:
            return usual.allowed_s(check.stall_s, tokens, rate, now)
        is_measured = any(load.prefill.is_measured for load in loads)
        return usual.allowed_between_steps_s(check.stall_s, tokens, rate, now, is_measured=is_measured)

    def _learn(self, pool: PoolConfig, link: ReplicaLink, now: float) -> None:
        """Remember how long a silence was that has ended with a byte, and how long an engine stood still."""
        seen = self._seen.pop(link.name, None)
        if seen is not None and link.progress_at > seen.since and seen.lasted_s > BRIEF_S:
            self._usual[pool.name].ended(seen.lasted_s, now)
        stood_s = self._checks[link.name].ended_stillness_s()
        if stood_s is not None and stood_s > BRIEF_S:
            self._usual[pool.name].ended(stood_s, now)

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
        elif not self._router.health.is_up(ReplicaId(link.name)):
            _move(link)  # it is out already, for another reason


def _rate(loads: list[Load]) -> float:
    """Tokens/s that a replica prefills; of ranks the slowest."""
    return min((it.prefill.tokens_per_s for it in loads if it.prefill.is_measured), default=UNMEASURED_RATE)


def _move(link: ReplicaLink) -> None:
    """Let everybody go elsewhere who waits there and may."""
    for upstream in link.waiting():
        if upstream.waiting is not None:
            upstream.waiting.stalled()
