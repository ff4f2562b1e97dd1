from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from routing.limits.concurrency import ConcurrencyLimiter, RejectionCause
from routing.schema import ConcurrencyConfig


@dataclass(eq=False)
class QueuedRequest:
    priority: int = 0
    heard: list[str] = field(default_factory=list)

    def admit(self) -> None:
        self.heard.append("in")

    def on_rejected(self, _: ConcurrencyLimiter, why: RejectionCause) -> None:
        self.heard.append(why)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def gate(running: int = 1, waiting: int = 2, wait_s: float = 10.0, clock: Clock | None = None) -> ConcurrencyLimiter:
    return ConcurrencyLimiter(
        ConcurrencyConfig(max_running=running, max_waiting=waiting, max_wait_s=wait_s), clock or Clock()
    )


def test_waiters_are_admitted_first_come_first_served() -> None:
    line, guests = gate(), [QueuedRequest() for _ in range(3)]
    assert [line.acquire(guest) for guest in guests] == [True, False, False]
    assert (line.running, line.waiting) == (1, 2)
    line.release()
    assert [guest.heard for guest in guests] == [[], ["in"], []]
    line.release()
    line.release()
    assert (line.running, line.waiting) == (0, 0)


def test_urgent_waiters_go_first_and_displace_the_latest_of_the_lowest_priority() -> None:
    line = gate()
    line.acquire(QueuedRequest())
    early, late, urgent = QueuedRequest(5), QueuedRequest(5), QueuedRequest(1)
    for guest in (early, late, urgent):
        line.acquire(guest)
    assert (early.heard, late.heard, urgent.heard) == ([], [RejectionCause.DISPLACED], [])
    line.release()
    assert (urgent.heard, early.heard) == (["in"], [])


@pytest.mark.parametrize("priority", [5, 6, 9])
def test_a_full_queue_rejects_a_waiter_of_no_higher_priority(priority: int) -> None:
    line = gate()
    for guest in (QueuedRequest(), QueuedRequest(5), QueuedRequest(0)):
        line.acquire(guest)
    late = QueuedRequest(priority)
    assert line.acquire(late) is False
    assert (late.heard, line.waiting, line.rejected[RejectionCause.FULL]) == ([RejectionCause.FULL], 2, 1)


def test_a_waiter_is_rejected_after_the_longest_wait() -> None:
    clock = Clock()
    line = gate(clock=clock)
    first, second = QueuedRequest(3), QueuedRequest(0)
    line.acquire(QueuedRequest())
    line.acquire(first)
    clock.now = 5.0
    line.acquire(second)
    clock.now = 10.0
    line.expire()
    assert (first.heard, second.heard, line.waiting) == ([RejectionCause.TIMEOUT], [], 1)


def test_a_cancelled_waiter_leaves_the_queue() -> None:
    line, guest = gate(), QueuedRequest()
    line.acquire(QueuedRequest())
    line.acquire(guest)
    assert line.cancel(guest)
    assert not line.cancel(guest)
    line.release()
    assert (guest.heard, line.running, line.waiting) == ([], 0, 0)


def test_new_limits_admit_waiters_at_once() -> None:
    line, guests = gate(1, 9), [QueuedRequest() for _ in range(5)]
    for guest in guests:
        line.acquire(guest)
    line.configure(ConcurrencyConfig(max_running=3))
    assert (line.running, line.waiting) == (3, 2)
    line.remove_limit()
    assert (line.running, line.waiting) == (5, 0)
    line.configure(ConcurrencyConfig(max_running=1))
    assert line.acquire(QueuedRequest()) is False, "a lower limit takes nobody out, and lets nobody in"


def test_retry_after_follows_the_pace() -> None:
    clock = Clock()
    line = gate(1, 100, clock=clock)
    for _ in range(31):
        line.acquire(QueuedRequest())
    assert line.retry_after_s == 1
    for _ in range(2):
        clock.now += 0.5
        line.release()
    assert line.retry_after_s == 15  # 0.5 s each for 28 waiters and the new request
    clock.now += 1e6
    line.release()
    assert line.retry_after_s == 60


def test_the_pace_is_measured_at_the_limit_only() -> None:
    clock = Clock()
    line = gate(2, 100, clock=clock)
    for _ in range(2):
        for _ in range(6):
            line.acquire(QueuedRequest())
        for _ in range(6):
            clock.now += 0.5
            line.release()
        for _ in range(3):
            line.acquire(QueuedRequest())
            clock.now += 1000.0
            line.release()
    for _ in range(30):
        line.acquire(QueuedRequest())

    assert line.retry_after_s == 15, "0.5 s each for 28 that wait, and one's own"


def test_a_share_of_the_limits_is_at_least_one() -> None:
    line = ConcurrencyLimiter(ConcurrencyConfig(max_running=10, max_waiting=3), Clock(), share=0.25)
    assert [line.acquire(QueuedRequest()) for _ in range(5)] == [True] * 3 + [False] * 2
    assert line.waiting == 1


def test_counts_are_correct_after_any_sequence() -> None:
    chance, clock = random.Random(2), Clock()
    line = gate(4, 6, 3.0, clock)
    inside: list[QueuedRequest] = []
    waiting: list[QueuedRequest] = []
    for _ in range(20_000):
        clock.now += chance.random()
        what = chance.randrange(4)
        if what == 0 and inside:
            inside.pop(chance.randrange(len(inside)))
            line.release()
        elif what == 1 and waiting:
            line.cancel(waiting.pop(chance.randrange(len(waiting))))
        elif what == 2:
            line.expire()
        else:
            guest = QueuedRequest(chance.randrange(10))
            if line.acquire(guest):
                inside.append(guest)
            else:
                waiting.append(guest)
        inside += [guest for guest in waiting if guest.heard == ["in"]]
        waiting = [guest for guest in waiting if not guest.heard]
        assert (line.running, line.waiting) == (len(inside), len(waiting))
        assert line.running <= 4
        assert line.waiting <= 6
        assert not line.waiting or line.running == 4, "nobody waits while there is room"
