"""Concurrent pushes, also to routers that hang; real commits and real threads."""

import time

import pytest

from controlplane.celery import _broker
from controlplane.models import Event, Router
from controlplane.push import client
from controlplane.services.fleet.replicas import add_replica
from controlplane.tasks import reconcile_routers
from tests.conftest import wait_until
from tests.controlplane.push.pushing import newest, publish, row
from tests.controlplane.threads import in_thread

pytestmark = pytest.mark.django_db(transaction=True)
WAIT_S = 60


@pytest.fixture(autouse=True)
def long_deadline(monkeypatch):
    """A push that hangs does so until the test releases it, however slow the machine is."""
    monkeypatch.setattr(client, "DEADLINE_S", 10 * WAIT_S)


def test_a_router_that_hangs_delays_no_other(start_router, pool):
    hanging, *healthy = [start_router(f"router-{number:02}") for number in range(16)]
    hanging.fault = lambda: "hang"
    with in_thread(reconcile_routers) as reconciling:
        caught_up = Router.objects.filter(running_number=newest())
        wait_until(lambda: caught_up.count() == len(healthy), WAIT_S, "the other routers")
        assert reconciling.is_alive()
        hanging.release.set()
    assert row(hanging).push_failures == 1


def test_two_reconcilers_push_to_a_router_once_and_record_one_event(start_router, pool):
    routers = [start_router(f"router-{number}") for number in range(8)]
    with in_thread(reconcile_routers), in_thread(reconcile_routers), in_thread(reconcile_routers):
        pass
    assert [router.pushes for router in routers] == [[newest()]] * 8
    assert Event.objects.filter(kind="config_applied").count() == 8


def test_a_newer_configuration_does_not_wait_for_a_push_that_hangs(start_router, pool):
    router = start_router()
    older = newest()
    faults = iter(["hang"])
    router.fault = lambda: next(faults, None)
    with in_thread(reconcile_routers):
        wait_until(lambda: router.pushes == [older], WAIT_S, "the first push")
        add_replica(pool, name="r1", url="http://10.0.0.1:8000")
        reconcile_routers()
        assert router.revision == newest() == older + 1
        router.release.set()
    assert row(router).running_number == older + 1


def test_publishing_succeeds_without_a_broker_and_the_reconciler_pushes(start_router, policy, caplog):
    router = start_router()
    _broker.record_recovery(time.monotonic())
    publish(policy)
    assert any("tasks cannot be sent to the broker" in record.getMessage() for record in caplog.records)
    reconcile_routers()
    assert router.revision == newest()
