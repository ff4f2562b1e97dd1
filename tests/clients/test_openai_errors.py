"""OpenAI's client: which exception each error raises, timeouts, and streams that the client closes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.servers import GONE, KEY, MODEL, OTHER_KEY, SLOW_KEY, Servers

LONG = 60_000  # tokens: several minutes


@pytest.fixture
def client(servers: Servers) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{servers.router}/v1", api_key=KEY, max_retries=0, timeout=30) as client:
        yield client


def arguments(text: str = "Hello.", **fields: Any) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4} | fields


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),  # of the replica
        ({"n": 1000}, openai.BadRequestError, "n"),  # of the router
        ({"model": "unknown"}, openai.NotFoundError, "model"),
        ({"model": GONE}, openai.InternalServerError, None),
        ({"messages": [{"role": "user", "content": "x" * (2 << 20)}]}, openai.APIStatusError, None),
    ],
)
def test_an_error_is_raised_as_its_class(
    client: OpenAI, fields: Any, error: type[openai.APIStatusError], param: str | None, is_streamed: bool
) -> None:
    with pytest.raises(error) as raised:
        client.chat.completions.create(**arguments(stream=is_streamed) | fields)
    status = {openai.BadRequestError: 400, openai.NotFoundError: 404, openai.InternalServerError: 503}
    assert raised.value.status_code == status.get(error, 413)
    assert raised.value.param == param
    assert raised.value.message
    if error is openai.InternalServerError:
        assert int(raised.value.response.headers["retry-after"]) > 0


def test_a_large_body_is_rejected_with_413_on_each_connection(client: OpenAI) -> None:
    for size in (2, 8, 32):
        with pytest.raises(openai.APIStatusError) as raised:
            client.chat.completions.create(**arguments("x" * (size << 20)))
        assert raised.value.status_code == 413
    assert client.chat.completions.create(**arguments()).choices


def test_an_unknown_key_is_an_authentication_error(servers: Servers, client: OpenAI) -> None:
    for key in (OTHER_KEY, "none"):
        with pytest.raises(openai.AuthenticationError) as raised:
            client.with_options(api_key=key).chat.completions.create(**arguments())
        assert raised.value.status_code == 401
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key=OTHER_KEY).chat.completions.create(**arguments("x" * (900 << 10)))


def test_a_rate_limit_is_an_error_that_the_client_may_wait_for(client: OpenAI) -> None:
    slow = client.with_options(api_key=SLOW_KEY)
    slow.with_options(max_retries=5).chat.completions.create(**arguments())  # empties the burst, whatever ran before
    with pytest.raises(openai.RateLimitError) as raised:
        slow.chat.completions.create(**arguments())
    assert 0 < int(raised.value.response.headers["retry-after"]) <= 2
    # The client retries after the time in Retry-After.
    assert slow.with_options(max_retries=2).chat.completions.create(**arguments()).choices


def test_a_replica_that_fails_is_replaced_without_the_client_noticing(client: OpenAI, servers: Servers) -> None:
    servers.replicas[0].fault(kind="refuse", status=503)
    try:
        for number in range(6):
            assert client.chat.completions.create(**arguments(f"Number {number}")).choices
    finally:
        servers.replicas[0].fault(kind="none")


def test_an_engine_that_crashes_in_a_stream_is_an_api_error(client: OpenAI, servers: Servers) -> None:
    for how in ("engine", "connection"):
        for replica in servers.replicas:
            replica.fault(kind="crash_after_chunks", chunks=3, how=how)
        try:
            with pytest.raises(openai.APIError):
                list(client.chat.completions.create(**arguments(stream=True, max_tokens=20)))
        finally:
            for replica in servers.replicas:
                replica.fault(kind="none")


# --- clients that disconnect ---


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_timeout_ends_the_generation(client: OpenAI, servers: Servers, is_streamed: bool) -> None:
    for replica in servers.replicas:
        replica.fault(kind="slow", factor=2000)
    try:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).chat.completions.create(**arguments(stream=is_streamed, max_tokens=LONG))
    finally:
        for replica in servers.replicas:
            replica.fault(kind="none")
    servers.wait_until_idle()


def test_a_stream_that_is_closed_ends_the_generation(client: OpenAI, servers: Servers) -> None:
    with client.chat.completions.create(**arguments(stream=True, max_tokens=LONG)) as stream:
        assert len([chunk for chunk, _ in zip(stream, range(5), strict=False)]) == 5
        assert servers.running() == 1
    servers.wait_until_idle()
    assert client.chat.completions.create(**arguments()).choices


async def test_a_task_that_is_cancelled_ends_the_generation(servers: Servers) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in await client.chat.completions.create(**arguments(stream=True, max_tokens=LONG)):
            started.set()

    async with AsyncOpenAI(base_url=f"{servers.router}/v1", api_key=KEY, max_retries=0) as client:
        tasks = [asyncio.create_task(read()) for _ in range(4)]
        async with asyncio.timeout(20):
            await started.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(servers.wait_until_idle)
        assert (await client.chat.completions.create(**arguments())).choices
