"""Each worker places requests by the loads of all workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from routing.proxy.router import Router
from routing.schema import Limits, PrefixHashSettings
from routing.types import ReplicaId
from routing.workers.shared_state import COLUMNS, SharedBoard, SharedLoads, assign_columns
from tests.fakes.replica import FakeReplica, Held
from tests.routing.proxy.harness import CHAT, config, connect, post
from tests.routing.workers.harness import EXPLAIN, Process, serving

A, B = ReplicaId("a"), ReplicaId("b")


class Pair:
    """Two workers' books over one board."""

    def __init__(self) -> None:
        self.board = SharedBoard.create(3)
        self.routers = [Router("one"), Router("other")]
        self.shared = [SharedLoads(router, self.board, row) for row, router in enumerate(self.routers)]
        self.use({"a": 0, "b": 1})

    def use(self, columns: dict[str, int]) -> None:
        for shared in self.shared:
            shared.configure(columns)

    def exchange(self) -> None:
        for shared in self.shared * 2:
            shared.exchange()

    def seen(self, worker: int) -> list[tuple[int, int]]:
        book = self.routers[worker].balancer.loads
        return [(book.load(name).running, book.load(name).waiting_tokens) for name in (A, B)]


async def test_the_exchange_of_loads_continues_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routing.http.tasks.FIRST_PAUSE_S", 0.001)
    pair, calls = Pair(), iter(range(1000))
    exchange = SharedLoads._write

    def fail_at_first(self: SharedLoads) -> None:
        if next(calls) < 2:
            raise KeyError
        exchange(self)

    monkeypatch.setattr(SharedLoads, "_write", fail_at_first)
    for shared in pair.shared:
        shared.start()
    pair.routers[1].balancer.loads.dispatch(A, 0)
    async with asyncio.timeout(15):
        while pair.seen(0)[0][0] != 1:
            await asyncio.sleep(0.001)
    for shared in pair.shared:
        shared.stop()


async def test_a_worker_sees_the_loads_of_the_other() -> None:
    pair = Pair()
    one, other = (router.balancer.loads for router in pair.routers)
    first, second = one.dispatch(A, 0), other.dispatch(A, 100)
    third = other.dispatch(B, 0)
    pair.exchange()
    assert [running for running, _ in pair.seen(0)] == [2, 1]
    assert pair.seen(0)[0][1] in range(1, 101)  # of 100 tokens, those that are not prefilled yet
    assert pair.seen(1) == [(2, 100), (1, 0)]
    assert one.audit([first]) == other.audit([second, third]) == {}

    second.end()
    pair.exchange()
    assert pair.seen(0) == [(1, 0), (1, 0)]
    first.end()
    pair.exchange()
    assert pair.seen(0) == pair.seen(1) == [(0, 0), (1, 0)]


async def test_the_cleared_row_of_a_dead_worker_counts_no_load() -> None:
    pair = Pair()
    pair.routers[1].balancer.loads.dispatch(A, 7)
    pair.exchange()
    assert pair.seen(0)[0][0] == 1
    pair.board.clear(1)
    pair.shared[0].exchange()
    assert pair.seen(0) == [(0, 0), (0, 0)]


async def test_loads_are_right_when_targets_change_columns_or_leave() -> None:
    pair = Pair()
    tickets = [router.balancer.loads.dispatch(name, 0) for router in pair.routers for name in (A, B)]
    pair.exchange()
    assert pair.seen(0) == [(2, 0), (2, 0)]
    pair.use({"b": 5})
    pair.exchange()
    assert pair.seen(0) == pair.seen(1) == [(1, 0), (2, 0)]  # each its own of what left
    for ticket in tickets:
        ticket.end()
    pair.exchange()
    assert pair.seen(0) == pair.seen(1) == [(0, 0), (0, 0)]
    assert all(pair.board.is_free(column) for column in range(8))


def test_a_column_is_kept_and_not_reassigned_while_it_has_a_load() -> None:
    board = SharedBoard.create(2)
    columns = assign_columns(["a", "b"], {}, board)
    assert columns == {"a": 0, "b": 1}
    board.row(1)[1] = 3  # something at the replica of column 0
    columns = assign_columns(["b"], columns, board)
    assert assign_columns(["b", "c"], columns, board) == {"b": 1, "c": 2}
    board.clear(1)
    assert assign_columns(["b", "c"], columns, board) == {"b": 1, "c": 0}


def test_targets_beyond_the_board_have_no_column() -> None:
    names = [f"replica-{number}" for number in range(COLUMNS + 5)]
    assert len(assign_columns(names, {}, SharedBoard.create(1))) == COLUMNS


async def both_know(router: Process, count: int) -> None:
    """Wait until each of two workers knows how many requests run."""

    async def know() -> bool:
        shown = [await router.admin("POST", "/admin/explain", json=EXPLAIN) for _ in range(2)]
        return all(sum(one["running"] for one in explained["candidates"]) == count for _, explained in shown)

    await router.until(know, f"both workers to know of {count} requests")


async def test_two_workers_spread_a_hot_prefix_by_their_common_load(four: list[FakeReplica], tmp_path: Path) -> None:
    held = Held()
    for replica in four:
        replica.script = held
    hot = config(four, settings=PrefixHashSettings(slack_s=0))
    async with serving(tmp_path, hot, "--workers=2") as router, AsyncExitStack() as stack:
        workers = set()
        for count in range(1, 25):
            client = await stack.enter_async_context(connect(router.port))
            await client.send(post(CHAT))
            head = await client.read_until(b"\n\n")
            workers.add(head.lower().partition(b"x-request-id: ")[2][:16])
            await both_know(router, count)
        assert len(workers) == 2
        spread = Counter({replica.name: len(replica.calls) for replica in four})
        assert max(spread.values()) <= 8  # 6 each; by each one's own half alone it may be 10 and more
        assert sum(spread.values()) == 24
        _, shown = await router.admin("GET", "/admin/replicas")
        assert {one["name"]: one["running"] for one in shown["replicas"]} == spread
        held.go.set()


async def test_max_in_flight_holds_for_all_workers_together(four: list[FakeReplica], tmp_path: Path) -> None:
    held = Held()
    four[0].script = held
    few = config(four[:1], limits=Limits(max_in_flight=6))
    async with serving(tmp_path, few, "--workers=2") as router, AsyncExitStack() as stack:
        for count in range(1, 7):
            client = await stack.enter_async_context(connect(router.port))
            await client.send(post(CHAT))
            await four[0].wait_calls(count)

        await both_know(router, 6)
        assert {(await router.chat()).status for _ in range(16)} == {503}
        assert len(four[0].calls) == 6
        held.go.set()
