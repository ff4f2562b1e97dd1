"""A revision that an alert names as the most likely cause of a drop is marked, until the level recovers under it."""

from datetime import timedelta

import pytest
import time_machine

from controlplane.errors import FaultedRevisionError
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.policies.lifecycle import healthy_revisions, publish_revision, revert_policy, save_draft
from controlplane.services.routers import announce
from telemetry.models import Alert, AlertRule, AlertState
from telemetry.services.alerts.explanations import explain_drops
from tests.telemetry.conftest import T0
from tests.telemetry.readings import route_reading, router_scraped, stored_together

pytestmark = pytest.mark.django_db


def at(seconds):
    return T0 + timedelta(seconds=seconds)


@pytest.fixture
def policy(pool):
    add_replica(pool, name="r1", url="http://127.0.0.1:9101")
    policy = pool.policies.get(group=None)
    for second, strategy in ((-900, "prefix_hash"), (600, "random")):
        with time_machine.travel(at(second), tick=False):
            publish_revision(save_draft(policy, {"strategy": strategy}).pk)
    _store(announce(name="router-1", boot="b", admin_url="http://10.0.0.9:8081"))
    return policy


@stored_together()
def _store(router):
    for second in range(20, 801, 20):
        revision, cached = (2, 16_000) if second <= 600 else (3, 3_000)
        router_scraped(router, at(second))
        route_reading(
            router, at(second), revision=revision, requests=20, ok_requests=20, usage_reported=20,
            prompt_tokens=20_000, cached_tokens=cached,
        )  # fmt: skip


@pytest.fixture
def alert(policy):
    rule = AlertRule.objects.get(pool=policy.pool, kind="hit_rate_drop")
    times = {"started_at": at(660), "last_breach_at": at(790), "fired_at": at(670)}
    alert = Alert.objects.create(rule=rule, pool=policy.pool, state="firing", **times)
    explain_drops(at(800))
    alert.refresh_from_db()
    return alert


def marks(policy):
    return {row.number: (row.fault, row.fault_alert) for row in policy.revisions.exclude(fault="")}


def test_the_revision_is_marked_and_an_earlier_one_is_offered(alert, policy):
    assert (alert.causes[0]["kind"], alert.causes[0]["evidence"]["revision"]) == ("revision", 3)
    assert marks(policy) == {3: ("alert", alert.pk)}
    assert healthy_revisions().filter(policy=policy).first().number == 2


def test_after_the_rollback_it_is_not_offered_and_needs_a_confirmation(alert, policy):
    revert_policy(policy, 2)
    assert healthy_revisions().filter(policy=policy).first().number == 1
    Alert.objects.update(state=AlertState.RESOLVED, resolved_at=at(900))
    explain_drops(at(960))
    assert marks(policy) == {3: ("alert", alert.pk)}
    with pytest.raises(FaultedRevisionError, match=rf"Revision 3 of chat \(random\) was named by alert {alert.pk}"):
        revert_policy(policy, 3)
    draft = save_draft(policy, {"strategy": "random"})
    with pytest.raises(FaultedRevisionError):
        publish_revision(draft.pk)
    assert publish_revision(draft.pk, confirm_faulted=True).revision.strategy == "random"


def test_the_mark_goes_once_the_level_recovered_under_the_revision(alert, policy):
    Alert.objects.update(state=AlertState.RESOLVED, resolved_at=at(900))
    explain_drops(at(960))
    assert marks(policy) == {}


@pytest.mark.parametrize(("last_breach", "replaced"), [(790, False), (1300, True)])
def test_causes_and_mark_stay_while_the_drop_recovers(alert, policy, last_breach, replaced):
    if replaced:  # before the window of the rule is full of better requests
        revert_policy(policy, 2)
    Alert.objects.update(last_breach_at=at(last_breach), detail={"onset": at(1100).isoformat()})
    explain_drops(at(1300))  # nothing is stored of the time since the onset, so this would find no cause
    named = alert.causes
    alert.refresh_from_db()
    assert alert.causes == named
    assert marks(policy) == {3: ("alert", alert.pk)}


def test_the_mark_goes_once_the_alert_names_another_cause(alert, policy):
    alert.rule.pool.replicas.get().delete()
    policy.revisions.filter(number=3).update(fault="alert", fault_alert=alert.pk)
    Alert.objects.update(
        started_at=at(-9000), last_breach_at=at(1100), explained_at=at(800), detail={"onset": at(-9000).isoformat()}
    )
    explain_drops(at(1100))
    alert.refresh_from_db()
    assert alert.causes == []
    assert marks(policy) == {}
