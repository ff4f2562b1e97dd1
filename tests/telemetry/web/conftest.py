"""A signed-in client, and a fleet with a history."""

from datetime import UTC, datetime
from functools import partial

import pytest
import time_machine
from django.contrib.auth.models import User
from django.test import Client

from controlplane.models import Pool
from tests.fleet_history import warm_fleet

NOW = datetime(2031, 3, 4, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def noon():
    """The clock stands at noon."""
    with time_machine.travel(NOW, tick=False):
        yield NOW


@pytest.fixture
def operator(db, django_user_model) -> User:
    """A user who may do everything."""
    return django_user_model.objects.create_user("olga", is_superuser=True)


@pytest.fixture
def visitor(client: Client, noon, operator) -> Client:
    """A client that is signed in."""
    client.force_login(operator)
    return client


@pytest.fixture(scope="module")
def module_fleet(once_for_module) -> int:
    """The id of the pool of ``fleet``, stored once for a module."""
    with time_machine.travel(NOW, tick=False):
        return once_for_module(partial(warm_fleet, NOW, seconds=600, replicas=4)).pk


@pytest.fixture
def fleet(visitor, noon, module_fleet) -> Pool:
    """Four replicas, measured for ten minutes until noon; a policy went live five minutes ago."""
    return Pool.objects.get(pk=module_fleet)
