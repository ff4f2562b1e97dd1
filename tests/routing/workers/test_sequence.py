"""Decisions of several workers, read as one sequence."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from routing.observability.decision_log import DecisionRing
from routing.workers import sequence as module
from routing.workers.sequence import DecisionSequence, RetainedDecisions
from tests.routing.proxy.harness import decision_page, record


class Book:
    """A worker's ring of records."""

    def __init__(self, name: str, room: int = 10_000) -> None:
        self.name = name
        self.room = room
        self.last = 0
        self.noted = 0

    @property
    def first(self) -> int:
        return max(1, self.last - self.room + 1)

    def decide(self, sequence: DecisionSequence, count: int) -> None:
        self.last += count
        sequence.add(self, self.noted)
        self.noted = self.last

    async def read(self, first: int, last: int, ratio: float = 1.0) -> list[dict[str, Any]]:  # noqa: ARG002 - no blocks
        return [{"seq": number, "id": f"{self.name}{number}"} for number in range(max(first, self.first), last + 1)]


async def everything(sequence: DecisionSequence, limit: int = 1000) -> tuple[list[str], int]:
    """What a reader gets that goes on from where it left off, and how much it is told was dropped."""
    after, ids, dropped = 0, [], 0
    while True:
        page = await sequence.after(after, limit)
        numbers = [one["seq"] for one in page["decisions"]]
        assert numbers == sorted(set(numbers))
        assert all(after < number <= page["next"] for number in numbers)
        assert page["next"] - after == len(numbers) + page["dropped"]
        ids += [one["id"] for one in page["decisions"]]
        dropped += page["dropped"]
        if page["next"] == after:
            return ids, dropped
        after = page["next"]


@pytest.mark.parametrize("limit", [1, 3, 1000])
async def test_every_record_is_read_once_in_the_order_in_which_it_was_added(limit):
    sequence, a, b = DecisionSequence(), Book("a"), Book("b")
    for book, count in ((a, 2), (b, 1), (b, 2), (a, 3), (b, 0)):
        book.decide(sequence, count)
    assert await everything(sequence, limit) == (["a1", "a2", "b1", "b2", "b3", "a3", "a4", "a5"], 0)
    assert len(sequence) == 3  # stretches in a row are one


async def test_a_reader_gets_the_number_of_records_that_were_dropped_before_it_came():
    sequence, a, b = DecisionSequence(), Book("a", room=3), Book("b")
    a.decide(sequence, 5)
    b.decide(sequence, 2)
    assert await everything(sequence) == (["a3", "a4", "a5", "b1", "b2"], 2)
    a.decide(sequence, 1)
    assert await everything(sequence, 1) == (["a4", "a5", "b1", "b2", "a6"], 3)


async def test_records_of_a_killed_worker_count_as_dropped_and_those_of_a_retired_one_stay():
    sequence, a, b = DecisionSequence(), Book("a"), Book("b")
    for book, count in ((a, 2), (b, 2), (a, 1)):
        book.decide(sequence, count)
    sequence.replace(b, None)
    assert await everything(sequence) == (["a1", "a2", "a3"], 2)
    sequence.replace(a, RetainedDecisions(await a.read(1, 3)))
    assert await everything(sequence, 1) == (["a1", "a2", "a3"], 2)
    sequence.replace(a, None)
    assert await everything(sequence) == (["a1", "a2", "a3"], 2)


async def test_a_number_beyond_the_end_or_a_limit_of_zero_returns_nothing():
    sequence, a = DecisionSequence(), Book("a")
    assert await sequence.after(7, 10) == {"decisions": [], "next": 0, "dropped": 0}
    a.decide(sequence, 2)
    assert (await sequence.after(9, 10))["next"] == 2
    assert await sequence.after(1, 0) == {"decisions": [], "next": 1, "dropped": 0}


async def test_a_record_added_during_a_read_is_only_on_the_next_page():
    sequence = DecisionSequence()

    class Busy(Book):
        async def read(self, first: int, last: int, ratio: float = 1.0) -> list[dict[str, Any]]:
            if self.last < 10:
                self.decide(sequence, 2)
            return await super().read(first, last, ratio)

    Busy("a").decide(sequence, 2)
    assert await everything(sequence) == ([f"a{number}" for number in range(1, 11)], 0)


async def test_retained_records_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_RECORDS", 10)
    sequence = DecisionSequence()
    for life in range(50):
        book = Book(f"{life}-")
        book.decide(sequence, 4)
        sequence.replace(book, RetainedDecisions(await book.read(1, 4)))
        assert sum(map(len, sequence._retained)) <= 10
        assert len(sequence) <= 2
    ids, dropped = await everything(sequence)
    assert (len(ids), dropped) == (8, 192)


async def test_no_record_is_read_twice_in_any_order_of_worker_starts_and_ends():
    chance = random.Random(3)
    for _ in range(30):
        sequence, books, noted = DecisionSequence(), [Book("0", 5)], 0
        for step in range(40):
            book = chance.choice(books)
            count = chance.randrange(4)
            book.decide(sequence, count)
            noted += count
            if chance.random() < 0.2:
                kept = RetainedDecisions(await book.read(1, book.last)) if chance.random() < 0.5 else None
                sequence.replace(book, kept)
                books.remove(book)
                books.append(Book(f"{step}-", 5))
            if chance.random() < 0.3:
                books.append(Book(f"{step}+", 5))
        ids, dropped = await everything(sequence, chance.choice([1, 2, 7, 1000]))
        assert len(ids) == len(set(ids))
        assert len(ids) + dropped == noted


async def test_a_block_sample_is_the_same_from_a_running_and_from_an_exited_worker():
    chance = random.Random(5)
    hashes = [chance.getrandbits(64) for _ in range(200)]
    whole = {"seq": 1, "blocks": [f"{one:016x}" for one in hashes], "block_count": 200}
    ring = DecisionRing()
    ring.add(record("r", array("Q", hashes)))
    asked = [
        (await RetainedDecisions([whole]).read(1, 1, ratio), decision_page(ring, 0, 1, ratio)["decisions"])
        for ratio in (0, 0.25, 1)
    ]
    for (ended,), (running,) in asked:
        assert {name: running.get(name) for name in ended} == ended
