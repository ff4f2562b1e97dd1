"""Sixteen real routers run a published configuration: quickly without faults, eventually with many."""

import time

import pytest

from controlplane.models import ConfigSnapshot, Router
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.tasks import reconcile_routers
from tests.fakes.fault_proxy import Fault
from tests.pace import slowdown
from tests.reliability.fleet import fleet
from tests.reliability.stand import soon

pytestmark = pytest.mark.django_db(transaction=True)
ROUTERS = 16
PUBLICATIONS = 5
QUICK_S, WITH_FAULTS_S = 2.0, 30.0
HEARTBEAT_S = 10.0


def publish(policy, number):
    return publish_revision(save_draft(policy, {"strategy": "prefix_hash", "slack_s": 1.0 + number / 100}).pk)


def newest():
    return ConfigSnapshot.objects.first().number


def test_a_publication_runs_on_every_router_within_two_seconds(policy, tmp_path, settings):
    """Calls the worker's task directly, as the wake-up after a publication would. The quickest counts."""
    durations_s, before = [], slowdown()
    with fleet(tmp_path, ROUTERS, settings.ROUTER_ADMIN_TOKEN) as routers:
        for router in routers:
            router.announce()
        reconcile_routers()
        for number in range(PUBLICATIONS):
            started = time.monotonic()
            rollout = publish(policy, number)
            reconcile_routers()
            durations_s.append(time.monotonic() - started)
            rollout.refresh_from_db()
            assert rollout.state == "complete"
            assert {router.revision for router in routers} == {newest()}
    assert min(durations_s) < QUICK_S * max(before, slowdown())


def test_with_faults_all_routers_run_it_within_half_a_minute(policy, tmp_path, settings):
    """A third of all connections is refused, cut in the middle of the response, or slow."""
    faults = [Fault.NONE] * 6 + [Fault.REFUSE, Fault.RESET, Fault.CLOSE, Fault.TRICKLE, Fault.DELAY]
    with fleet(tmp_path, ROUTERS, settings.ROUTER_ADMIN_TOKEN, faults=faults, seed=100) as routers:
        highest = dict.fromkeys(routers, 0)
        for router in routers:
            router.announce()
        for number in range(5):
            publish(policy, number)
            reconcile_routers()
            for router in routers:
                assert (router.revision or 0) >= highest[router], "an older configuration replaced a newer one"
                highest[router] = router.revision or 0
        started = time.monotonic()
        announced_at = dict.fromkeys(routers, started)

        def converged() -> bool:
            for router in routers:
                if time.monotonic() - announced_at[router] > HEARTBEAT_S:
                    announced_at[router] = time.monotonic()
                    router.announce()
            reconcile_routers()
            return Router.objects.filter(running_number=newest()).count() == ROUTERS

        soon(converged, WITH_FAULTS_S, "all routers to run the newest configuration", every_s=0.5)
        assert {router.revision for router in routers} == {newest()}
        assert sum(sum(router.proxy.injected.values()) for router in routers) > 10, "no fault was injected"
