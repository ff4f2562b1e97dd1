"""Routers exchange their state through a real Valkey, and through servers that fail."""

from __future__ import annotations

import os
import random
import signal
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis

from controlplane.stack.servers import valkey_child
from routing.balancing.load_tracker import LoadTracker
from routing.balancing.residency import Residency
from routing.sharing import transports
from routing.sharing.exchange import Exchange
from routing.sharing.transports import MAX_UNACKNOWLEDGED, ServerTransport
from routing.types import TargetId
from tests.conftest import running
from tests.routing.building import until

A, B = TargetId("a"), TargetId("b")
SECRET, OTHER_SECRET = "5e" * 16, "00" * 16


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a connection may take longer, and so may messages."""
    monkeypatch.setattr(transports, "CONNECT_S", 10.0)
    monkeypatch.setattr(transports, "REPLACE_S", 1000.0)


@pytest.fixture
def url(valkey: str) -> str:
    return f"unix://{urlsplit(valkey).path}"


@pytest.fixture
def commands(url: str) -> Iterator[Redis]:
    with Redis.from_url(url) as redis:
        yield redis


class Router:
    """The shared part of one router process."""

    def __init__(self, url: str, number: int, secret: str = SECRET) -> None:
        self.loads, self.residency = LoadTracker(), Residency(64)
        for target in (A, B):
            self.residency.add_replica(target)
        self.exchange = Exchange(ServerTransport(url))
        self.exchange.bind(f"{number:08x}{number:08x}", self.loads, self.residency)
        self.exchange.configure(secret, [A, B])

    def send(self, target: TargetId, tokens: int, prompt: array[int]) -> Any:
        return self.loads.dispatch(target, tokens, self.residency.insert(target, prompt, self.loads.clock()))

    @property
    def seen(self) -> list[tuple[int, int]]:
        return [(self.loads.load(name).remote_running, self.loads.load(name).remote_tokens) for name in (A, B)]


Start = Callable[..., Router]


@pytest.fixture
async def start(url: str) -> AsyncIterator[Start]:
    with ExitStack() as stack:

        def _start(number: int, secret: str = SECRET, at: str = url) -> Router:
            router = Router(at, number, secret)
            stack.callback(router.exchange.close)
            return router

        yield _start


async def until_peers(*routers: Router) -> None:
    await until(lambda: all(router.exchange.peers == len(routers) - 1 for router in routers))


def prompt(seed: int) -> array[int]:
    chance = random.Random(seed)
    return array("Q", [chance.getrandbits(64) for _ in range(20)])


async def test_routers_know_each_others_loads_and_prompts(start):
    one, other = start(1), start(2)
    await until_peers(one, other)
    await until(lambda: one.residency.placed is not None)

    ticket = one.send(A, 1000, prompt(1))
    ticket.record_first_byte()
    await until(lambda: other.seen[0] == (1, 0))
    known = other.residency.match(prompt(1)).blocks
    ticket.end()
    await until(lambda: other.seen[0] == (0, 0))

    assert known == 20
    assert one.seen == [(0, 0), (0, 0)]
    assert (one.exchange.errors, other.exchange.errors) == ({}, {})


async def test_a_router_that_joins_learns_the_prompts_that_were_placed_before(start):
    one, other = start(1), start(2)
    await until_peers(one, other)
    await until(lambda: one.residency.placed is not None)
    one.send(A, 0, prompt(1))
    await until(lambda: other.residency.match(prompt(1)).blocks == 20)

    new = start(3)

    await until(lambda: new.residency.match(prompt(1)).blocks == 20)


async def test_a_router_that_leaves_takes_its_load_with_it(start):
    one, other = start(1), start(2)
    await until_peers(one, other)
    one.send(A, 0, prompt(1))
    await until(lambda: other.seen[0][0] == 1)

    one.exchange.close()

    await until(lambda: other.seen[0] == (0, 0) and not other.exchange.peers)


async def test_a_router_that_is_alone_publishes_that_it_is_alive_and_no_prompts(start):
    router = start(1)
    await until(lambda: router.exchange.age_s is not None)
    for number in range(50):
        router.send(A, 10, prompt(number))
    await until(lambda: router.exchange.published > 3)

    assert router.residency.placed is None
    assert router.exchange.published_bytes < 200 * router.exchange.published


async def test_routers_of_other_fleets_are_no_peers(start):
    one, other = start(1), start(2, OTHER_SECRET)
    one.send(A, 0, prompt(1))
    await until(lambda: one.exchange.published > 5 < other.exchange.published)

    assert (one.exchange.peers, other.exchange.peers) == (0, 0)
    assert other.exchange.received == 0


async def test_a_router_that_changes_its_secret_joins_the_other_fleet(start):
    one, other = start(1), start(2, OTHER_SECRET)
    await until(lambda: one.exchange.age_s is not None and other.exchange.age_s is not None)

    other.exchange.configure(SECRET, [A, B])

    await until_peers(one, other)


async def test_garbage_on_the_channel_is_counted_and_changes_nothing(start, commands):
    one, other = start(1), start(2)
    await until_peers(one, other)
    one.send(A, 0, prompt(1))
    await until(lambda: other.seen[0][0] == 1)
    chance = random.Random("garbage")
    [channel] = commands.pubsub_channels("warmpath-state:*")
    own = (bytes(3) + b"\x01") * 2
    for size in (0, 1, 15, 16, 40, 1000, 3 << 20):
        commands.publish(channel, chance.randbytes(size))
        commands.publish(channel, own + chance.randbytes(size))

    await until(lambda: other.exchange.errors["message"] >= 13)
    ticket = one.send(B, 0, prompt(2))
    await until(lambda: other.seen == [(1, 0), (1, 0)])

    assert ticket.running
    assert set(other.exchange.errors) == {"message"}


async def test_a_flushed_or_full_server_costs_nothing(start, commands):
    one, other = start(1), start(2)
    await until_peers(one, other)
    commands.flushall()
    commands.config_set("maxmemory", 1)
    try:
        one.send(A, 0, prompt(1))
        await until(lambda: other.seen[0][0] == 1)
    finally:
        commands.config_set("maxmemory", 0)

    assert (one.exchange.errors, other.exchange.errors) == ({}, {})


class Server:
    """A Valkey of its own, which a test may stop, pause and start again."""

    def __init__(self, folder: Path) -> None:
        self._child = valkey_child(folder / "socket")
        self.url = f"unix://{folder / 'socket'}"
        self._running: Any = None

    def start(self) -> None:
        self._running = running(self._child)
        self._running.__enter__()

    def stop(self) -> None:
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None


@pytest.fixture
def server(short_dir: Path, tmp_path: Path) -> Iterator[Server]:
    folder = short_dir / f"shared-{tmp_path.name[-20:]}"
    folder.mkdir()
    server = Server(folder)
    server.start()
    yield server
    server.stop()


async def test_without_the_server_a_router_decides_alone_and_comes_back_by_itself(start, server):
    one, other = start(1, at=server.url), start(2, at=server.url)
    await until_peers(one, other)
    one.send(A, 0, prompt(1))
    await until(lambda: other.seen[0][0] == 1)

    server.stop()
    await until(lambda: not other.exchange.peers and not one.exchange.peers)
    alone = other.seen
    await until(lambda: other.residency.placed is None)
    server.start()
    await until_peers(one, other)
    await until(lambda: other.seen[0][0] == 1)

    assert alone == [(0, 0), (0, 0)]
    assert set(other.exchange.errors) <= {"connection", "publish"}


@contextmanager
def paused(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_a_paused_server_costs_the_shared_view_and_bounded_memory(start, server):
    one, other = start(1, at=server.url), start(2, at=server.url)
    await until_peers(one, other)
    one.send(A, 0, prompt(1))
    await until(lambda: other.seen[0][0] == 1)
    with Redis.from_url(server.url) as redis:
        pid = redis.info("server")["process_id"]

    with paused(pid):
        await until(lambda: not other.exchange.peers)
        before = one.exchange.published
        await until(lambda: one.exchange.transport.unacknowledged == MAX_UNACKNOWLEDGED)
        for number in range(20):
            one.send(B, 0, prompt(number))
        unsent = one.exchange.published - before
    await until_peers(one, other)
    await until(lambda: other.seen == [(1, 0), (20, 0)])

    assert unsent <= MAX_UNACKNOWLEDGED


async def test_a_refusal_of_the_server_is_logged_without_credentials_and_tried_again(start, server, caplog):
    with Redis.from_url(server.url) as redis:
        redis.execute_command("ACL", "SETUSER", "reader", "on", ">hidden", "+subscribe", "&warmpath-state:*")
        router = start(1, at=server.url.replace("unix://", "unix://reader:hidden@"))
        await until(lambda: router.exchange.errors["publish"] > 1)
        refused = router.exchange.published
        redis.execute_command("ACL", "SETUSER", "reader", "+publish")
        await until(lambda: router.exchange.age_s is not None)

    [line] = [record.getMessage() for record in caplog.records if "shared_state_lost" in record.getMessage()]
    assert "permission" in line
    assert "hidden" not in caplog.text
    assert refused < 20  # with a pause before each attempt
