from __future__ import annotations

import random

import pytest

from routing.balancing.health import HealthRegistry
from routing.health.circuit_breaker import Cause, CircuitBreakers, State
from routing.schema import BreakerConfig, PolicyConfig, PoolConfig, ReplicaConfig, ReplicaState, RoundRobinSettings
from routing.types import ReplicaId
from tests.routing.building import names

A, B, C, D = names(4)


class Bench:
    """Breakers of one pool, and a clock that stands until it is set."""

    def __init__(self, size: int = 4, settings: BreakerConfig | None = None) -> None:
        self.now = 100.0
        self.health = HealthRegistry()
        self.returned: list[ReplicaId] = []
        self.breakers = CircuitBreakers(self.health, lambda: self.now, self.returned.append)
        self.configure(size, settings or BreakerConfig())

    def configure(
        self, size: int, settings: BreakerConfig, state: ReplicaState = ReplicaState.ACTIVE, pool: str = "pool"
    ) -> None:
        policy = PolicyConfig(name="p", revision=1, settings=RoundRobinSettings())
        replicas = tuple(ReplicaConfig(name=name, url="http://a", state=state) for name in names(size))
        self.breakers.configure([PoolConfig(name=pool, policy=policy, replicas=replicas, breaker=settings)])

    def fail(self, replica: ReplicaId, times: int) -> list[bool]:
        return [self.breakers.record_failure(replica, "reset") for _ in range(times)]

    def opened(self, replica: ReplicaId = A) -> None:
        assert self.fail(replica, 5)[-1]

    def half_open(self, replica: ReplicaId = A) -> None:
        self.opened(replica)
        self.now += 30.0
        self.breakers.admit_due_probes()
        assert (self.breakers.state(replica), self.health.is_up(replica)) == (State.HALF_OPEN, True)


def test_five_failures_in_a_row_take_a_replica_out_and_four_do_not() -> None:
    bench = Bench()
    assert bench.fail(A, 4) == [False] * 4
    bench.breakers.record_success(A)
    assert bench.breakers.not_closed == {}
    assert bench.fail(A, 5) == [False] * 4 + [True]
    assert (bench.breakers.state(A), bench.health.is_up(A)) == (State.OPEN, False)
    assert bench.breakers.not_closed[A].reason == "reset"
    assert bench.breakers.ejections == {("pool", A, Cause.FAILURES): 1}


def test_it_stays_out_for_its_time_and_then_gets_one_request() -> None:
    bench = Bench()
    bench.opened()
    bench.now += 29.9
    bench.breakers.admit_due_probes()
    assert not bench.health.is_up(A)
    bench.now += 0.1
    bench.breakers.admit_due_probes()
    assert bench.health.is_up(A)
    bench.breakers.on_request_sent(A)
    assert not bench.health.is_up(A), "only one at a time"


def test_two_first_bytes_close_it() -> None:
    bench = Bench()
    bench.half_open()
    for left in (1, 0):
        bench.breakers.on_request_sent(A)
        bench.breakers.record_first_byte(A)
        assert bench.health.is_up(A)
        assert (A in bench.breakers.not_closed) is bool(left)
    assert bench.returned == [A]


def test_a_failed_trial_opens_it_again() -> None:
    bench = Bench()
    bench.half_open()
    bench.breakers.on_request_sent(A)
    bench.breakers.record_first_byte(A)
    bench.breakers.on_request_sent(A)
    bench.breakers.record_failure(A, "timeout", was_probe=True)
    assert (bench.breakers.state(A), bench.health.is_up(A)) == (State.OPEN, False)
    assert bench.breakers.ejections[("pool", A, Cause.PROBE)] == 1
    bench.now += 30
    bench.breakers.admit_due_probes()
    assert bench.breakers.not_closed[A].successes == 0


def test_a_first_byte_of_a_request_sent_before_is_no_trial() -> None:
    bench = Bench()
    bench.half_open()
    bench.breakers.record_first_byte(A)
    assert bench.breakers.not_closed[A].successes == 0


def test_a_failure_of_a_request_sent_before_ends_no_trial() -> None:
    bench = Bench()
    bench.half_open()
    bench.breakers.on_request_sent(A)
    assert not any(bench.fail(A, 9))
    bench.breakers.record_first_byte(A)
    assert (bench.breakers.state(A), bench.breakers.not_closed[A].successes) == (State.HALF_OPEN, 1)


