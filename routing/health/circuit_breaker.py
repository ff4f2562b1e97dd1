"""Circuit breakers: replicas that pass their health checks but fail requests are ejected, probed and readmitted.

Theory of operation. A breaker is closed while requests go to its replica. ``failures`` failed requests in a row, or one
detected stall or slowness, open it: the replica is no candidate. After ``open_s`` it is half open: one request at a
time may go there, as its probe. A first byte is a success, or the whole response if the replica was slow;
``successes`` of them in a row close the breaker, a failure opens it again. Only a probe's own result counts: requests
that were sent earlier may fail as late as at their deadlines, and do not show the present state. An open breaker whose
replica passes its health check again after failing it is half open at once. A probe without a result is given up
after ``open_s``.

A replica is ejected only if, including it, at most ``max_out_ratio`` of the pool's active replicas are ejected or down:
beyond that the failures likely have a common cause, and a failing replica is better than none. Failed connections do
not count, because health checks detect them, and their end, sooner.

Usually all replicas are healthy and ``not_closed`` is empty; callers that report a success check that first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from routing.balancing.replicas import HealthRegistry
from routing.schema import BreakerConfig, PoolConfig, ReplicaConfig, ReplicaRole, ReplicaState
from routing.types import ReplicaId


class State(StrEnum):
    """State of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Cause(StrEnum):
    """Why a breaker opened."""

    FAILURES = "failures"
    STALLED = "stalled"
    SLOW = "slow"
    PROBE = "probe"  # its probe failed


@dataclass(slots=True)
class CircuitBreaker:
    """The breaker of one replica, while it is not closed or has counted failures."""

    pool: str
    settings: BreakerConfig
    state: State = State.CLOSED
    failures: int = 0  # in a row, while closed
    successes: int = 0  # in a row, while half open
    reason: str | None = None  # of the latest failure
    cause: Cause | None = None  # why it opened
    until_s: float = 0.0  # when an open breaker admits a probe, or a probe without a result is given up
    half_open_since_s: float = 0.0
    is_probing: bool = False  # half open, and its probe is in flight


@dataclass(frozen=True, slots=True)
class _Pool:
    name: str
    settings: BreakerConfig
    active: tuple[ReplicaId, ...]  # replicas that do the same work
    max_out_ratio: float  # of the active replicas


