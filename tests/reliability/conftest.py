"""Fixtures of the control plane's reliability tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.models import Pool, RoutingPolicy
from controlplane.services.fleet.pools import create_pool
from tests.reliability.migrating import migrated_database


@pytest.fixture
def pool(db) -> Pool:
    """The pool ``default`` with an active round_robin policy and no replicas."""
    return create_pool("default", strategy="round_robin")


@pytest.fixture
def policy(pool: Pool) -> RoutingPolicy:
    return pool.policies.get(group=None)


@pytest.fixture(scope="session")
def migrated(postgres: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Name of a migrated database, to be copied."""
    with migrated_database(postgres, tmp_path_factory.mktemp("migrated")) as name:
        yield name
