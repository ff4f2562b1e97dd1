"""What a health check makes of whatever answers it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from routing.balancing.health import HealthRegistry
from routing.health.checks import MIN_INTERVAL_S, CheckTarget, HealthChecks, check_once
from routing.schema import HealthCheck
from routing.types import ReplicaId
from routing.upstream.pool import Address
from tests.fakes.replica import FakeReplica


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", None),
        (b"HTTP/1.0 200\r\n\r\n", None),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "health check returned status 503"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "its response is not HTTP"),
        (b"HTTP/1.1 well\r\n\r\n", "its response is not HTTP"),
        (b"HTTP/1.1 200", "its response is not HTTP"),
        (b"", "its response is not HTTP"),
        (b"x" * 200_000, "its response is not HTTP"),
    ],
)
async def test_whatever_answers_a_health_check_is_a_finding(answer: bytes, finding: str | None) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = CheckTarget("a", Address(f"http://127.0.0.1:{port}"), HealthCheck(timeout_s=5.0))
        assert await check_once(target) == finding


async def test_a_host_without_a_name_to_resolve_is_a_finding() -> None:
    target = CheckTarget("a", Address("http://a..b:80"), HealthCheck())
    assert await check_once(target) == "its host name cannot be resolved"


@asynccontextmanager
async def checked(replica: FakeReplica, check: HealthCheck) -> AsyncIterator[tuple[HealthChecks, HealthRegistry]]:
    """Health checks of one replica, which has answered the first."""
    book = HealthRegistry()
    checks = HealthChecks(book, lambda _: None, lambda _: 0.0)
    checks.configure([CheckTarget(replica.name, Address(replica.url), check)])
    try:
        await until(lambda: checks.status(replica.name).is_up is True)
        yield checks, book
    finally:
        checks.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("failures", [1, 2])
async def test_connections_that_fail_at_one_moment_take_no_replica_down_that_is_well(
    failures: int, replica: FakeReplica
) -> None:
    async with checked(replica, HealthCheck(failures=failures, interval_s=3600)) as (checks, book):
        for _ in range(10):
            checks.on_connect_failed(replica.name)
        assert book.is_up(ReplicaId(replica.name))
        await until(lambda: replica.probes == 2)
        checks.on_connect_failed(replica.name)
        await until(lambda: replica.probes == 3)
        assert book.epoch == 0, "nobody ever heard of it"


async def test_connections_that_fail_and_a_check_that_finds_the_same_take_it_down_at_once(replica: FakeReplica) -> None:
    async with checked(replica, HealthCheck(failures=2, interval_s=3600)) as (checks, book):
        replica.kill()
        checks.on_connect_failed(replica.name)
        await until(lambda: not book.is_up(ReplicaId(replica.name)))


async def test_requests_that_fail_one_after_the_other_have_it_asked_ten_times_a_second_at_most(
    replica: FakeReplica,
) -> None:
    async with checked(replica, HealthCheck(interval_s=3600)) as (checks, _):
        begun = time.monotonic()
        for number in range(2, 5):
            while replica.probes < number:
                checks.request_check(replica.name)
                await asyncio.sleep(0)
        assert time.monotonic() - begun >= 2 * MIN_INTERVAL_S


async def test_connections_that_fail_and_one_check_are_two_findings_however_many_they_are(replica: FakeReplica) -> None:
    async with checked(replica, HealthCheck(failures=3, interval_s=3600)) as (checks, book):
        replica.kill()
        for _ in range(10):
            checks.on_connect_failed(replica.name)
        await until(lambda: checks.status(replica.name).failures == 2)
        assert book.is_up(ReplicaId(replica.name))
