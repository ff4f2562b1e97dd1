"""Publishing in a pool that requires a prediction: what is refused and why, the reason, and what is never refused."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.errors import PredictionRequiredError, RoleNeededError
from controlplane.models import AuditEntry, ConfigSnapshot, Event, EventKind, RevisionState, RoleAssignment, Rollout
from controlplane.services.fleet.pools import update_pool
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies import publish_checks
from controlplane.services.policies.lifecycle import create_policy, publish_revision, revert_policy, save_draft
from controlplane.services.policies.publish_checks import FindingCode, doubt_about, finding_of
from controlplane.services.policies.rollout_plans import make_plan
from controlplane.services.policies.rollouts import abort_rollout
from telemetry.models import WhatIfState
from tests.telemetry.what_if_results import predict_draft

pytestmark = pytest.mark.django_db


@pytest.fixture
def policy(pool):
    """The policy of a pool that requires a prediction."""
    update_pool(pool, what_if={"mode": "require"})
    pool.refresh_from_db()
    return pool.policies.select_related("pool").get(group=None)


@pytest.fixture
def draft(policy):
    return save_draft(policy, {"strategy": "tiered"})


def code_of(draft) -> FindingCode | None:
    finding = finding_of(draft)
    return finding and finding.code


def test_a_draft_without_a_prediction_is_refused_and_nothing_is_written(draft):
    snapshots = ConfigSnapshot.objects.count()
    with pytest.raises(PredictionRequiredError, match="No what-if of exactly these settings") as refused:
        publish_revision(draft.pk)
    draft.refresh_from_db()
    assert (draft.state, Rollout.objects.count(), ConfigSnapshot.objects.count()) == ("draft", 0, snapshots)
    assert refused.value.members["code"] == "what-if-missing"
    start = refused.value.members["links"]["start"]
    assert start["body"]["candidates"][0]["settings"] == draft.settings
    assert "without captured traffic" in str(refused.value)
    assert "override_reason" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"state": WhatIfState.QUEUED}, FindingCode.RUNNING),
        ({"state": WhatIfState.RUNNING}, FindingCode.RUNNING),
        ({"state": WhatIfState.CANCELLED}, FindingCode.MISSING),
        ({"state": WhatIfState.FAILED, "reason": "No requests were captured."}, FindingCode.FAILED),
        ({"is_calibrated": False}, FindingCode.NOT_CALIBRATED),
        ({"age": timedelta(hours=25)}, FindingCode.OUTDATED),
        ({"hit_rate": None}, FindingCode.UNKNOWN),
        ({"hit_rate": (-0.05, 0.01)}, FindingCode.WORSE),
        ({"ttft": (0.4, 0.1)}, FindingCode.WORSE),
        ({"hit_rate": (0.3, 0.02), "ttft": (-0.5, 0.1), "overloaded": (2, 0)}, FindingCode.WORSE),
        ({"hit_rate": (0.3, 0.02), "ttft": (-0.5, 0.1), "overloaded": (2, 4)}, None),  # the active policy is worse
        ({"hit_rate": (-0.05, 0.06)}, None),  # not certainly worse
        ({"hit_rate": (-0.02, 0.01)}, None),  # certainly worse, but allowed
        ({"hit_rate": (0.3, 0.02), "ttft": (-0.5, 0.1)}, None),
    ],
)
def test_each_reason_to_refuse_has_its_code(draft, changes, code):
    predict_draft(draft, **changes)
    assert code_of(draft) is code
    if code is not None:
        with pytest.raises(PredictionRequiredError):
            publish_revision(draft.pk)


def test_a_draft_that_overloads_replicas_is_refused_whatever_the_limits(policy, draft):
    predict_draft(draft, hit_rate=(0.3, 0.02), overloaded=(2, 0))
    none = dict.fromkeys(("max_hit_rate_drop", "max_ttft_p50_growth", "max_ttft_p95_growth"))
    update_pool(policy.pool, what_if={"mode": "require", **none})
    with pytest.raises(PredictionRequiredError, match="the queue of 2 of 4 replicas grows until the end"):
        publish_revision(draft.pk)
    update_pool(policy.pool, what_if={"mode": "advise", **none})
    policy.pool.refresh_from_db()
    assert code_of(draft) is FindingCode.WORSE


def test_a_limit_of_null_and_other_limits_apply(policy, draft):
    predict_draft(draft, hit_rate=(-0.12, 0.02), ttft=(0.4, 0.1))
    limits = {"max_hit_rate_drop": None, "max_ttft_p50_growth": 0.5, "max_ttft_p95_growth": 0.5}
    update_pool(policy.pool, what_if={"mode": "require", **limits})
    assert publish_revision(draft.pk).revision.state == RevisionState.LIVE


def test_a_prediction_is_outdated_when_the_draft_or_any_active_policy_of_the_pool_changes(policy, draft):
    predict_draft(draft)
    assert code_of(draft) is None
    edited = save_draft(policy, {"strategy": "tiered", "replicas": 3})
    assert code_of(edited) is FindingCode.MISSING

    draft = save_draft(policy, {"strategy": "tiered"})
    group = create_task_group(policy.pool, "agents")
    own = save_draft(create_policy(policy.pool, group), {"strategy": "random"})
    publish_revision(own.pk, override_reason="no traffic yet")
    assert code_of(draft) is FindingCode.OUTDATED
    assert "chat.agents" in finding_of(draft).detail

    predict_draft(draft)
    assert code_of(draft) is None
    other = save_draft(policy, {"strategy": "random"})
    publish_revision(other.pk, override_reason="a test")
    draft = save_draft(policy, {"strategy": "tiered"})
    assert code_of(draft) is FindingCode.OUTDATED


def test_the_name_and_omitted_defaults_do_not_matter_but_every_other_change_does(draft):
    partial = {"name": "mine", "settings": {"strategy": "tiered"}}
    predict_draft(draft, candidates=[{**partial, "replicas": 9}])
    assert code_of(draft) is FindingCode.MISSING
    predict_draft(draft, candidates=[partial])
    assert code_of(draft) is None


def test_the_newest_prediction_that_has_ended_decides(draft):
    predict_draft(draft, hit_rate=(-0.2, 0.01))
    assert code_of(draft) is FindingCode.WORSE
    predict_draft(draft)
    predict_draft(draft, state=WhatIfState.QUEUED)
    assert code_of(draft) is None


def test_a_draft_of_a_task_group_is_checked_as_that_groups(policy):
    group = create_task_group(policy.pool, "agents")
    draft = save_draft(create_policy(policy.pool, group), {"strategy": "random"})
    predict_draft(draft, candidates=[{"name": "whole pool", "settings": draft.settings}])
    assert code_of(draft) is FindingCode.MISSING
    predict_draft(draft)
    assert code_of(draft) is None


def test_a_reason_publishes_and_is_audited_with_what_it_overrode(draft, django_user_model):
    olga = django_user_model.objects.create_user("olga", is_superuser=True)
    predict_draft(draft, hit_rate=(-0.12, 0.02))
    with pytest.raises(PredictionRequiredError):
        publish_revision(draft.pk, by=olga, override_reason="  ")
    rollout = publish_revision(draft.pk, by=olga, override_reason="the new engine needs it")

    step = rollout.history.get(transition="publish")
    assert step.evidence["override_reason"] == "the new engine needs it"
    assert (step.evidence["code"], step.evidence["figures"][0]["is_exceeded"]) == ("what-if-worse", True)
    event = Event.objects.get(kind=EventKind.PREDICTION_OVERRIDDEN)
    assert (event.actor, event.pool.name) == (olga, "chat")
    assert "the new engine needs it" in event.summary
    entry = AuditEntry.objects.get(kind=EventKind.PREDICTION_OVERRIDDEN)
    assert (entry.actor, entry.reason) == ("olga", "the new engine needs it")
    assert entry.after["code"] == "what-if-worse"


def test_reverting_and_aborting_are_never_refused(policy, draft):
    publish_revision(draft.pk, override_reason="a test")
    rollout = revert_policy(policy, 1)
    assert (rollout.revision.number, rollout.revision.state) == (3, RevisionState.LIVE)

    plan = make_plan(policy, "by_share", guard=None)
    canary = publish_revision(save_draft(policy, {"strategy": "random"}).pk, plan=plan, override_reason="a test")
    abort_rollout(canary.pk, by=None)
    canary.revision.refresh_from_db()
    assert canary.revision.state == RevisionState.ROLLED_BACK


def test_a_draft_with_the_active_settings_needs_no_prediction(policy):
    assert publish_revision(save_draft(policy, policy.live().settings).pk).revision.number == 2


def test_advice_warns_of_a_worse_verdict_within_the_limits_but_a_requirement_is_met(policy, draft):
    what_if = predict_draft(draft, hit_rate=(-0.02, 0.01))
    assert code_of(draft) is None
    what_if.result["candidates"][1]["verdict"] = "worse"
    what_if.save()
    assert code_of(draft) is None
    update_pool(policy.pool, what_if=None)
    draft.policy.pool.refresh_from_db()
    assert code_of(draft) is FindingCode.WORSE
    assert "Hit rate 43.0 % instead of 45.0 %" in finding_of(draft).detail


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hit_rate": (0.3, 0.02), "ttft": (-0.5, 0.1), "verdict": "better"}, ""),
        ({"hit_rate": (0.01, 0.02), "ttft": (0.01, 0.02)}, "no difference beyond its uncertainty"),
        ({"hit_rate": (0.3, 0.02), "ttft": (0.1, 0.02), "verdict": "mixed"}, "One figure"),
        ({"hit_rate": (0.3, 0.02), "is_calibrated": False}, "not calibrated"),
        ({"state": WhatIfState.RUNNING}, "is running"),
    ],
)
@pytest.mark.parametrize("mode", ["advise", "require"])
def test_a_draft_that_is_not_clearly_better_is_in_doubt(policy, draft, mode, changes, words):
    predict_draft(draft, **changes)
    update_pool(policy.pool, what_if={"mode": mode})
    draft.policy.pool.refresh_from_db()
    doubt = doubt_about(draft)
    assert words in doubt.detail if words else doubt is None
    update_pool(policy.pool, what_if={"mode": "off"})
    draft.policy.pool.refresh_from_db()
    assert doubt_about(draft) is None


def test_without_a_registered_check_a_required_prediction_is_refused(draft, monkeypatch):
    predict_draft(draft)
    monkeypatch.setattr(publish_checks, "_checks", [])
    with pytest.raises(PredictionRequiredError) as refused:
        publish_revision(draft.pk)
    assert refused.value.members["code"] == "what-if-unavailable"


def test_the_requirement_is_audited_and_not_sent_to_routers(pool, django_user_model):
    olga = django_user_model.objects.create_user("olga", is_superuser=True)
    newest = ConfigSnapshot.objects.order_by("number").last()
    update_pool(pool, by=olga, what_if={"mode": "require"})
    assert ConfigSnapshot.objects.order_by("number").last() == newest
    entry = AuditEntry.objects.filter(kind=EventKind.POOL_CHANGED).get()
    assert (entry.before["what_if"], entry.after["what_if"]["mode"]) == (None, "require")
    assert entry.after["what_if"]["max_age_s"] == 86_400


def test_only_those_who_may_publish_change_the_requirement(pool, django_user_model):
    eve = django_user_model.objects.create_user("eve")
    assignment = RoleAssignment.objects.create(user=eve, role="editor")
    with pytest.raises(RoleNeededError, match="approver"):
        update_pool(pool, by=eve, what_if={"mode": "off"})
    update_pool(pool, by=eve, description="chat models", what_if=None)  # unchanged
    assignment.role = "approver"
    assignment.save()
    assert update_pool(pool, by=eve, what_if={"mode": "off"}).what_if["mode"] == "off"
