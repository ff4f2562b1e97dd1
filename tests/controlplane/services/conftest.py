"""Fixtures of rollout tests."""

import pytest

from tests.controlplane.rollouts import ack, start_routers


@pytest.fixture
def second(django_user_model):
    """A second user who may approve."""
    return django_user_model.objects.create_user("ada", password="a long enough password", is_superuser=True)


@pytest.fixture
def routers(pool):
    """Two routers that run the current configuration."""
    both = start_routers("router-1", "router-2")
    ack()
    return both
