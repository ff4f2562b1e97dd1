"""Circuit breakers: ejection, probes, readmission, and the maximum share of ejected replicas."""

from __future__ import annotations

import random

import pytest

from routing.balancing.replicas import HealthRegistry
from routing.health.circuit_breaker import Cause, CircuitBreakers, State
from routing.schema import BreakerConfig, PolicyConfig, PoolConfig, ReplicaConfig, RoundRobinSettings
from routing.types import ReplicaId
from tests.routing.building import names

A, B, C, D = names(4)


class Bench:
    """Breakers of one pool, with a clock that the test sets."""

    def __init__(self, size: int = 4, settings: BreakerConfig | None = None) -> None:
        self.now = 100.0
        self.health = HealthRegistry()
        self.readmitted: list[ReplicaId] = []
        self.breakers = CircuitBreakers(self.health, lambda: self.now, self.readmitted.append)
        self.configure(size, settings or BreakerConfig())

    def configure(self, size: int, settings: BreakerConfig, pool: str = "pool") -> None:
        policy = PolicyConfig(name="p", revision=1, settings=RoundRobinSettings())
        replicas = tuple(ReplicaConfig(name=name, url="http://a") for name in names(size))
        self.breakers.configure([PoolConfig(name=pool, policy=policy, replicas=replicas, breaker=settings)])

    def fail(self, replica: ReplicaId, times: int) -> list[bool]:
        return [self.breakers.record_failure(replica, "reset") for _ in range(times)]

    def open(self, replica: ReplicaId = A) -> None:
        assert self.fail(replica, 5)[-1]

    def half_open(self, replica: ReplicaId = A) -> None:
        self.open(replica)
        self.now += 30.0
        self.breakers.admit_due_probes()
        assert self.state(replica) == (State.HALF_OPEN, True)

    def state(self, replica: ReplicaId = A) -> tuple[State, bool]:
        return self.breakers.state(replica), self.health.is_up(replica)


def test_five_failures_in_a_row_eject_a_replica_and_four_do_not():
    bench = Bench()
    assert bench.fail(A, 4) == [False] * 4
    bench.breakers.record_success(A)
    assert bench.breakers.not_closed == {}
    assert bench.fail(A, 5) == [False] * 4 + [True]
    assert bench.state() == (State.OPEN, False)
    assert bench.breakers.not_closed[A].reason == "reset"
    assert bench.breakers.ejections == {("pool", A, Cause.FAILURES): 1}


def test_an_open_breaker_admits_one_probe_at_a_time_after_open_s():
    bench = Bench()
    bench.open()
    bench.now += 29.9
    bench.breakers.admit_due_probes()
    assert not bench.health.is_up(A)
    bench.now += 0.1
    bench.breakers.admit_due_probes()
    assert bench.health.is_up(A)
    assert bench.breakers.on_request_sent(A)
    assert not bench.health.is_up(A)


def test_a_replica_that_asks_for_no_requests_is_limited_until_then():
    bench = Bench()
    assert bench.breakers.record_retry_after(A, 30.0)
    assert not bench.breakers.record_retry_after(A, 20.0)  # its latest response counts
    assert (bench.health.is_up(A), bench.health.is_limited(A)) == (True, True)
    bench.now += 19.9
    bench.breakers.admit_due_probes()
    assert bench.health.is_limited(A)
    bench.now += 0.1
    bench.breakers.admit_due_probes()
    assert not bench.health.is_limited(A)


def test_a_replica_that_leaves_is_not_limited_any_more():
    bench = Bench()
    bench.breakers.record_retry_after(A, 30.0)
    bench.breakers.configure(())
    assert not bench.health.has_limited
    assert not bench.breakers.record_retry_after(A, 30.0)


def test_two_first_bytes_of_probes_close_a_breaker():
    bench = Bench()
    bench.half_open()
    for is_last in (False, True):
        bench.breakers.on_request_sent(A)
        bench.breakers.record_first_byte(A)
        assert bench.health.is_up(A)
        assert (A not in bench.breakers.not_closed) is is_last
    assert bench.readmitted == [A]


def test_a_failed_probe_opens_a_breaker_again():
    bench = Bench()
    bench.half_open()
    bench.breakers.on_request_sent(A)
    bench.breakers.record_first_byte(A)
    bench.breakers.on_request_sent(A)
    bench.breakers.record_failure(A, "timeout", was_probe=True)
    assert bench.state() == (State.OPEN, False)
    assert bench.breakers.ejections[("pool", A, Cause.PROBE)] == 1
    bench.now += 30
    bench.breakers.admit_due_probes()
    assert bench.breakers.not_closed[A].successes == 0


