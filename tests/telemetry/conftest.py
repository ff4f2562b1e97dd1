"""Shared fixtures: a pool, partitions, and scripted servers."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

import pytest

from controlplane.models import Pool, Replica
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from telemetry.models import Channel
from telemetry.services.figures.overview import Fleet, Subject
from telemetry.services.notifications.channels import create_channel
from telemetry.storage.partitions import drop_before
from tests.fakes.fake_metrics_server import FakeMetricsServer, serving
from tests.fakes.fake_webhook_receiver import FakeWebhookReceiver, receiving

T0 = datetime(2031, 3, 4, 12, tzinfo=UTC)  # a due time of every interval


def fleet_of(*pools: Pool) -> Fleet:
    """What figures of some pools, or of all, are computed from."""
    return Fleet(Subject(list(pools) or None), T0 - timedelta(hours=1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a module's tests without ``once_for_module`` first, because they expect an empty database."""
    for path in {item.path for item in items if _shares_rows(item)}:
        places = [place for place, item in enumerate(items) if item.path == path]
        for place, item in zip(places, sorted((items[place] for place in places), key=_shares_rows), strict=True):
            items[place] = item


def _shares_rows(item: pytest.Item) -> bool:
    return "once_for_module" in getattr(item, "fixturenames", ())


@pytest.fixture
def pool(db) -> Pool:
    """The pool ``chat``, without replicas."""
    return create_pool("chat")


@pytest.fixture
def r1(pool) -> Replica:
    """A replica of the pool."""
    return add_replica(pool, name="r1", url="http://127.0.0.1:9101")


@pytest.fixture
def channel(db) -> Channel:
    """A webhook for all alerts."""
    return create_channel("ops", config={"url": "https://hooks.example/secret-path"})


@pytest.fixture
def no_days(db) -> None:
    """Drops all partitions until the test ends, also those that other tests committed."""
    drop_before(date.max)


@pytest.fixture
def metrics_server() -> Iterator[FakeMetricsServer]:
    """A replica's /metrics over loopback, scripted by the test."""
    with serving() as server:
        yield server


@pytest.fixture
def receiver() -> Iterator[FakeWebhookReceiver]:
    """A webhook receiver over loopback."""
    with receiving() as server:
        yield server
