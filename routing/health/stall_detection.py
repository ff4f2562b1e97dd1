"""Detects replicas that hang or are slow, and retries their waiting requests on other replicas.

Theory of operation. Housekeeping calls ``check`` four times a second, and only replicas with requests are examined. It
reads what connections record anyway: a stream's deadline moves with every byte and so tells when the last one came.
Detection therefore costs a request nothing. A response that is not streamed has no byte until it is complete: if one
waits and nothing else comes, ``engine_probe.py`` finds out whether the engine makes progress. ``slowness.py`` has the
limits for silence and slowness. Then the circuit breaker decides, and waiting requests are retried as far as the retry
rules allow; those that may not be retried yet are retried at a later check, when the retry budget has refilled. For a
half-open breaker only its probes count. A response timeout counts against a replica only if its engine shows no
progress.
"""

from __future__ import annotations

import logging
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from routing.health.circuit_breaker import Cause, State
from routing.health.engine_probe import EngineCheck, OwnRequests, ProbeResult
from routing.health.slowness import (
    UNMEASURED_RATE,
    Observation,
    Slowness,
    TypicalSilence,
    observe_streams,
    prefill_allowance_s,
)
from routing.log import event
from routing.schema import ReplicaState
from routing.types import ReplicaId
from routing.upstream.connection import Failure

if TYPE_CHECKING:
    from routing.balancing.load_tracker import Load
    from routing.health.checks import ActiveFleet, Balancer
    from routing.schema import PoolConfig
    from routing.upstream.connection import UpstreamCall, UpstreamConnection
    from routing.upstream.pool import ConnectionPool


logger = logging.getLogger(__name__)

RETRIED_CAUSES = {Cause.STALLED, Cause.SLOW}  # their waiting requests are retried on other replicas
MIN_RECORDED_S = 0.5  # shorter silences are not recorded as typical
MAX_CONTINUED = 4  # silent streams of a replica at each check: reading one takes milliseconds
DEFAULT_STALL_S = 3.0  # for engine checks if ``stall_s`` is null, which ejects no replica


class Silence(NamedTuple):
    """The silence of a replica at which a stream waits. Seconds, and loop time."""

    since: float
    lasted_s: float