class CircuitBreakers:
    """The breakers of all replicas. ``on_readmitted`` is called when one closes after it was open."""

    def __init__(
        self, health: HealthRegistry, clock: Callable[[], float], on_readmitted: Callable[[ReplicaId], None]
    ) -> None:
        self.not_closed: dict[ReplicaId, CircuitBreaker] = {}  # all others are closed without failures
        self.ejections: dict[tuple[str, ReplicaId, Cause], int] = {}  # total count by pool, replica and cause
        self._health = health
        self._clock = clock
        self._on_readmitted = on_readmitted
        self._pools: dict[ReplicaId, _Pool] = {}
        self._limited_until_s: dict[ReplicaId, float] = {}  # replicas that asked for no requests until then

    def configure(self, pools: Iterable[PoolConfig]) -> None:
        """Apply these settings; breakers of replicas that stay keep their state."""
        self._pools = {}
        for config in pools:
            self._configure_replicas(
                config, [replica for replica in config.replicas if replica.role is not ReplicaRole.PREFILL]
            )
            self._configure_replicas(
                config, [replica for replica in config.replicas if replica.role is ReplicaRole.PREFILL], 1.0
            )
        self.ejections = {key: count for key, count in self.ejections.items() if key[1] in self._pools}
        for replica in self._limited_until_s.keys() - self._pools.keys():
            self._lift_limit(replica)
        for replica, breaker in list(self.not_closed.items()):
            if replica in self._pools:
                pool = self._pools[replica]
                breaker.pool, breaker.settings = pool.name, pool.settings
            else:
                self._close(replica)

    def _configure_replicas(
        self, config: PoolConfig, replicas: list[ReplicaConfig], max_out_ratio: float | None = None
    ) -> None:
        """Apply a pool's settings to some of its replicas. All prefill replicas may be out: decode replicas do it."""
        names = tuple(ReplicaId(replica.name) for replica in replicas if replica.state is ReplicaState.ACTIVE)
        ratio = config.breaker.max_out_ratio if max_out_ratio is None else max_out_ratio
        pool = _Pool(config.name, config.breaker, names, ratio)
        self._pools |= {ReplicaId(replica.name): pool for replica in replicas}

    def settings(self, replica: ReplicaId) -> BreakerConfig:
        """A replica's settings; the defaults if it is not configured."""
        pool = self._pools.get(replica)
        return BreakerConfig() if pool is None else pool.settings

    def state(self, replica: ReplicaId) -> State:
        """The state of a replica's breaker."""
        breaker = self.not_closed.get(replica)
        return State.CLOSED if breaker is None else breaker.state

    def half_open_since_s(self, replica: ReplicaId) -> float:
        """Since when a replica's breaker is half open; 0 if it is not. Requests sent earlier are no evidence."""
        breaker = self.not_closed.get(replica)
        return breaker.half_open_since_s if breaker is not None and breaker.state is State.HALF_OPEN else 0.0

    # --- results of requests and checks ---

    def record_failure(self, replica: ReplicaId, reason: str, *, was_probe: bool = False) -> bool:
        """Count a failed request, other than a failed connection; True if it ejected the replica."""
        breaker = self._breaker(replica)
        if breaker is None or (breaker.state is State.HALF_OPEN and not was_probe):
            return False
        breaker.reason = reason
        if breaker.state is State.HALF_OPEN:
            return self._open(replica, breaker, Cause.PROBE)
        breaker.failures += 1
        return breaker.failures >= breaker.settings.failures and self._eject(replica, breaker, Cause.FAILURES)

    def record_stall(self, replica: ReplicaId, reason: str, cause: Cause = Cause.STALLED) -> bool:
        """Record that a replica sends no bytes, or too few; True if that ejected it."""
        breaker = self._breaker(replica)
        if breaker is None:
            return False
        breaker.reason = reason
        if breaker.state is State.HALF_OPEN:
            return self._open(replica, breaker, cause)
        return self._eject(replica, breaker, cause)

    def on_request_sent(self, replica: ReplicaId) -> bool:
        """Mark a request to a half-open replica as its probe, True if it is one. No other is sent meanwhile."""
        breaker = self.not_closed.get(replica)
        if breaker is None or breaker.state is not State.HALF_OPEN:
            return False
        breaker.is_probing = True
        breaker.until_s = self._clock() + breaker.settings.open_s
        self._health.set_ejected(replica, is_ejected=True)
        return True

    def record_connect_failure(self, replica: ReplicaId, reason: str, *, was_probe: bool = False) -> None:
        """Count a failed connection, if it was a probe's."""
        if was_probe and self.state(replica) is State.HALF_OPEN:
            self.record_failure(replica, reason, was_probe=True)

    def record_first_byte(self, replica: ReplicaId) -> bool:
        """Record the first byte of a successful response; True if it is a probe's and ends the probe."""
        breaker = self.not_closed.get(replica)
        if breaker is None or not breaker.is_probing or breaker.cause is Cause.SLOW:
            return False
        self._record_probe_success(replica, breaker)
        return True

    def record_success(self, replica: ReplicaId, *, was_probe: bool = False) -> None:
        """Record a whole response: clears counted failures, and ends the probe of a slow replica."""
        breaker = self.not_closed.get(replica)
        if breaker is None:
            return
        if breaker.state is State.CLOSED:
            self.not_closed.pop(replica, None)
        elif was_probe and breaker.is_probing and breaker.cause is Cause.SLOW:
            self._record_probe_success(replica, breaker)

    def record_cancelled(self, replica: ReplicaId) -> None:
        """Record a request that ended without evidence about the replica; if it was a probe, admit another one."""
        breaker = self.not_closed.get(replica)
        if breaker is not None and breaker.is_probing:
            self._admit_probe(replica, breaker)

    def on_health_check_passed(self, replica: ReplicaId) -> None:
        """Admit a probe at once if the breaker is open, because the replica was down and is up again."""
        breaker = self.not_closed.get(replica)
        if breaker is not None and breaker.state is State.OPEN:
            self._admit_probe(replica, breaker)

    def admit_due_probes(self) -> None:
        """Admit probes for the breakers whose ``until_s`` has passed, and lift limits that are over."""
        now = self._clock()
        for replica, until_s in list(self._limited_until_s.items()):
            if now >= until_s:
                self._lift_limit(replica)
        for replica, breaker in list(self.not_closed.items()):
            if (breaker.state is State.OPEN or breaker.is_probing) and now >= breaker.until_s:
                self._admit_probe(replica, breaker)

    def record_retry_after(self, replica: ReplicaId, seconds: float) -> bool:
        """A replica asked for no requests for ``seconds``, by its latest response; True if it was not limited before.

        It gets requests only if no other one is eligible.
        """
        if replica not in self._pools:
            return False
        self._limited_until_s[replica] = self._clock() + seconds
        return self._health.set_limited(replica, is_limited=True)

    def _lift_limit(self, replica: ReplicaId) -> None:
        del self._limited_until_s[replica]
        self._health.set_limited(replica, is_limited=False)

    # --- transitions ---

    def _breaker(self, replica: ReplicaId) -> CircuitBreaker | None:
        """A replica's breaker, created on the first failure; None if the replica is not configured."""
        pool = self._pools.get(replica)
        if pool is None:
            return None
        return self.not_closed.setdefault(replica, CircuitBreaker(pool.name, pool.settings))

    def _eject(self, replica: ReplicaId, breaker: CircuitBreaker, cause: Cause) -> bool:
        """Open a breaker unless too many replicas of its pool are ejected or down already."""
        if breaker.state is State.OPEN:
            return False
        pool = self._pools[replica]
        unavailable = sum(
            not self._health.is_up(name) or self.state(name) is not State.CLOSED
            for name in pool.active
            if name != replica
        )
        return unavailable + 1 <= pool.max_out_ratio * len(pool.active) and self._open(replica, breaker, cause)

    def _open(self, replica: ReplicaId, breaker: CircuitBreaker, cause: Cause) -> bool:
        breaker.state, breaker.cause = State.OPEN, cause
        breaker.failures = breaker.successes = 0
        breaker.is_probing = False
        breaker.until_s = self._clock() + breaker.settings.open_s
        key = (breaker.pool, replica, cause)
        self.ejections[key] = self.ejections.get(key, 0) + 1
        self._health.set_ejected(replica, is_ejected=True)
        return True

    def _record_probe_success(self, replica: ReplicaId, breaker: CircuitBreaker) -> None:
        breaker.successes += 1
        if breaker.successes >= breaker.settings.successes:
            self._close(replica)
            self._on_readmitted(replica)
        else:
            self._admit_probe(replica, breaker)

    def _admit_probe(self, replica: ReplicaId, breaker: CircuitBreaker) -> None:
        """Let one request go to the replica."""
        if breaker.state is State.OPEN:
            breaker.state, breaker.successes = State.HALF_OPEN, 0
            breaker.half_open_since_s = self._clock()
        breaker.is_probing = False
        self._health.set_ejected(replica, is_ejected=False)

    def _close(self, replica: ReplicaId) -> None:
        self.not_closed.pop(replica, None)
        self._health.set_ejected(replica, is_ejected=False)
