"""The router's event loop, fake replicas, and a store of response caches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest
import uvloop
from redis import Redis

from routing.response_cache import store as store_module
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
def stored(valkey: str, monkeypatch: pytest.MonkeyPatch) -> Redis:
    """The store of the routers of this test, empty. On a busy machine a lookup may take longer than its budget."""
    for name in ("LOOKUP_S", "WRITE_S", "CONNECT_S"):
        monkeypatch.setattr(store_module, name, 5.0)
    url = f"unix://{urlsplit(valkey).path}?db=9"
    monkeypatch.setenv("WARMPATH_ROUTER_CACHE_URL", url)
    store = Redis.from_url(url)
    store.flushdb()
    return store
