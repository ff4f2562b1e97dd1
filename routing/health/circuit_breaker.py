"""Replicas that answer their health checks and fail requests are taken out, and come back after they have proved well.

Theory of operation. A breaker is closed while requests go to its replica. ``failures`` bad ends in a row, or one
finding that the engine hangs or crawls, open it: the replica is no candidate. After ``open_s`` it is half open: one
request at a time may go there, as its probe. A first byte is a success, or a whole answer where the replica was slow;
``successes`` of them in a row close the breaker, a failure opens it again. Only a probe's own: requests that were sent
before may fail as late as at their deadlines, and tell nothing of what the replica is now. One whose health check had
failed and is well again is tried at once. A probe that nobody hears of again is given up after ``open_s``.

A replica is taken out only where, with it, no more than ``max_out_ratio`` of the pool's active replicas are out or
down: beyond that a failing replica is likelier to be one that all share the fault of, and better than none. Connections
that are refused do not count, for the health check looks after those and sees the end of it sooner.

Most of the time all is well and ``not_closed`` is empty; whoever reports good news asks that first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from routing.balancing.health import HealthRegistry
from routing.schema import BreakerConfig, PoolConfig, ReplicaState
from routing.types import ReplicaId


class State(StrEnum):
    """Where a breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Cause(StrEnum):
    """Why a breaker opened."""

    FAILURES = "failures"
    STALLED = "stalled"
    SLOW = "slow"
    PROBE = "probe"  # it failed the probe


@dataclass(slots=True)
class CircuitBreaker:
    """One replica's, while anything is the matter with it."""

    pool: str
    settings: BreakerConfig
    state: State = State.CLOSED
    failures: int = 0  # in a row, while closed
    successes: int = 0  # in a row, while half open
    reason: str | None = None  # of the latest failure
    cause: Cause | None = None  # of its having opened
    until_s: float = 0.0  # when it goes on by itself: from open to a probe, from a probe to the next
    half_open_since_s: float = 0.0  # since when it is half open
    is_probing: bool = False  # half open, and a request is on its way


@dataclass(frozen=True, slots=True)
class _Pool:
    name: str
    settings: BreakerConfig
    active: tuple[ReplicaId, ...]


