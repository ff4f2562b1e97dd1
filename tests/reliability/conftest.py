"""What tests of the control plane's reliability begin with."""

import pytest

from controlplane.models import Pool, RoutingPolicy
from controlplane.services.fleet.pools import create_pool


@pytest.fixture
def pool(db) -> Pool:
    """The pool ``default`` with a live round_robin policy and no replicas."""
    return create_pool("default", strategy="round_robin")


@pytest.fixture
def policy(pool: Pool) -> RoutingPolicy:
    """The pool's own policy."""
    return pool.policies.get(group=None)