class StallDetector:
    """Stall detection of one router."""

    def __init__(self, balancer: Balancer, own_requests: OwnRequests) -> None:
        self._balancer = balancer
        self._own_requests = own_requests
        self._typical: dict[str, TypicalSilence] = {}  # by pool
        self._slowness: dict[tuple[str, bool], Slowness] = {}  # by pool, and whether the replicas can decode
        self._silences: dict[str, Silence] = {}  # by replica, while a stream waits there
        self._checks: dict[str, EngineCheck] = {}  # by replica

    def check(self, fleet: ActiveFleet, now: float) -> None:
        """Examine all replicas with requests; ``now`` is loop time."""
        pools = fleet.config.pools
        self._typical = {pool.name: self._typical.get(pool.name) or TypicalSilence() for pool in pools}
        kinds = [(pool.name, can_decode) for pool in pools for can_decode in (True, False)]
        self._slowness = {kind: self._slowness.get(kind) or Slowness() for kind in kinds}
        self._silences = {name: silence for name, silence in self._silences.items() if name in fleet.connection_pools}
        self._configure_checks(fleet)
        for pool in pools:
            for replica in pool.replicas:
                if any(load.running for load in self._loads(replica.name)):
                    self._check_replica(pool, fleet.connection_pools[replica.name], now)
                else:
                    self._silences.pop(replica.name, None)
            if pool.breaker.stall_s is not None:
                for can_decode in (True, False):  # replicas that only prefill have another pace
                    self._check_slowness(pool, can_decode, fleet.connection_pools, pool.breaker.stall_s, now)

    def record_failed_response(self, replica: str, failure: Failure, *, was_probe: bool) -> None:
        """Count a response that will not complete. A timeout counts only if the engine shows no progress."""
        balancer, check = self._balancer, self._checks.get(replica)
        if failure is not Failure.TIMEOUT or check is None:
            balancer.record_failure(replica, failure, was_probe=was_probe)
        elif balancer.loop.time() - max(balancer.progress_at(replica), check.progress_at) > check.stall_s:
            if was_probe:
                balancer.record_failure(replica, failure, was_probe=True)
            else:
                check.probe(partial(self._on_probed, replica))

    def _on_probed(self, replica: str, probe: ProbeResult) -> None:
        """Count a timed-out response if the probe of its engine failed too."""
        if probe is not ProbeResult.PASSED:
            self._balancer.record_failure(replica, Failure.TIMEOUT, was_probe=False)

    @property
    def probed(self) -> list[EngineCheck]:
        """The checks of engines that got a probe."""
        return [check for check in self._checks.values() if check.probes]

    def close(self) -> None:
        """Cancel all engine checks."""
        for check in self._checks.values():
            check.close()

    def _configure_checks(self, fleet: ActiveFleet) -> None:
        """Keep one engine check per replica, with the settings of its pool."""
        pools = {replica.name: pool for pool in fleet.config.pools for replica in pool.replicas}
        for name in self._checks.keys() - pools.keys():
            self._checks.pop(name).close()
        for name, pool in pools.items():
            check, address = self._checks.get(name), fleet.connection_pools[name].address
            if check is None or check.address != address:
                if check is not None:
                    check.close()
                check = self._checks[name] = EngineCheck(name, address, self._own_requests)
            check.stall_s = pool.breaker.stall_s or DEFAULT_STALL_S
            check.model = pool.models[0] if pool.models else None

    def _loads(self, replica: str) -> list[Load]:
        """Loads of a replica's data-parallel ranks; most have one."""
        fleet, loads = self._balancer.fleet, self._balancer.loads
        return [loads.load(target) for target in fleet.placement.targets_by_replica[replica]] if fleet else []

    def _check_replica(self, pool: PoolConfig, connections: ConnectionPool, now: float) -> None:
        name = ReplicaId(connections.name)
        breaker = self._balancer.breakers.not_closed.get(name)
        if breaker is not None and breaker.state is State.OPEN and breaker.cause in RETRIED_CAUSES:
            self._silences.pop(name, None)
            _retry(connections, now - (pool.breaker.stall_s or DEFAULT_STALL_S))
            return
        self._record_typical_silence(pool, connections, now)
        waiting = connections.waiting(self._balancer.breakers.half_open_since_s(name))
        if not waiting or waiting[0].waiting_listener is None:
            return
        progress_at, check = connections.progress_at, self._checks[name]
        if progress_at > now - check.stall_s / 3:
            check.reset()
        since = max(progress_at, check.progress_at, waiting[0].sent_at)
        stall_s = pool.breaker.stall_s or DEFAULT_STALL_S
        allowed_s, streams_allowed_s = self._allowed_s(pool, check, waiting[0].waiting_listener, now), inf
        oldest = next(filter(_is_stream, waiting), None)
        if oldest is not None and oldest.waiting_listener is not None:
            tokens, rate = oldest.waiting_listener.waiting_tokens, _rate(self._loads(name))
            streams_allowed_s = self._typical[pool.name].allowed_s(stall_s, tokens, rate, now)
        check.check(since, min(allowed_s, streams_allowed_s), now)
        if pool.breaker.stall_s is None:
            return
        reason = None
        if oldest is not None:
            since_stream = max(progress_at, oldest.sent_at, check.progress_at)
            self._silences[name] = Silence(since_stream, now - since_stream)
            if now - since_stream > streams_allowed_s:
                reason = f"no byte for {now - since_stream:.1f} s"
        if reason is None and check.is_hung(since, allowed_s, now):
            reason = f"its engine shows no progress for {now - since:.1f} s"
        if reason is not None:
            self._eject(connections, reason, Cause.STALLED, now - stall_s)

    def _allowed_s(self, pool: PoolConfig, check: EngineCheck, oldest: UpstreamCall, now: float) -> float:
        """Seconds for which an engine may stand still while ``oldest`` waits there."""
        loads, typical = self._loads(check.name), self._typical[pool.name]
        tokens, rate = oldest.prompt_tokens, _rate(loads)
        if check.has_counters is False:
            return typical.allowed_s(check.stall_s, tokens, rate, now)
        is_measured = any(load.prefill.is_measured for load in loads)
        return typical.allowed_between_steps_s(check.stall_s, tokens, rate, now, is_measured=is_measured)

    def _record_typical_silence(self, pool: PoolConfig, connections: ConnectionPool, now: float) -> None:
        """Record a silence that has ended with a byte, and an engine's standstill that has ended by itself."""
        silence = self._silences.pop(connections.name, None)
        standstill_s = self._checks[connections.name].take_ended_standstill_s()
        if silence is not None and connections.progress_at > silence.since and silence.lasted_s > MIN_RECORDED_S:
            self._typical[pool.name].record(silence.lasted_s, now)
        if standstill_s is not None and standstill_s > MIN_RECORDED_S:
            self._typical[pool.name].record(standstill_s, now)

    def _check_slowness(
        self,
        pool: PoolConfig,
        can_decode: bool,
        connection_pools: dict[str, ConnectionPool],
        stall_s: float,
        now: float,
    ) -> None:
        """Compare the replicas of a pool that do the same work with each other."""
        weights = {
            ReplicaId(replica.name): replica.capacity
            for replica in pool.replicas
            if replica.state is ReplicaState.ACTIVE and replica.can_decode is can_decode
        }
        if len(weights) < 2:
            return
        observations = {
            name: observed
            for name in weights
            if (observed := self._observe(name, connection_pools[name], stall_s, now)) is not None
        }
        slow = self._slowness[pool.name, can_decode].evaluate(
            observations,
            stall_s,
            now,
            fullness=lambda name: connection_pools[name].streaming_prompt_tokens / weights[name],
        )
        for name, reason in slow:
            self._eject(connection_pools[name], reason, Cause.SLOW, now - stall_s)

    def _observe(self, name: ReplicaId, connections: ConnectionPool, stall_s: float, now: float) -> Observation | None:
        """The pace and lateness of a replica; None if it is ejected or down."""
        balancer = self._balancer
        state = balancer.breakers.state(name)
        if state is State.OPEN or (state is State.CLOSED and not balancer.health.is_up(name)):
            return None
        loads, ended_s, is_probed = self._loads(name), now - connections.last_end_at, state is State.HALF_OPEN
        since = balancer.breakers.half_open_since_s(name)
        if not any(load.running for load in loads):
            return observe_streams((), (), ended_s=ended_s, is_probed=is_probed)
        rate = _rate(loads)
        lateness_s = [
            now - upstream.sent_at - prefill_allowance_s(listener.queued_tokens, rate)
            for upstream in connections.waiting(since)
            if now - upstream.sent_at > stall_s / 4 and (listener := upstream.waiting_listener) and listener.is_stream()
        ]
        prefill_s = prefill_allowance_s(max(load.waiting_tokens for load in loads), rate)
        silences_s = connections.silences(now, since)
        return observe_streams(lateness_s, silences_s, prefill_s, ended_s=ended_s, is_probed=is_probed)

    def _eject(self, connections: ConnectionPool, reason: str, cause: Cause, silent_since: float) -> None:
        if self._balancer.breakers.record_stall(ReplicaId(connections.name), reason, cause):
            event(logger, "replica_ejected", level=logging.WARNING, replica=connections.name, reason=reason)
            self._silences.pop(connections.name, None)
        elif self._balancer.health.is_up(ReplicaId(connections.name)):
            return  # too many others are ejected
        _retry(connections, silent_since)


def _is_stream(upstream: UpstreamConnection) -> bool:
    """Whether a stream waits for its first token on this connection."""
    return upstream.waiting_listener is not None and upstream.waiting_listener.is_stream()


def _rate(loads: list[Load]) -> float:
    """Measured prefill rate of a replica in tokens/s, that of its slowest rank."""
    return min((load.prefill.tokens_per_s for load in loads if load.prefill.is_measured), default=UNMEASURED_RATE)


def _retry(connections: ConnectionPool, silent_since: float) -> None:
    """Let other replicas have what waits at a replica, if the retry policy allows it, and its silent streams."""
    for stream in connections.silent(silent_since)[:MAX_CONTINUED]:
        stream.on_stalled()
    for upstream in connections.waiting():
        if upstream.waiting_listener is not None:
            upstream.waiting_listener.on_stalled()
