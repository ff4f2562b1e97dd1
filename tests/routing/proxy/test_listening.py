"""Sockets that share a port, and how some of them leave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from routing.http import sockets
from routing.http.sockets import accept_queue_length, bind, close_listeners, divert_new_connections

Sockets = list[socket.socket]


@contextmanager
def connections(port: int, count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        yield


def accept_all(sockets: Sockets) -> list[int]:
    """How many each socket had."""
    counts = [accept_queue_length(one) for one in sockets]
    for one, count in zip(sockets, counts, strict=True):
        for _ in range(count):
            one.accept()[0].close()
    return counts


@contextmanager
def sharing(leaving: list[Sockets], staying: list[Sockets]) -> Iterator[tuple[int, Sockets, Sockets]]:
    groups = [one for [one] in leaving], [one for [one] in staying]
    try:
        for one in (*groups[0], *groups[1]):
            one.listen(128)
        yield groups[0][0].getsockname()[1], *groups
    finally:
        for one in (*groups[0], *groups[1]):
            one.close()


async def pair(leaving: int, staying: int) -> tuple[list[Sockets], list[Sockets]]:
    first = await bind("127.0.0.1", 0, count=leaving, reuse_port=False)
    return first, await bind("127.0.0.1", first[0][0].getsockname()[1], count=staying, reuse_port=True)


@pytest.mark.parametrize(("leaving", "staying"), [(1, 1), (2, 2), (1, 3), (3, 1)])
async def test_newcomers_go_to_those_who_stay_and_later_to_all_of_them(
    leaving: int, staying: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 0.0)
    with sharing(*await pair(leaving, staying)) as (port, old, new):
        with connections(port, 60):
            assert all(accept_all([*old, *new]))
        await divert_new_connections(old)
        with connections(port, 60):
            counts = accept_all(new)
            assert sum(counts) == 60
            assert all(counts)
        close_listeners(old)
        with connections(port, 90):
            counts = accept_all(new)
        assert sum(counts) == 90
        assert all(counts)


async def test_nobody_leaves_while_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HANDSHAKE_S", 0.0)
    with sharing(*await pair(1, 1)) as (port, old, _), connections(port, 60):
        assert accept_queue_length(old[0]) > 0
        leaving = asyncio.create_task(divert_new_connections(old))
        await asyncio.sleep(0)
        assert not leaving.done()
        accept_all(old)
        async with asyncio.timeout(5):
            await leaving


async def test_a_port_that_somebody_has_is_taken_only_beside_them() -> None:
    [[first]] = await bind("127.0.0.1", 0, count=1, reuse_port=False)
    first.listen(1)
    port = first.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        await bind("127.0.0.1", port, count=1, reuse_port=False)
    [[second]] = await bind("127.0.0.1", port, count=1, reuse_port=True)
    assert second.getsockname()[1] == port
    for one in (first, second):
        one.close()


async def test_every_address_of_a_name_has_its_sockets() -> None:
    slots = await bind("localhost", 0, count=2, reuse_port=False)
    assert len(slots) == 2
    assert len({one.family for one in slots[0]}) == len(slots[0])
    for one in (*slots[0], *slots[1]):
        one.close()


async def test_a_socket_that_cannot_be_had_leaves_none_of_the_others_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Sockets = []
    really_open = sockets._bound

    def open_two(*address: object, **options: bool) -> socket.socket:
        if len(opened) == 2:
            raise OSError("too many open files")
        opened.append(really_open(*address, **options))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(sockets, "_bound", open_two)
    with pytest.raises(OSError, match="too many"):
        await bind("127.0.0.1", 0, count=3, reuse_port=True)
    assert [one.fileno() for one in opened] == [-1, -1]
