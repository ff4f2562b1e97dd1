"""A control plane to be hurt."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.models import Pool, RoutingPolicy
from controlplane.services.fleet.pools import create_pool
from tests.reliability.stand import Stand


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket, readable by the account that servers run as."""
    made = Path(tempfile.mkdtemp(prefix="wpr-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def stand(folder: Path) -> Iterator[Stand]:
    """PostgreSQL, Valkey, web and worker of a file's own, which its tests leave as they found them."""
    stand = Stand(folder)
    try:
        stand.rise()
        yield stand
    finally:
        stand.end()


@pytest.fixture
def pool(db) -> Pool:
    """The pool ``default`` with a live round_robin policy and no replicas."""
    return create_pool("default", strategy="round_robin")


@pytest.fixture
def policy(pool: Pool) -> RoutingPolicy:
    """The pool's own policy."""
    return pool.policies.get(group=None)
