from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from routing.limits.concurrency import ConcurrencyLimiter, RejectionCause
from routing.schema import ConcurrencyConfig


@dataclass(eq=False)
class QueuedRequest:
    priority: int = 0
    events: list[str] = field(default_factory=list)

    def admit(self) -> None:
        self.events.append("admitted")

    def on_rejected(self, _: ConcurrencyLimiter, cause: RejectionCause) -> None:
        self.events.append(cause)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def build_limiter(
    running: int = 1, waiting: int = 2, wait_s: float = 10.0, clock: Clock | None = None
) -> ConcurrencyLimiter:
    return ConcurrencyLimiter(
        ConcurrencyConfig(max_running=running, max_waiting=waiting, max_wait_s=wait_s), clock or Clock()
    )


def test_waiters_are_admitted_first_come_first_served() -> None:
    limiter, requests = build_limiter(), [QueuedRequest() for _ in range(3)]
    assert [limiter.acquire(request) for request in requests] == [True, False, False]
    assert (limiter.running, limiter.waiting) == (1, 2)
    limiter.release()
    assert [request.events for request in requests] == [[], ["admitted"], []]
    limiter.release()
    limiter.release()
    assert (limiter.running, limiter.waiting) == (0, 0)


def test_urgent_waiters_go_first_and_displace_the_latest_of_the_lowest_priority() -> None:
    limiter = build_limiter()
    limiter.acquire(QueuedRequest())
    early, late, urgent = QueuedRequest(5), QueuedRequest(5), QueuedRequest(1)
    for request in (early, late, urgent):
        limiter.acquire(request)
    assert (early.events, late.events, urgent.events) == ([], [RejectionCause.DISPLACED], [])
    limiter.release()
    assert (urgent.events, early.events) == (["admitted"], [])


@pytest.mark.parametrize("priority", [5, 6, 9])
def test_a_full_queue_rejects_a_waiter_of_no_higher_priority(priority: int) -> None:
    limiter = build_limiter()
    for request in (QueuedRequest(), QueuedRequest(5), QueuedRequest(0)):
        limiter.acquire(request)
    late = QueuedRequest(priority)
    assert limiter.acquire(late) is False
    assert (late.events, limiter.waiting, limiter.rejected[RejectionCause.FULL]) == ([RejectionCause.FULL], 2, 1)


def test_a_waiter_is_rejected_after_the_longest_wait() -> None:
    clock = Clock()
    limiter = build_limiter(clock=clock)
    first, second = QueuedRequest(3), QueuedRequest(0)
    limiter.acquire(QueuedRequest())
    limiter.acquire(first)
    clock.now = 5.0
    limiter.acquire(second)
    clock.now = 10.0
    limiter.expire()
    assert (first.events, second.events, limiter.waiting) == ([RejectionCause.TIMEOUT], [], 1)


def test_a_cancelled_waiter_leaves_the_queue() -> None:
    limiter, request = build_limiter(), QueuedRequest()
    limiter.acquire(QueuedRequest())
    limiter.acquire(request)
    assert limiter.cancel(request)
    assert not limiter.cancel(request)
    limiter.release()
    assert (request.events, limiter.running, limiter.waiting) == ([], 0, 0)


def test_new_limits_admit_waiters_at_once() -> None:
    limiter, requests = build_limiter(1, 9), [QueuedRequest() for _ in range(5)]
    for request in requests:
        limiter.acquire(request)
    limiter.configure(ConcurrencyConfig(max_running=3))
    assert (limiter.running, limiter.waiting) == (3, 2)
    limiter.remove_limit()
    assert (limiter.running, limiter.waiting) == (5, 0)
    limiter.configure(ConcurrencyConfig(max_running=1))
    assert limiter.acquire(QueuedRequest()) is False, "a lower limit removes no running request and admits no new one"


def test_retry_after_follows_the_pace() -> None:
    clock = Clock()
    limiter = build_limiter(1, 100, clock=clock)
    for _ in range(31):
        limiter.acquire(QueuedRequest())
    assert limiter.retry_after_s == 1
    for _ in range(2):
        clock.now += 0.5
        limiter.release()
    assert limiter.retry_after_s == 15  # 0.5 s each for 28 waiters and the new request
    clock.now += 1e6
    limiter.release()
    assert limiter.retry_after_s == 60


def test_the_pace_is_measured_at_the_limit_only() -> None:
    clock = Clock()
    limiter = build_limiter(2, 100, clock=clock)
    for _ in range(2):
        for _ in range(6):
            limiter.acquire(QueuedRequest())
        for _ in range(6):
            clock.now += 0.5
            limiter.release()
        for _ in range(3):
            limiter.acquire(QueuedRequest())
            clock.now += 1000.0
            limiter.release()
    for _ in range(30):
        limiter.acquire(QueuedRequest())

    assert limiter.retry_after_s == 15, "0.5 s each for 28 waiters and the new request"


def test_a_share_of_the_limits_is_at_least_one() -> None:
    limiter = ConcurrencyLimiter(ConcurrencyConfig(max_running=10, max_waiting=3), Clock(), share=0.25)
    assert [limiter.acquire(QueuedRequest()) for _ in range(5)] == [True] * 3 + [False] * 2
    assert limiter.waiting == 1


def test_counts_are_correct_after_any_sequence() -> None:
    rng, clock = random.Random(2), Clock()
    limiter = build_limiter(4, 6, 3.0, clock)
    admitted: list[QueuedRequest] = []
    waiting: list[QueuedRequest] = []
    for _ in range(20_000):
        clock.now += rng.random()
        operation = rng.randrange(4)
        if operation == 0 and admitted:
            admitted.pop(rng.randrange(len(admitted)))
            limiter.release()
        elif operation == 1 and waiting:
            limiter.cancel(waiting.pop(rng.randrange(len(waiting))))
        elif operation == 2:
            limiter.expire()
        else:
            request = QueuedRequest(rng.randrange(10))
            if limiter.acquire(request):
                admitted.append(request)
            else:
                waiting.append(request)
        admitted += [request for request in waiting if request.events == ["admitted"]]
        waiting = [request for request in waiting if not request.events]
        assert (limiter.running, limiter.waiting) == (len(admitted), len(waiting))
        assert limiter.running <= 4
        assert limiter.waiting <= 6
        assert not limiter.waiting or limiter.running == 4, "no request waits while a permit is free"
