"""The store of response caches: its connections, against a real Valkey and servers that fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from ssl import SSLContext
from urllib.parse import quote, urlsplit

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from redis import Redis
from redis.exceptions import ResponseError

from routing.response_cache import store as store_module
from routing.response_cache.memory import Entry
from routing.response_cache.store import FAILURES, FIRST_PAUSE_S, LAST_PAUSE_S, Pause, Store
from routing.response_cache.store_connection import MAX_LINE_BYTES, MAX_REPLY_BYTES, Address, Reply, StoreConnection
from tests.fakes.certificates import Authority
from tests.routing.building import until

CIPHER = AESGCM(bytes(32))
ENTRY = Entry(1.0, 2.0, False, False, b"\r\n$3\r\n" * 50_000, None, 7)
PASSWORD = "p@ss:word/"
DEADLINE_S = 10.0

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a command may take longer than its budget."""
    monkeypatch.setattr(store_module, "LOOKUP_S", 5.0)
    monkeypatch.setattr(store_module, "WRITE_S", 5.0)
    monkeypatch.setattr(store_module, "CONNECT_S", 5.0)


@asynccontextmanager
async def listening(serve: Serve, tls: SSLContext | None = None) -> AsyncIterator[int]:
    """A server on loopback; its port. Its connections end when those of the client have ended."""
    before = asyncio.all_tasks()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        async with asyncio.timeout(DEADLINE_S):
            while tasks := asyncio.all_tasks() - before:  # those of connections that are being accepted too
                await asyncio.wait(tasks)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = Store(url)
    try:
        yield store
    finally:
        await store.close()


async def hold(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Never reply."""
    while await reader.read(65_536):
        pass


async def reply(replies: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reply to the first bytes of a client, then never again."""
    await reader.read(65_536)
    writer.write(replies)
    await hold(reader, writer)


# --- what a URL says ---


@pytest.fixture
def user(valkey: str) -> Iterator[str]:
    """A user of the server who may only read and write names of this test; the URL of database 8."""
    path = urlsplit(valkey).path
    with Redis.from_url(f"unix://{path}") as admin:
        admin.acl_setuser(
            "cache", enabled=True, passwords=[f"+{PASSWORD}"], keys=["entry-*"], commands=["+get", "+set", "+select"]
        )
        yield f"unix://cache:{quote(PASSWORD, safe='')}@{path}?db=8"
        admin.acl_deluser("cache")


async def test_entries_are_written_and_read_as_the_user_and_in_the_database_of_the_url(user, valkey):
    async with opened(user) as store, opened(user) as other:
        store.put("entry-1", ENTRY, CIPHER, 60)
        await store.settle()
        found = [await other.get(name, CIPHER) for name in ("entry-1", "entry-2", "entry-1")]
        errors = store.errors + other.errors
    with Redis.from_url(f"unix://{urlsplit(valkey).path}?db=8") as admin:
        ttl_s = admin.ttl("entry-1")
        admin.delete("entry-1")

    assert found == [ENTRY, None, ENTRY]
    assert 0 < ttl_s <= 60
    assert not errors


async def test_a_user_who_is_rejected_gets_nothing_and_the_store_is_left_alone(user):
    async with opened(user.replace(quote(PASSWORD, safe=""), "wrong")) as store:
        found = [await store.get("entry-1", CIPHER) for _ in range(FAILURES)]
        is_up, asked = store.is_up, store.ask("entry-1", CIPHER, found.append)

    assert found == [None] * FAILURES
    assert (is_up, asked, store.errors["lookup"]) == (False, False, FAILURES)


async def test_a_store_with_tls_is_asked_if_its_certificate_is_trusted(tmp_path):
    authority = Authority(tmp_path)
    entry = CIPHER.encrypt(bytes(12), store_module._encode(ENTRY), b"entry-1")
    answer = partial(reply, b"$%d\r\n%b\r\n" % (12 + len(entry), bytes(12) + entry))
    async with listening(answer, authority.issue("store").server()) as port:
        async with opened(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.path}") as store:
            trusted = await store.get("entry-1", CIPHER)
        async with opened(f"rediss://127.0.0.1:{port}/0") as store:
            untrusted = await store.get("entry-1", CIPHER)
            errors = store.errors

    assert (trusted, untrusted) == (ENTRY, None)
    assert errors["connect"] == 1


# --- replies ---


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[StoreConnection, list[Reply]]]:
    """An open connection with three commands, and the replies to them so far."""
    replies: list[Reply] = []
    async with listening(hold) as port:
        connection = StoreConnection(Address("127.0.0.1", port, None, None, ()), 5.0, lambda _: None)
        await until(lambda: not connection.is_opening)
        for _ in range(3):
            connection.send(b"*1\r\n$4\r\nPING\r\n", replies.append)
        yield connection, replies
        connection.abort(ConnectionAbortedError())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_replies_are_complete_wherever_reads_end(size):
    data = b"$-1\r\n$9\r\na\r\n$2\r\nbc\r\n-ERR no\r\n"
    async with connected() as (connection, replies):
        for at in range(0, len(data), size):
            connection.data_received(data[at : at + size])

    assert replies[:2] == [None, b"a\r\n$2\r\nbc"]
    assert isinstance(replies[2], ResponseError)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$x\r\n",
        b"$%d\r\n" % (MAX_REPLY_BYTES + 1),
        b"+" + bytes(MAX_LINE_BYTES + 1),
        b"+OK\r\n+OK\r\n+OK\r\n+OK\r\n",
    ],
)
async def test_a_server_that_does_not_speak_the_protocol_is_disconnected(data):
    async with connected() as (connection, replies):
        connection.data_received(data)
        assert connection.is_lost

    assert len(replies) == 3
    assert all(isinstance(reply, ValueError) for reply in replies) or replies == [b"OK"] * 3


