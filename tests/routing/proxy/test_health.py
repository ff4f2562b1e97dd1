"""What a health check makes of whatever answers it."""

from __future__ import annotations

import asyncio

import pytest

from routing.proxy.replicas.health import Target, probe
from routing.proxy.replicas.link import Address
from routing.schema import HealthCheck


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", None),
        (b"HTTP/1.0 200\r\n\r\n", None),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "health check answered 503"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "its answer is not HTTP"),
        (b"HTTP/1.1 well\r\n\r\n", "its answer is not HTTP"),
        (b"HTTP/1.1 200", "its answer is not HTTP"),
        (b"", "its answer is not HTTP"),
        (b"x" * 200_000, "its answer is not HTTP"),
    ],
)
async def test_whatever_answers_a_health_check_is_a_finding(answer: bytes, finding: str | None) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = Target("a", Address(f"http://127.0.0.1:{port}"), HealthCheck(timeout_s=5.0))
        assert await probe(target) == finding


async def test_a_host_without_a_name_to_resolve_is_a_finding() -> None:
    target = Target("a", Address("http://a..b:80"), HealthCheck())
    assert await probe(target) == "its host name cannot be resolved"