@pytest.mark.parametrize("end", ["record_cancelled", "never heard of again"])
def test_a_trial_that_proves_nothing_makes_room_for_another(end: str) -> None:
    bench = Bench()
    bench.half_open()
    bench.breakers.on_request_sent(A)
    if end == "record_cancelled":
        bench.breakers.record_cancelled(A)
    else:
        bench.now += 30.0
        bench.breakers.admit_due_probes()
    assert (bench.breakers.state(A), bench.health.is_up(A)) == (State.HALF_OPEN, True)


def test_a_refused_connection_counts_against_a_trial_only() -> None:
    bench = Bench()
    for _ in range(9):
        bench.breakers.record_connect_failure(A, "refused")
    assert bench.breakers.not_closed == {}
    bench.half_open()
    bench.breakers.record_connect_failure(A, "refused")
    assert bench.breakers.state(A) is State.HALF_OPEN
    bench.breakers.record_connect_failure(A, "refused", was_probe=bench.breakers.on_request_sent(A))
    assert bench.breakers.state(A) is State.OPEN


def test_a_replica_whose_health_check_is_well_again_is_tried_at_once() -> None:
    bench = Bench()
    bench.opened()
    bench.breakers.on_health_check_passed(A)
    assert bench.breakers.state(A) is State.HALF_OPEN


@pytest.mark.parametrize(("size", "most"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_no_more_than_half_of_a_pool_is_out(size: int, most: int) -> None:
    bench = Bench(size)
    for name in names(size):
        bench.fail(name, 10)
    assert [bench.health.is_up(name) for name in names(size)] == [False] * most + [True] * (size - most)


def test_replicas_that_are_down_count_as_out() -> None:
    bench = Bench(4)
    for name in (B, C):
        bench.health.mark(name, up=False)
    assert not any(bench.fail(A, 9))
    bench.health.mark(C, up=True)
    assert bench.fail(A, 1) == [True]


def test_a_pool_may_forbid_it() -> None:
    bench = Bench(4, BreakerConfig(max_out_ratio=0.0))
    assert not any(bench.fail(A, 50))
    assert not bench.breakers.record_stall(A, "silent")


def test_a_stalled_replica_is_out_at_once() -> None:
    bench = Bench()
    assert bench.breakers.record_stall(A, "silent")
    assert not bench.breakers.record_stall(A, "silent"), "no news"
    assert bench.breakers.ejections == {("pool", A, Cause.STALLED): 1}


def test_a_replica_that_leaves_the_configuration_is_forgotten() -> None:
    bench = Bench(4)
    bench.opened(D)
    bench.configure(3, BreakerConfig())
    assert (bench.breakers.not_closed, bench.breakers.ejections, bench.health.is_up(D)) == ({}, {}, True)
    assert not bench.breakers.record_failure(D, "reset")


def test_a_replica_that_moves_to_another_pool_counts_there_from_then_on() -> None:
    bench = Bench(4)
    bench.half_open()
    bench.configure(4, BreakerConfig(), pool="other")
    bench.breakers.record_failure(A, "reset", was_probe=bench.breakers.on_request_sent(A))
    assert bench.breakers.ejections == {("pool", A, Cause.FAILURES): 1, ("other", A, Cause.PROBE): 1}


def test_whatever_happens_half_of_the_pool_takes_requests_and_books_agree() -> None:
    chance = random.Random(3)
    bench = Bench(4)
    for _ in range(20_000):
        replica = chance.choice((A, B, C, D))
        what = chance.choice(
            (
                "record_failure",
                "record_failure",
                "record_failure",
                "stall",
                "record_connect_failure",
                "time",
                "candidate",
                "candidate",
            )
        )
        if what == "time":
            bench.now += chance.random() * 20
            bench.breakers.admit_due_probes()
        elif what == "candidate":
            if bench.health.is_up(replica):
                bench.breakers.on_request_sent(replica)
                chance.choice(
                    (bench.breakers.record_first_byte, bench.breakers.record_success, bench.breakers.record_cancelled)
                )(replica)
        elif what == "stall":
            bench.breakers.record_stall(replica, "why")
        else:
            getattr(bench.breakers, what)(replica, "why", was_probe=chance.random() < 0.5)
        for name in (A, B, C, D):
            breaker = bench.breakers.not_closed.get(name)
            is_out = breaker is not None and (breaker.state is State.OPEN or breaker.is_probing)
            assert bench.health.is_up(name) is not is_out
        assert sum(bench.breakers.state(name) is State.CLOSED for name in (A, B, C, D)) >= 2
