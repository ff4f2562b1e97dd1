"""Reverting a policy on its page, until every router runs the earlier settings."""

from __future__ import annotations

import time

import pytest
from django.test import Client

from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.tasks import reconcile_routers
from tests.pace import is_within
from tests.side_by_side import alone

pytestmark = pytest.mark.django_db
DEADLINE_S = 5.0  # from the click to the last router


@alone
def test_a_reverted_policy_is_active_on_every_router_within_five_seconds(start_router, policy, operator):
    routers = [start_router(f"router-{number}") for number in range(8)]
    publish_revision(save_draft(policy, {"strategy": "prefix_hash"}).pk, by=operator)
    reconcile_routers()
    assert {router.running.config.pools[0].policy.settings.name for router in routers} == {"prefix_hash"}
    browser = Client()
    browser.force_login(operator)

    started = time.monotonic()
    response = browser.post(
        f"/policies/{policy.pk}/revert/1/", {"reason": "TTFT doubled", "typed": "default", "live": 2}
    )
    reconcile_routers()  # the task that publishing wakes
    elapsed_s = time.monotonic() - started

    assert response.status_code == 302
    policies = [router.running.config.pools[0].policy for router in routers]
    assert {(policy.revision, policy.settings.name) for policy in policies} == {(3, "round_robin")}
    assert is_within(elapsed_s, DEADLINE_S)
