"""Fixtures with the rows that most tests of the control plane need."""

import copy

import pytest
import time_machine
from django.utils import timezone

from controlplane.models import Pool, Replica, RoutingPolicy
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica


@pytest.fixture
def operator(db, django_user_model):
    """A superuser."""
    return django_user_model.objects.create_user("olga", password="a long enough password", is_superuser=True)


@pytest.fixture(scope="module")
def stored_pool(once_for_module) -> Pool:
    """The pool ``default``, for modules whose ``usefixtures`` names this: stored once for all their tests."""
    return once_for_module(create_default_pool)


def create_default_pool() -> Pool:
    return create_pool("default", strategy="round_robin")


@pytest.fixture
def pool(request, db) -> Pool:
    """The pool ``default`` with an active round_robin policy and no replicas."""
    if "stored_pool" in request.fixturenames:
        return copy.deepcopy(request.getfixturevalue("stored_pool"))
    return create_default_pool()


@pytest.fixture
def replica(pool: Pool) -> Replica:
    """One replica of the pool."""
    return add_replica(pool, name="r1", url="http://10.0.0.1:8000")


@pytest.fixture
def policy(pool: Pool) -> RoutingPolicy:
    """The pool's own policy."""
    return pool.policies.get(group=None)


@pytest.fixture
def time_machine_at():
    """Move the clock ahead of the real one by some seconds; it continues to tick."""
    travels = []

    def move(seconds: float) -> None:
        for travel in travels:
            travel.stop()
        travels[:] = [time_machine.travel(timezone.now() + timezone.timedelta(seconds=seconds), tick=True)]
        travels[0].start()

    yield move
    for travel in travels:
        travel.stop()
