"""What happened at a router: on disk until it was taken, told once, and bounded."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from routing.admin.events import FILE, EventSpool, StateObserver
from routing.schema import HealthCheck
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import config, routed


@pytest.fixture
def spool(tmp_path: Path) -> EventSpool:
    return EventSpool(tmp_path, "b1")


def names(spool: EventSpool) -> list[tuple[str, int]]:
    return [(happening.boot, happening.seq) for happening in spool.oldest(10_000)]


def test_events_wait_in_order_until_they_are_taken(spool: EventSpool) -> None:
    for number in range(5):
        spool.add("replica_ejected", replica=f"r{number}", reason=None)
    spool.acknowledge(spool.oldest(2))
    assert names(spool) == [("b1", 3), ("b1", 4), ("b1", 5)]
    assert spool.oldest(1)[0].facts == {"replica": "r2"}


def test_the_next_life_tells_what_the_last_one_did_not(spool: EventSpool, tmp_path: Path) -> None:
    for _ in range(3):
        spool.add("x")
    spool.acknowledge(spool.oldest(1))
    after = EventSpool(tmp_path, "b2")
    after.add("router_started")
    assert names(after) == [("b1", 2), ("b1", 3), ("b2", 1)]


def test_of_too_many_the_oldest_go_and_the_file_is_bounded(tmp_path: Path) -> None:
    spool = EventSpool(tmp_path, "b1", capacity=10)
    for number in range(1, 1001):
        spool.add("x", text="y" * 1000)
        assert (tmp_path / FILE).stat().st_size < 2 * 10 * 700 + 700
        assert len(spool) == min(number, 10)
    assert names(spool)[0] == ("b1", 991)
    assert names(EventSpool(tmp_path, "b2", capacity=10)) == [("b1", seq) for seq in range(991, 1001)]


@pytest.mark.parametrize("seed", range(5))
def test_torn_and_altered_lines_are_passed_over_and_the_others_read(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    spool = EventSpool(tmp_path, "b1")
    for number in range(20):
        spool.add("x", text=f"fact {number}")
    whole = (tmp_path / FILE).read_bytes()
    for _ in range(50):
        at = chance.randrange(len(whole))
        damaged = bytearray(whole[: chance.randrange(at, len(whole) + 1)])
        if at < len(damaged):
            damaged[at] ^= 1 << chance.randrange(8)
        (tmp_path / FILE).write_bytes(damaged)
        read = EventSpool(tmp_path, "b2").oldest(100)
        assert all(happening.facts == {"text": f"fact {happening.seq - 1}"} for happening in read)
        assert len(read) >= damaged.count(b"\n") - 2


def test_an_event_that_was_torn_takes_no_other_one_with_it(tmp_path: Path) -> None:
    """Wherever a process or its disk ended in the middle of an event: that one is lost at most."""
    before = EventSpool(tmp_path, "b1")
    before.add("x")
    begin = (tmp_path / FILE).stat().st_size
    before.add("x")
    whole = (tmp_path / FILE).read_bytes()
    for cut in range(begin, len(whole) + 1):
        (tmp_path / FILE).write_bytes(whole[:cut])
        after = EventSpool(tmp_path, "b2")
        after.add("x")
        left = [("b1", 1), ("b1", 2)] if cut == len(whole) else [("b1", 1)]
        assert names(after) == names(EventSpool(tmp_path, "b3")) == [*left, ("b2", 1)]


def test_what_a_full_disk_did_not_take_is_kept_once_it_has_room(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    spool = EventSpool(tmp_path / "state", "b1")
    spool.add("x")
    (tmp_path / "state").unlink()
    spool.add("x")
    assert names(EventSpool(tmp_path / "state", "b2")) == [("b1", 1), ("b1", 2)]


def test_a_folder_in_the_files_place_costs_the_keeping_and_not_the_telling(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    spool = EventSpool(tmp_path, "b1")
    for _ in range(3):
        spool.add("x")
    spool.acknowledge(spool.oldest(1))
    assert names(spool) == [("b1", 2), ("b1", 3)]


def test_a_disk_that_refuses_costs_the_keeping_and_not_the_telling(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spool = EventSpool(tmp_path / "file", "b1")
    spool.add("x")
    spool.acknowledge(spool.oldest(0))
    assert names(spool) == [("b1", 1)]


def test_fifty_kills_lose_no_event_that_was_added(tmp_path: Path) -> None:
    """R15: the process is killed at any moment; what it said it had added is told by a later life, once per name."""
    chance = random.Random(1)
    added: list[str] = []
    told: set[str] = set()
    for life in range(50):
        hears, says = os.pipe()
        pid = os.fork()
        if not pid:
            live_and_say(tmp_path, f"b{life}", says)
        os.close(says)
        with os.fdopen(hears, "rb") as pipe:
            heard = pipe.read(chance.randrange(1, 2000))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            heard += pipe.read()
        told |= {word[1:] for word in heard.decode().split() if word[0] == "T"}
        added += [word[1:] for word in heard.decode().split() if word[0] == "A"]
    left = {f"{boot}/{seq}" for boot, seq in names(EventSpool(tmp_path, "last", capacity=1 << 20))}
    assert len(added) > 1000
    assert set(added) <= told | left


def live_and_say(folder: Path, boot: str, says: int) -> None:
    """Add events, and hand over some now and then, until the end; what is said is done."""
    try:
        spool = EventSpool(folder, boot, capacity=1 << 20)
        for number in range(1, 1 << 20):
            spool.add("x")
            os.write(says, f"A{boot}/{number} ".encode())
            if number % 7 == 0:
                oldest = spool.oldest(9)
                os.write(says, "".join(f"T{it.boot}/{it.seq} " for it in oldest).encode())
                spool.acknowledge(oldest)
    finally:
        os._exit(1)


@pytest.fixture
def noticing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routing.admin.events.PERIOD_S", 0.02)


async def test_what_a_router_lets_go_and_takes_back_is_noticed_once(
    noticing: None, two: list[FakeReplica], spool: EventSpool
) -> None:
    seldom = HealthCheck(interval_s=60)  # what the test finds of a replica stays found
    async with routed(config(two, health=seldom), revision=4) as harness:
        observer = StateObserver(harness.server.data.view, spool, "1.0")
        looking = asyncio.create_task(observer.observe_forever())
        router, name = harness.router, two[0].name
        await harness.until(lambda: router.services.checks.status(name).is_up, "the first and last look at its health")
        router.balancer.health.mark(name, up=False)
        router.services.checks.status(name).is_up = False
        router.services.checks.status(name).reason = "connection refused"
        await harness.until(lambda: len(spool) >= 3, "the replica's loss to be noticed")
        router.services.checks.status(name).is_up = True
        router.balancer.health.mark(name, up=True)
        await harness.until(lambda: len(spool) >= 4, "its return")
        looking.cancel()
    told = [(happening.kind, happening.facts.get("replica")) for happening in spool.oldest(9)]
    assert told == [
        ("router_started", None),
        ("config_loaded", None),
        ("replica_unreachable", name),
        ("replica_reachable", name),
    ]
