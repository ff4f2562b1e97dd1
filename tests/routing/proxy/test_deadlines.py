"""One timer for all waits: late by a tick at most, early never, and nothing kept."""

from __future__ import annotations

import asyncio

from routing.http.loop import NEVER, NO_BUCKET, TICK_S, Deadlines


class Waiter:
    def __init__(self) -> None:
        self.deadline, self.bucket = NEVER, NO_BUCKET
        self.passed = asyncio.Event()
        self.at = 0.0

    def on_deadline(self) -> None:
        self.at = asyncio.get_running_loop().time()
        self.passed.set()


async def test_a_deadline_passes_in_time() -> None:
    loop = asyncio.get_running_loop()
    wheel, waiter = Deadlines(loop), Waiter()
    begun = loop.time()
    wheel.arm(waiter, 0.12)
    async with asyncio.timeout(5):
        await waiter.passed.wait()
    assert waiter.at >= begun + 0.12
    assert (waiter.deadline, waiter.bucket, len(wheel)) == (NEVER, NO_BUCKET, 0)
    wheel.close()


async def test_a_later_deadline_costs_nothing_and_holds() -> None:
    loop = asyncio.get_running_loop()
    wheel, waiter = Deadlines(loop), Waiter()
    wheel.arm(waiter, 0.06)
    due = waiter.bucket
    waiter.deadline = later = loop.time() + 0.2
    assert waiter.bucket == due
    async with asyncio.timeout(5):
        await waiter.passed.wait()
    assert waiter.at >= later
    wheel.close()


async def test_an_earlier_deadline_counts() -> None:
    wheel, waiter = Deadlines(asyncio.get_running_loop()), Waiter()
    wheel.arm(waiter, 1000)
    wheel.arm(waiter, 0.01)
    assert len(wheel) == 1
    async with asyncio.timeout(5):
        await waiter.passed.wait()
    wheel.close()


async def test_who_ended_is_forgotten() -> None:
    wheel, waiters = Deadlines(asyncio.get_running_loop()), [Waiter() for _ in range(100)]
    for number, waiter in enumerate(waiters):
        wheel.arm(waiter, 0.01 + number)
        wheel.arm(waiter, 500 - number)
        wheel.disarm(waiter)
    assert len(wheel) == 0
    waiters[0].deadline = NEVER
    wheel.arm(waiters[1], 0.01)
    waiters[1].deadline = NEVER  # no longer waiting
    await asyncio.sleep(3 * TICK_S)
    assert not waiters[1].passed.is_set()
    assert len(wheel) == 0
    wheel.close()


async def test_no_bucket_is_kept_of_those_who_were_forgotten_or_filed_anew() -> None:
    wheel = Deadlines(asyncio.get_running_loop())
    for number in range(1000):
        waiter = Waiter()
        wheel.arm(waiter, 86_400 - number)
        wheel.arm(waiter, 43_200 - number)
        wheel.disarm(waiter)
    assert len(wheel._buckets) == 0
    wheel.close()


async def test_one_that_ends_another_as_it_passes_is_not_followed_by_it() -> None:
    wheel, first, second = Deadlines(asyncio.get_running_loop()), Waiter(), Waiter()
    for waiter, other in ((first, second), (second, first)):
        wheel.arm(waiter, 0.01)
        waiter.on_deadline = lambda waiter=waiter, other=other: (wheel.disarm(other), waiter.passed.set())
    await asyncio.sleep(4 * TICK_S)
    assert first.passed.is_set() != second.passed.is_set()
    wheel.close()