class CircuitBreakers:
    """The breakers of all replicas. ``returned`` hears of each one that closes after it was open."""

    def __init__(
        self, health: HealthRegistry, clock: Callable[[], float], returned: Callable[[ReplicaId], None]
    ) -> None:
        self.not_closed: dict[ReplicaId, CircuitBreaker] = {}  # all others are closed and have not failed
        self.ejections: dict[tuple[str, ReplicaId, Cause], int] = {}  # how often, ever, by pool and replica
        self._health = health
        self._clock = clock
        self._returned = returned
        self._pools: dict[ReplicaId, _Pool] = {}

    def configure(self, pools: Iterable[PoolConfig]) -> None:
        """Go by these settings; breakers of replicas that stay keep their state."""
        self._pools = {}
        for config in pools:
            names = tuple(ReplicaId(it.name) for it in config.replicas if it.state is ReplicaState.ACTIVE)
            pool = _Pool(config.name, config.breaker, names)
            self._pools |= {ReplicaId(replica.name): pool for replica in config.replicas}
        self.ejections = {key: count for key, count in self.ejections.items() if key[1] in self._pools}
        for replica, breaker in list(self.not_closed.items()):
            if replica in self._pools:
                pool = self._pools[replica]
                breaker.pool, breaker.settings = pool.name, pool.settings
            else:
                self._close(replica)

    def settings(self, replica: ReplicaId) -> BreakerConfig:
        """A replica's settings; the defaults for one that is not configured."""
        pool = self._pools.get(replica)
        return BreakerConfig() if pool is None else pool.settings

    def state(self, replica: ReplicaId) -> State:
        """Where a replica's breaker stands."""
        breaker = self.not_closed.get(replica)
        return State.CLOSED if breaker is None else breaker.state

    def half_open_since_s(self, replica: ReplicaId) -> float:
        """Since when a replica is probed, for nothing sent there before tells what it is now; 0 where it is not."""
        breaker = self.not_closed.get(replica)
        return breaker.half_open_since_s if breaker is not None and breaker.state is State.HALF_OPEN else 0.0

    # --- what requests and watchers report ---

    def record_failure(self, replica: ReplicaId, reason: str, *, was_probe: bool = False) -> bool:
        """A request failed there, in a way that health checks do not see; True if that took the replica out."""
        breaker = self._of(replica)
        if breaker is None or (breaker.state is State.HALF_OPEN and not was_probe):
            return False
        breaker.reason = reason
        if breaker.state is State.HALF_OPEN:
            return self._open(replica, breaker, Cause.PROBE)
        breaker.failures += 1
        return breaker.failures >= breaker.settings.failures and self._eject(replica, breaker, Cause.FAILURES)

    def record_stall(self, replica: ReplicaId, reason: str, cause: Cause = Cause.STALLED) -> bool:
        """No byte comes from there, or hardly any; True if that took the replica out."""
        breaker = self._of(replica)
        if breaker is None:
            return False
        breaker.reason = reason
        if breaker.state is State.HALF_OPEN:
            return self._open(replica, breaker, cause)
        return self._eject(replica, breaker, cause)

    def on_request_sent(self, replica: ReplicaId) -> bool:
        """A request goes there; True if it is a probe: then no other one does meanwhile."""
        breaker = self.not_closed.get(replica)
        if breaker is None or breaker.state is not State.HALF_OPEN:
            return False
        breaker.is_probing = True
        breaker.until_s = self._clock() + breaker.settings.open_s
        self._health.set_ejected(replica, is_ejected=True)
        return True

    def record_connect_failure(self, replica: ReplicaId, reason: str, *, was_probe: bool = False) -> None:
        """A connection could not be made: only a probe counts that."""
        if was_probe and self.state(replica) is State.HALF_OPEN:
            self.record_failure(replica, reason, was_probe=True)

    def record_first_byte(self, replica: ReplicaId) -> bool:
        """The first byte of a probe's answer came from there that is no failure; True if that ends the probe."""
        breaker = self.not_closed.get(replica)
        if breaker is None or not breaker.is_probing or breaker.cause is Cause.SLOW:
            return False
        self._succeeded(replica, breaker)
        return True

    def record_success(self, replica: ReplicaId, *, was_probe: bool = False) -> None:
        """An answer came from there, whole: failures before it are forgotten."""
        breaker = self.not_closed.get(replica)
        if breaker is None:
            return
        if breaker.state is State.CLOSED:
            self.not_closed.pop(replica, None)
        elif was_probe and breaker.is_probing and breaker.cause is Cause.SLOW:
            self._succeeded(replica, breaker)

    def record_cancelled(self, replica: ReplicaId) -> None:
        """A request ended there that proves nothing: if it was a probe, the next one may be."""
        breaker = self.not_closed.get(replica)
        if breaker is not None and breaker.is_probing:
            self._admit_probe(replica, breaker)

    def on_health_check_passed(self, replica: ReplicaId) -> None:
        """A health check that had failed is well again: an open breaker waits no longer."""
        breaker = self.not_closed.get(replica)
        if breaker is not None and breaker.state is State.OPEN:
            self._admit_probe(replica, breaker)

    def admit_due_probes(self) -> None:
        """Let those be probed whose time has come."""
        now = self._clock()
        for replica, breaker in list(self.not_closed.items()):
            waits = breaker.state is State.OPEN or breaker.is_probing
            if waits and now >= breaker.until_s:
                self._admit_probe(replica, breaker)

    # --- from state to state ---

    def _of(self, replica: ReplicaId) -> CircuitBreaker | None:
        """A replica's breaker, from now on a troubled one; None if the replica is not configured."""
        pool = self._pools.get(replica)
        if pool is None:
            return None
        return self.not_closed.setdefault(replica, CircuitBreaker(pool.name, pool.settings))

    def _eject(self, replica: ReplicaId, breaker: CircuitBreaker, cause: Cause) -> bool:
        if breaker.state is State.OPEN or not self._may_eject(replica):
            return False
        return self._open(replica, breaker, cause)

    def _may_eject(self, replica: ReplicaId) -> bool:
        pool = self._pools[replica]
        out = sum(self._is_out(name) for name in pool.active if name != replica)
        return out + 1 <= pool.settings.max_out_ratio * len(pool.active)

    def _is_out(self, replica: ReplicaId) -> bool:
        """Whether a replica does not take its part: it is down, or its breaker is not closed."""
        return not self._health.is_up(replica) or self.state(replica) is not State.CLOSED

    def _open(self, replica: ReplicaId, breaker: CircuitBreaker, cause: Cause) -> bool:
        breaker.state, breaker.cause = State.OPEN, cause
        breaker.failures = breaker.successes = 0
        breaker.is_probing = False
        breaker.until_s = self._clock() + breaker.settings.open_s
        key = (breaker.pool, replica, cause)
        self.ejections[key] = self.ejections.get(key, 0) + 1
        self._health.set_ejected(replica, is_ejected=True)
        return True

    def _succeeded(self, replica: ReplicaId, breaker: CircuitBreaker) -> None:
        """A probe ended well."""
        breaker.successes += 1
        if breaker.successes >= breaker.settings.successes:
            self._close(replica)
            self._returned(replica)
        else:
            self._admit_probe(replica, breaker)

    def _admit_probe(self, replica: ReplicaId, breaker: CircuitBreaker) -> None:
        """Let one request go there."""
        if breaker.state is State.OPEN:
            breaker.state, breaker.successes = State.HALF_OPEN, 0
            breaker.half_open_since_s = self._clock()
        breaker.is_probing = False
        self._health.set_ejected(replica, is_ejected=False)

    def _close(self, replica: ReplicaId) -> None:
        self.not_closed.pop(replica, None)
        self._health.set_ejected(replica, is_ejected=False)
