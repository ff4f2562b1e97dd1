"""Who takes part in a rollout."""

import pytest

from tests.controlplane.rollouts import ack, start_routers


@pytest.fixture
def second(django_user_model):
    """Somebody else who may approve."""
    return django_user_model.objects.create_user("ada", password="a long enough password", is_superuser=True)


@pytest.fixture
def routers(pool):
    """Two that run what there is."""
    both = start_routers("router-1", "router-2")
    ack()
    return both
