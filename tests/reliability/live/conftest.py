"""Fixtures: one running control plane, its clients, and a fleet."""

from collections.abc import Iterator

import httpx
import pytest

from tests.reliability.alerting_fleet import AlertingFleet, alerting_fleet
from tests.reliability.stand import Stand, running_stand


@pytest.fixture(scope="package")
def stand() -> Iterator[Stand]:
    """PostgreSQL, Valkey, web and worker; each test restores what it breaks."""
    with running_stand() as stand:
        yield stand


@pytest.fixture(scope="package")
def rest(stand: Stand) -> Iterator[httpx.Client]:
    with stand.rest() as client:
        yield client


@pytest.fixture(scope="package")
def browser(stand: Stand) -> Iterator[httpx.Client]:
    """A signed-in browser session."""
    with stand.browser() as client:
        yield client


@pytest.fixture(scope="module")
def fleet(stand: Stand, rest: httpx.Client) -> Iterator[AlertingFleet]:
    """A fleet whose hit rate falls and recovers on request, and a notification receiver."""
    with alerting_fleet(stand, rest) as fleet:
        yield fleet