def test_results_of_requests_sent_before_the_probe_do_not_count():
    bench = Bench()
    bench.half_open()
    bench.breakers.record_first_byte(A)
    assert bench.breakers.not_closed[A].successes == 0
    bench.breakers.on_request_sent(A)
    assert not any(bench.fail(A, 9))
    bench.breakers.record_first_byte(A)
    assert (bench.breakers.state(A), bench.breakers.not_closed[A].successes) == (State.HALF_OPEN, 1)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_after_a_probe_without_a_result_another_is_admitted(is_cancelled):
    bench = Bench()
    bench.half_open()
    bench.breakers.on_request_sent(A)
    if is_cancelled:
        bench.breakers.record_cancelled(A)
    else:
        bench.now += 30.0
        bench.breakers.admit_due_probes()
    assert bench.state() == (State.HALF_OPEN, True)


def test_a_failed_connection_counts_only_if_it_was_a_probes():
    bench = Bench()
    for _ in range(9):
        bench.breakers.record_connect_failure(A, "refused")
    assert bench.breakers.not_closed == {}
    bench.half_open()
    bench.breakers.record_connect_failure(A, "refused")
    assert bench.breakers.state(A) is State.HALF_OPEN
    bench.breakers.record_connect_failure(A, "refused", was_probe=bench.breakers.on_request_sent(A))
    assert bench.breakers.state(A) is State.OPEN


def test_a_passed_health_check_admits_a_probe_at_once():
    bench = Bench()
    bench.open()
    bench.breakers.on_health_check_passed(A)
    assert bench.breakers.state(A) is State.HALF_OPEN


@pytest.mark.parametrize(("size", "max_ejected"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_at_most_half_of_a_pool_is_ejected(size, max_ejected):
    bench = Bench(size)
    for name in names(size):
        bench.fail(name, 10)
    assert [bench.health.is_up(name) for name in names(size)] == [False] * max_ejected + [True] * (size - max_ejected)


def test_replicas_that_are_down_count_as_ejected():
    bench = Bench(4)
    for name in (B, C):
        bench.health.mark(name, up=False)
    assert not any(bench.fail(A, 9))
    bench.health.mark(C, up=True)
    assert bench.fail(A, 1) == [True]


def test_a_stall_ejects_at_once_unless_the_pool_forbids_ejection():
    bench = Bench()
    assert bench.breakers.record_stall(A, "silent")
    assert not bench.breakers.record_stall(A, "silent"), "it is ejected already"
    assert bench.breakers.ejections == {("pool", A, Cause.STALLED): 1}
    bench = Bench(4, BreakerConfig(max_out_ratio=0.0))
    assert not any(bench.fail(A, 50))
    assert not bench.breakers.record_stall(A, "silent")


def test_a_replica_that_leaves_the_configuration_is_dropped_and_one_that_moves_counts_in_its_new_pool():
    bench = Bench(4)
    bench.open(D)
    bench.configure(3, BreakerConfig())
    assert (bench.breakers.not_closed, bench.breakers.ejections, bench.health.is_up(D)) == ({}, {}, True)
    assert not bench.breakers.record_failure(D, "reset")
    bench.half_open()
    bench.configure(4, BreakerConfig(), pool="other")
    bench.breakers.record_failure(A, "reset", was_probe=bench.breakers.on_request_sent(A))
    assert bench.breakers.ejections == {("pool", A, Cause.FAILURES): 1, ("other", A, Cause.PROBE): 1}


def test_in_any_order_of_events_half_of_the_pool_takes_requests_and_health_agrees_with_breakers():
    rng = random.Random(3)
    bench = Bench(4)
    breakers = bench.breakers
    for _ in range(10_000):
        replica = rng.choice((A, B, C, D))
        event = rng.choice(("failure", "failure", "failure", "connect", "stall", "time", "request", "request"))
        if event == "time":
            bench.now += rng.random() * 20
            breakers.admit_due_probes()
        elif event == "request" and bench.health.is_up(replica):
            breakers.on_request_sent(replica)
            rng.choice((breakers.record_first_byte, breakers.record_success, breakers.record_cancelled))(replica)
        elif event == "stall":
            breakers.record_stall(replica, "reason")
        elif event == "failure":
            breakers.record_failure(replica, "reason", was_probe=rng.random() < 0.5)
        elif event == "connect":
            breakers.record_connect_failure(replica, "reason", was_probe=rng.random() < 0.5)
        for name in (A, B, C, D):
            breaker = breakers.not_closed.get(name)
            is_out = breaker is not None and (breaker.state is State.OPEN or breaker.is_probing)
            assert bench.health.is_up(name) is not is_out
        assert sum(breakers.state(name) is State.CLOSED for name in (A, B, C, D)) >= 2
