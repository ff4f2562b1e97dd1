"""A control plane to be hurt, and those who use it."""

from collections.abc import Iterator

import httpx
import pytest

from tests.reliability.stand import Stand, standing
from tests.reliability.watched import Watched, watched


@pytest.fixture(scope="package")
def stand() -> Iterator[Stand]:
    """PostgreSQL, Valkey, web and worker, which each test leaves as it found them."""
    with standing() as stand:
        yield stand


@pytest.fixture(scope="package")
def rest(stand: Stand) -> Iterator[httpx.Client]:
    """A script."""
    with stand.rest() as client:
        yield client


@pytest.fixture(scope="package")
def person(stand: Stand) -> Iterator[httpx.Client]:
    """Somebody with a browser."""
    with stand.browser() as client:
        yield client


@pytest.fixture(scope="module")
def fleet(stand: Stand, rest: httpx.Client) -> Iterator[Watched]:
    """A fleet that falls ill and recovers at a word, and a receiver."""
    with watched(stand, rest) as fleet:
        yield fleet
