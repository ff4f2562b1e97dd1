"""Replicas for routers that run in their own processes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.replica import FakeReplica, fake_replicas


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with fake_replicas(1) as replicas:
        yield replicas[0]


@pytest.fixture
async def four() -> AsyncIterator[list[FakeReplica]]:
    async with fake_replicas(4) as replicas:
        yield replicas
