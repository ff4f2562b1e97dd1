"""The event loop of the product, fake replicas, and a collector of traces for a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvloop

from tests.fakes.otlp_receiver import OtlpReceiver, receiving
from tests.fakes.replica import FakeReplica, fake_replicas


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with fake_replicas(1) as replicas:
        yield replicas[0]


@pytest.fixture
async def two() -> AsyncIterator[list[FakeReplica]]:
    async with fake_replicas(2) as replicas:
        yield replicas


@pytest.fixture
async def three() -> AsyncIterator[list[FakeReplica]]:
    async with fake_replicas(3) as replicas:
        yield replicas


@pytest.fixture
async def four() -> AsyncIterator[list[FakeReplica]]:
    async with fake_replicas(4) as replicas:
        yield replicas


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """A collector that gets every request that has no parent."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1")
        yield receiver