async def test_an_error_in_what_uses_a_reply_concerns_no_other_command():
    async with connected() as (connection, replies):
        connection.send(b"", lambda _: 1 / 0)
        connection.send(b"", replies.append)
        connection.data_received(b"+1\r\n+2\r\n+3\r\n+4\r\n+5\r\n")

    assert replies[:3] == [b"1", b"2", b"3"]
    assert isinstance(replies[3], ConnectionAbortedError)


async def test_after_a_lost_connection_the_next_command_opens_another():
    async with listening(partial(reply, b"$-1\r\n!\r\n")) as port, opened(f"redis://127.0.0.1:{port}/0") as store:
        found = [await store.get("entry-1", CIPHER) for _ in range(2 * FAILURES)]
        errors, is_up = store.errors.total(), store.is_up

    assert found == [None] * 2 * FAILURES
    assert (errors, is_up) == (0, True)


# --- failures ---


@asynccontextmanager
async def gate(port: int, is_open: asyncio.Event) -> AsyncIterator[int]:
    """A port that connects to another one, whose bytes flow once the gate is open."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_open.wait()
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            await asyncio.wait_for(asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer)), DEADLINE_S)
        finally:  # also after a reset, so that the server sees the end
            inner_writer.close()

    async with listening(serve) as gated:
        try:
            yield gated
        finally:
            is_open.set()


async def test_commands_that_wait_for_a_slow_connection_are_no_failures_of_the_store(tmp_path, monkeypatch):
    """A TLS handshake with a distant server takes longer than a lookup may."""
    authority, is_open = Authority(tmp_path), asyncio.Event()
    monkeypatch.setattr(store_module, "LOOKUP_S", 0.001)
    monkeypatch.setattr(store_module, "CONNECT_S", DEADLINE_S)
    async with (
        listening(partial(reply, b"$-1\r\n" * 2 * FAILURES), authority.issue("store").server()) as port,
        gate(port, is_open) as gated,
        opened(f"rediss://127.0.0.1:{gated}/0?ssl_ca_certs={authority.path}") as store,
    ):
        for _ in range(2 * FAILURES):
            await store.get("entry-1", CIPHER)
        was_up, timeouts = store.is_up, store.errors["timeout"]
        is_open.set()
        await until(lambda: store._lookups is not None and not store._lookups.is_opening)
        was_lost = store._lookups.is_lost

    assert (was_up, timeouts, was_lost) == (True, 2 * FAILURES, False)


async def test_a_store_that_cannot_be_connected_to_is_left_alone_after_some_attempts(monkeypatch):
    monkeypatch.setattr(store_module, "LOOKUP_S", 0.01)
    monkeypatch.setattr(store_module, "CONNECT_S", 0.1)
    async with listening(hold) as port, opened(f"rediss://127.0.0.1:{port}/0") as store:
        async with asyncio.timeout(DEADLINE_S):
            while store.is_up:
                assert await store.get("entry-1", CIPHER) is None

    assert store.errors["connect"]


async def test_a_store_that_hangs_keeps_no_commands(monkeypatch):
    monkeypatch.setattr(store_module, "LOOKUP_S", 0.01)
    async with listening(hold) as port, opened(f"redis://127.0.0.1:{port}/0") as store:
        await asyncio.gather(*(store.get(f"entry-{number}", CIPHER) for number in range(100)))
        connection = store._lookups

    assert connection.is_lost
    assert not connection._waiting
    assert store.errors.total() == 100


def test_only_failed_probes_make_the_pause_longer():
    pause = Pause()
    for _ in range(20 * FAILURES):
        pause.record_failure(0.0)
    asked = [pause.may_ask(at) for at in (0.9 * FIRST_PAUSE_S, FIRST_PAUSE_S, 1.1 * FIRST_PAUSE_S)]
    pause.record_failure(FIRST_PAUSE_S)
    asked += [pause.may_ask(at) for at in (2.9 * FIRST_PAUSE_S, 3 * FIRST_PAUSE_S)]
    now = 3 * FIRST_PAUSE_S
    for _ in range(10):
        pause.record_failure(now)
        now += LAST_PAUSE_S
        assert pause.may_ask(now)
    pause.record_success()

    assert asked == [False, True, False, False, True]
    assert not pause.is_open
