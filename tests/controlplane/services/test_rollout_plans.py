"""Stages of rollout plans, and invalid ones."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import InvalidError
from controlplane.models import Router
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, save_draft
from controlplane.services.policies.rollout_plans import (
    ALL_REQUESTS,
    AT_ONCE,
    GuardLimits,
    Stage,
    describe_stage,
    make_plan,
)
from tests.controlplane.rollouts import FORMER, start_routers

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_fleet")]


@pytest.fixture(scope="module")
def stored_fleet(once_for_module):
    return once_for_module(store_fleet)


def store_fleet():
    """Two routers, two task groups that the pool's policy places, and one with its own policy; the pool."""
    pool = create_pool("default", strategy="round_robin")
    start_routers("router-1", "router-2")
    for name in ("chat", "batch", "own"):
        create_task_group(pool, name)
    own = create_policy(pool, pool.groups.get(name="own"))
    publish_revision(save_draft(own, FORMER).pk)
    return pool


@pytest.fixture
def pool(stored_fleet, db):
    return copy.deepcopy(stored_fleet)


@pytest.fixture
def fleet(pool):
    return pool


def scopes(plan):
    return [(stage.share, stage.routers, stage.groups) for stage in plan.stages]


def test_without_a_plan_a_rollout_is_all_at_once_without_analysis(policy):
    assert make_plan(policy) == make_plan(policy, "all_at_once") == AT_ONCE


def test_a_plan_by_share_has_analysis_and_ends_with_every_request(policy):
    plan = make_plan(policy, "by_share")
    assert scopes(plan) == [(0.05, None, None), (0.25, None, None), (1.0, None, None)]
    assert [stage.observe_s for stage in plan.stages] == [600, 600, 0]
    assert plan.guard == GuardLimits()


def test_a_plan_by_router_adds_one_connected_router_per_stage(fleet, policy):
    plan = make_plan(policy, "by_router", observe_s=5, guard=None)
    assert scopes(plan) == [(1.0, ("router-1",), None), (1.0, ("router-1", "router-2"), None), (1.0, None, None)]
    assert plan.guard is None


def test_a_plan_by_group_adds_the_groups_that_the_pools_policy_places(fleet, policy):
    assert scopes(make_plan(policy, "by_group"))[:-1] == [(1.0, None, ("batch",)), (1.0, None, ("batch", "chat"))]


def test_stages_mix_shares_groups_and_routers(fleet, policy):
    stages = [
        {"share": 0.1, "groups": ["chat"], "routers": ["router-1"]},
        {"share": 0.1, "groups": ["chat"]},
        {"share": 0.5},
        {"share": 1.0},
    ]
    plan = make_plan(policy, stages=stages, guard={"max_error_ratio": None, "min_requests": 50})
    assert len(plan.stages) == 4
    assert (plan.guard.max_error_ratio, plan.guard.min_requests, plan.guard.warm_up_s) == (None, 50, 120)


@pytest.mark.parametrize(
    ("arguments", "path", "reason"),
    [
        ({"plan": "slowly"}, "$.plan", "all_at_once"),
        ({"plan": "stages"}, "$.stages", "at least one"),
        ({"plan": "by_share", "stages": [{"share": 0.1}]}, "$.stages", "generates its stages"),
        ({"guard": {}}, "$.guard", "plan with stages"),
        ({"stages": [{"share": 0}]}, "$.stages[0].share", "> 0"),
        ({"stages": [{"share": 0.1}, {"portion": 1}]}, "$.stages[1]", "unknown field"),
        ({"stages": [{"share": 0.1, "observe_s": -1}]}, "$.stages[0].observe_s", ">= 0"),
        ({"stages": [{"routers": []}]}, "$.stages[0].routers", "length >= 1"),
        ({"stages": [{"share": 1}, {"share": 1}]}, "$.stages", "only the last"),
        ({"stages": [{"share": 1}, {"share": 0.5}]}, "$.stages", "only the last"),
        ({"stages": [{"share": 0.5}, {"share": 0.1}]}, "$.stages[1]", "of the stage before it, and more"),
        ({"stages": [{"share": 0.5}, {"share": 0.5}]}, "$.stages[1]", "of the stage before it, and more"),
        ({"stages": [{"groups": ["chat"]}, {"share": 0.5}]}, "$.stages[1]", "of the stage before it, and more"),
        ({"stages": [{"groups": ["own"]}]}, "$.stages[0].groups[0]", "places no task group 'own'"),
        ({"stages": [{"routers": ["router-1", "x"]}]}, "$.stages[0].routers[1]", "announced itself as 'x'"),
        ({"plan": "by_share", "guard": {"max_error_ratio": 2}}, "$.guard.max_error_ratio", "<= 1"),
        ({"plan": "by_share", "guard": {"max_sadness": 2}}, "$.guard", "max_sadness"),
        ({"stages": [{"share": at / 200} for at in range(1, 102)]}, "$.stages", "at most 100"),
    ],
)
def test_an_invalid_plan_is_rejected_with_its_path(fleet, policy, arguments, path, reason):
    with pytest.raises(InvalidError) as error:
        make_plan(policy, **arguments)
    assert error.value.faults[0].path == path
    assert reason in error.value.faults[0].reason


def test_a_groups_own_policy_cannot_be_rolled_out_by_group(fleet, policy):
    own = create_policy(fleet, fleet.groups.get(name="chat"))
    for arguments in ({"plan": "by_group"}, {"stages": [{"groups": ["chat"]}]}):
        with pytest.raises(InvalidError):
            make_plan(own, **arguments)


def test_a_plan_by_router_needs_a_router(policy):
    Router.objects.all().delete()
    with pytest.raises(InvalidError, match="no router is connected"):
        make_plan(policy, "by_router")


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (ALL_REQUESTS, "every request"),
        (Stage(share=0.05), "5 % of prefixes"),
        (Stage(share=0.125, groups=("chat",)), "12.5 % of prefixes of task group chat"),
        (Stage(routers=("a", "b")), "every request on routers a, b"),
        (Stage(routers=tuple("abcdef")), "every request on routers a, b, c, d and 2 more"),
    ],
)
def test_a_stage_is_described_by_its_requests(stage, text):
    assert describe_stage(stage) == text


names_or_all = st.one_of(st.none(), st.sets(st.sampled_from("abc"), min_size=1).map(lambda names: tuple(sorted(names))))
stages = st.builds(Stage, share=st.sampled_from([0.1, 0.5, 1.0]), routers=names_or_all, groups=names_or_all)
requests = st.tuples(st.floats(0, 0.999), st.sampled_from("abc"), st.sampled_from([None, *"abc"]))


def is_canary(stage, request):
    position, router, group = request
    return (
        position < stage.share
        and (stage.routers is None or router in stage.routers)
        and (stage.groups is None or group in stage.groups)
    )


@given(wider=stages, narrower=stages, request=requests)
def test_a_stage_that_includes_another_leaves_none_of_its_requests_out(wider, narrower, request):
    if wider.includes(narrower) and is_canary(narrower, request):
        assert is_canary(wider, request)
    if wider.covers_all_requests:
        assert wider.includes(narrower)
