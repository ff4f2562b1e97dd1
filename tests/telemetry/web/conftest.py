"""A signed-in client, and a fleet with a history."""

from datetime import UTC, datetime

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
    """A person who may do everything."""
    return django_user_model.objects.create_user("olga", is_superuser=True)


@pytest.fixture
def visitor(client: Client, noon, operator) -> Client:
    """A client that is signed in."""
    client.force_login(operator)
    return client


@pytest.fixture
def fleet(visitor, noon) -> Pool:
    """Four replicas, measured for ten minutes until noon; a policy went live five minutes ago."""
    return warm_fleet(noon, seconds=600, replicas=4)
