"""Replicas that hang or crawl are found.

Theory of operation. A look at all, four times a second (``housekeeping.py``), but only at replicas where requests are.
It reads what connections note anyway: the deadline of a stream moves with every byte, so it tells when the last one
came. So watching costs a request nothing. A response that is not streamed has no byte until it is whole: where one
waits and nothing else comes, ``engine_probe.py`` finds out whether the engine makes progress by itself. ``core/health``
says how long no progress is too long (``slowness.py``) and when few bytes are too few (``slowness.py``); then the
breaker decides, and what waits at the replica goes elsewhere as far as the retry rules allow. Requests that must stay
are asked again with each tick, for the budget fills up; whether the replica is well again is seen by those alone that
were sent there to try it. A response that does not come in time counts against its replica only where the engine shows
no progress either.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from routing.health.circuit_breaker import Cause, State
from routing.health.engine_probe import EngineCheck, Probe
from routing.health.slowness import (
    UNMEASURED_RATE,
    Observation,
    Slowness,
    TypicalSilence,
    observation,
    prefill_allowance_s,
)
from routing.log import event
from routing.schema import ReplicaState
from routing.types import ReplicaId
from routing.upstream.connection import Failure

if TYPE_CHECKING:
    from routing.balancing.load_tracker import Load
    from routing.health.balancer import ActiveFleet, Balancer
    from routing.schema import PoolConfig
    from routing.upstream.connection import Listener, UpstreamConnection
    from routing.upstream.pool import ConnectionPool


logger = logging.getLogger(__name__)

RETRIED_CAUSES = {Cause.STALLED, Cause.SLOW}  # causes for which what waits goes elsewhere
BRIEF_S = 0.5  # silences shorter than this are not worth remembering
CHECKED_S = 3.0  # in place of ``stall_s`` where that is null: engines are examined, and none is taken out


class Silence(NamedTuple):
    """What was seen of a replica at which a stream waits. Seconds, and loop time."""

    since: float
    lasted_s: float


class StallDetector:
    """One router's."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._usual: dict[str, TypicalSilence] = {}  # by pool
        self._slowness: dict[str, Slowness] = {}  # by pool
        self._seen: dict[str, Silence] = {}  # by replica, while a stream waits there
        self._checks: dict[str, EngineCheck] = {}  # by replica

    def check(self, fleet: ActiveFleet, now: float) -> None:
        """Look at all, once; ``now`` is loop time."""
        pools = fleet.config.pools
        self._usual = {pool.name: self._usual.get(pool.name) or TypicalSilence() for pool in pools}
        self._slowness = {pool.name: self._slowness.get(pool.name) or Slowness() for pool in pools}
        self._seen = {name: seen for name, seen in self._seen.items() if name in fleet.connection_pools}
        self._keep_checks(fleet)
        for pool in pools:
            for replica in pool.replicas:
                if any(load.running for load in self._loads(replica.name)):
                    self._check_replica(pool, fleet.connection_pools[replica.name], now)
                else:
                    self._seen.pop(replica.name, None)
            if pool.breaker.stall_s is not None:
                self._compare(pool, fleet.connection_pools, pool.breaker.stall_s, now)

    def record_failed_response(self, replica: str, failure: Failure, *, was_probe: bool) -> None:
        """Count a response that will not come, or not whole. A timeout counts only if the engine shows no progress."""
        if failure is Failure.TIMEOUT:
            self.timed_out(replica, was_probe=was_probe)
        else:
            self._balancer.record_failure(replica, failure, was_probe=was_probe)

    def timed_out(self, replica: str, *, was_probe: bool) -> None:
        """A response did not come in time: its replica failed, unless its engine makes progress or answers a probe."""
        balancer, check = self._balancer, self._checks.get(replica)
        if check is None:
            balancer.record_failure(replica, Failure.TIMEOUT, was_probe=was_probe)
        elif balancer.loop.time() - max(balancer.progress_at(replica), check.moved_at) > check.stall_s:
            if was_probe:
                balancer.record_failure(replica, Failure.TIMEOUT, was_probe=True)
            else:
                check.probe(partial(self._probed, replica))

    def _probed(self, replica: str, probe: Probe) -> None:
        """How the probe of a replica ended that had not answered in time."""
        if probe is not Probe.ANSWERED:
            self._balancer.record_failure(replica, Failure.TIMEOUT, was_probe=False)

    def close(self) -> None:
        """Examine nothing more."""
        for check in self._checks.values():
            check.close()

    def _keep_checks(self, fleet: ActiveFleet) -> None:
        """Have one check for each replica that may be examined, by the settings of now."""
        pools = {replica.name: pool for pool in fleet.config.pools for replica in pool.replicas}
        for name in self._checks.keys() - pools.keys():
            self._checks.pop(name).close()
        for name, pool in pools.items():
            check, link = self._checks.get(name), fleet.connection_pools[name]
            if check is None or check.address != link.address:
                if check is not None:
                    check.close()
                check = self._checks[name] = EngineCheck(name, link.address)
            check.stall_s = pool.breaker.stall_s or CHECKED_S
            check.model = pool.models[0] if pool.models else None

    def _loads(self, replica: str) -> list[Load]:
        """Of a replica's ranks; one of most."""
        fleet, loads = self._balancer.fleet, self._balancer.loads
        return [loads.load(target) for target in fleet.placement.targets_by_replica[replica]] if fleet else []

    def _check_replica(self, pool: PoolConfig, link: ConnectionPool, now: float) -> None:
        """Judge one replica at which requests are."""
        name = ReplicaId(link.name)
        breaker = self._balancer.breakers.not_closed.get(name)
        if breaker is not None and breaker.state is State.OPEN and breaker.cause in RETRIED_CAUSES:
            self._seen.pop(name, None)
            _retry_waiting(link)
            return
        self._learn(pool, link, now)
        waiting = link.waiting(self._balancer.breakers.half_open_since_s(name))
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
            self._eject(link, reason, Cause.STALLED)

    def _hung_stream(
        self, pool: PoolConfig, name: ReplicaId, waiting: list[UpstreamConnection], progress: float, now: float
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

    def _learn(self, pool: PoolConfig, link: ConnectionPool, now: float) -> None:
        """Remember how long a silence was that has ended with a byte, and how long an engine stood still."""
        seen = self._seen.pop(link.name, None)
        if seen is not None and link.progress_at > seen.since and seen.lasted_s > BRIEF_S:
            self._usual[pool.name].ended(seen.lasted_s, now)
        stood_s = self._checks[link.name].ended_stillness_s()
        if stood_s is not None and stood_s > BRIEF_S:
            self._usual[pool.name].ended(stood_s, now)

    def _compare(
        self, pool: PoolConfig, connection_pools: dict[str, ConnectionPool], stall_s: float, now: float
    ) -> None:
        """Judge replicas beside each other."""
        weights = {ReplicaId(it.name): it.capacity for it in pool.replicas if it.state is ReplicaState.ACTIVE}
        if len(weights) < 2:
            return
        observations = {
            name: seen
            for name in weights
            if (seen := self._observe(name, connection_pools[name], stall_s, now)) is not None
        }
        slow = self._slowness[pool.name].judge(
            observations, stall_s, now, held=lambda name: connection_pools[name].streaming_prompt_tokens / weights[name]
        )
        for name, reason in slow:
            self._eject(connection_pools[name], reason, Cause.SLOW)

    def _observe(self, name: ReplicaId, link: ConnectionPool, stall_s: float, now: float) -> Observation | None:
        """What a replica shows; None of one that is out or down."""
        balancer = self._balancer
        state = balancer.breakers.state(name)
        if state is State.OPEN or (state is State.CLOSED and not balancer.health.is_up(name)):
            return None
        loads, ended_s, is_probed = self._loads(name), now - link.last_end_at, state is State.HALF_OPEN
        since = balancer.breakers.half_open_since_s(name)
        if not any(load.running for load in loads):
            return observation((), (), ended_s=ended_s, is_probed=is_probed)
        rate = _rate(loads)
        lates_s = [
            now - upstream.sent_at - prefill_allowance_s(listener.queued_tokens, rate)
            for upstream in link.waiting(since)
            if now - upstream.sent_at > stall_s / 4 and (listener := upstream.waiting) and listener.is_stream()
        ]
        prefill_s = prefill_allowance_s(max(load.waiting_tokens for load in loads), rate)
        return observation(lates_s, link.silences(now, since), prefill_s, ended_s=ended_s, is_probed=is_probed)

    def _eject(self, link: ConnectionPool, reason: str, cause: Cause) -> None:
        if self._balancer.breakers.record_stall(ReplicaId(link.name), reason, cause):
            event(logger, "replica_ejected", level=logging.WARNING, replica=link.name, reason=reason)
            self._seen.pop(link.name, None)
            _retry_waiting(link)
        elif not self._balancer.health.is_up(ReplicaId(link.name)):
            _retry_waiting(link)  # it is out already, for another reason


def _rate(loads: list[Load]) -> float:
    """Tokens/s that a replica prefills; of ranks the slowest."""
    return min((it.prefill.tokens_per_s for it in loads if it.prefill.is_measured), default=UNMEASURED_RATE)


def _retry_waiting(link: ConnectionPool) -> None:
    """Let everybody go elsewhere who waits there and may."""
    for upstream in link.waiting():
        if upstream.waiting is not None:
            upstream.waiting.on_stalled()
