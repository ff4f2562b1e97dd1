"""Routers that announced themselves, and the tasks that push to them, run in this process."""

import pytest

from controlplane.services.routers import announce
from tests.fakes.fake_router import FakeRouter


@pytest.fixture
def start_router():
    """Start a fake router and let it announce itself."""
    running = []

    def start(name="router-1") -> FakeRouter:
        router = FakeRouter(name)
        running.append(router.__enter__())
        announce(**router.announcement())
        return router

    yield start
    for router in running:
        router.__exit__()
