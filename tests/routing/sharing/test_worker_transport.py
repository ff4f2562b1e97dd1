"""Workers of one router exchange their state by datagrams: bounded, and without waiting for anybody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from routing.balancing.load_tracker import LoadTracker
from routing.balancing.residency import Residency
from routing.sharing.exchange import Exchange
from routing.sharing.transports import MAX_DATAGRAM_BYTES, QUEUE_BYTES, WorkerQueue, WorkerTransport
from routing.types import TargetId
from tests.routing.building import until

A, SECRET, ROUTER = TargetId("a"), "5e" * 16, "0a" * 4


class Workers:
    """The places for workers, and who is there."""

    def __init__(self, places: int) -> None:
        self.queues = [WorkerQueue() for _ in range(places)]
        self.running: set[int] = set()

    def transport(self, place: int) -> WorkerTransport:
        self.running.add(place)
        sending = [queue.sending for queue in self.queues]
        return WorkerTransport(self.queues[place].receiving, sending, self.running.__contains__)

    def unread(self, place: int) -> int:
        """Datagrams that wait at a place."""
        count, end = 0, self.queues[place].receiving
        try:
            while end.recv(1):
                count += 1
        except BlockingIOError:
            return count
        raise AssertionError("an empty datagram")


@pytest.fixture
def workers() -> Iterator[Workers]:
    with ExitStack() as stack:
        made = Workers(4)
        for queue in made.queues:
            stack.callback(queue.close)
        yield made


class Worker:
    """The shared part of one worker."""

    def __init__(self, workers: Workers, place: int) -> None:
        self.loads, self.residency = LoadTracker(), Residency(64)
        self.residency.add_replica(A)
        self.transport = workers.transport(place)
        self.exchange = Exchange(self.transport, ROUTER)
        self.exchange.bind(f"{place:016x}"[::-1], self.loads, self.residency)
        self.exchange.configure(SECRET, [A])

    @property
    def hears(self) -> int:
        """Other workers that count."""
        return self.exchange.view.counted if self.exchange.view is not None else 0

    @property
    def seen(self) -> int:
        return self.loads.load(A).remote_running


async def test_workers_hear_each_other_and_are_no_other_routers(workers):
    three = [Worker(workers, place) for place in range(3)]
    await until(lambda: all(worker.hears == 2 for worker in three))
    three[0].loads.dispatch(A, 0)
    await until(lambda: [worker.seen for worker in three] == [0, 1, 1])
    three[0].exchange.close()
    await until(lambda: three[1].seen == 0 and three[1].hears == 1)

    await until(lambda: "shared_state_age_seconds " in "\n".join(three[1].exchange.lines()))
    text = "\n".join(three[1].exchange.lines())
    for worker in three:
        worker.exchange.close()
    assert three[1].exchange.peers == 0
    assert "shared_state_peers" not in text
    assert [dict(worker.exchange.errors) for worker in three] == [{}, {}, {}]
    assert workers.unread(3) == 0  # where nobody runs


async def test_a_worker_that_does_not_read_costs_the_others_nothing_but_what_is_dropped_and_counted(workers):
    reading, silent, received = workers.transport(0), workers.transport(1), list[bytes]()
    reading.join(b"channel", received.append)
    for number in range(2000):
        reading.send(b"%1000d" % number)
        await until(lambda: len(received) > number)  # noqa: B023 - awaited in the same round

    dropped = reading.errors["datagram"]
    assert 0 < dropped < 2000
    assert workers.unread(1) == 2000 - dropped
    reading.send(b"later")
    silent_received = list[bytes]()
    silent.join(b"channel", silent_received.append)
    await until(lambda: silent_received == [b"later"])
    for transport in (reading, silent):
        transport.close()
    assert reading.errors == {"datagram": dropped}


async def test_a_worker_counts_no_others_once_it_does_not_hear_itself(workers):
    one, other = Worker(workers, 0), Worker(workers, 1)
    await until(lambda: one.hears == other.hears == 1)
    workers.running.discard(0)  # as others see a worker that was stopped

    await until(lambda: one.hears == 0 and one.exchange.age_s is None)
    workers.running.add(0)
    await until(lambda: one.hears == other.hears == 1)
    for worker in (one, other):
        worker.exchange.close()


async def test_the_queue_of_a_worker_that_has_exited_is_empty_for_its_successor(workers):
    one, received = workers.transport(0), list[bytes]()
    workers.transport(1)
    one.send(b"before")
    workers.queues[1].clear()
    one.send(b"after")
    successor = workers.transport(1)
    successor.join(b"channel", received.append)

    await until(lambda: received)
    successor.close()
    assert received == [b"after"]


async def test_a_message_arrives_whole_or_is_dropped_and_counted(workers):
    one, received = workers.transport(0), list[bytes]()
    one.join(b"channel", received.append)
    sizes = [MAX_DATAGRAM_BYTES + 4096, QUEUE_BYTES + 4096, 1 << 20]
    for number, size in enumerate(sizes, 1):
        one.send(bytes(size))
        await until(lambda: len(received) + one.errors["datagram"] == number)  # noqa: B023 - awaited in the same round
    one.close()

    assert [len(data) for data in received] == sizes[: len(received)]
    assert 1 <= len(received) <= 2, "the largest message with prompts fits; the kernel's maximum depends on the machine"
