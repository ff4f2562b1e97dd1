"""Which stages a plan has, and which are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import InvalidError
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import create_policy, publish_revision, save_draft
from controlplane.services.policies.rollout_plans import (
    AT_ONCE,
    EVERYTHING,
    GuardLimits,
    Stage,
    describe_stage,
    make_plan,
)
from tests.controlplane.rollouts import FORMER, start_routers

pytestmark = pytest.mark.django_db


@pytest.fixture
def fleet(pool):
    """Two routers, and two task groups that the pool's policy places beside one with its own."""
    start_routers("router-1", "router-2")
    for name in ("chat", "batch", "own"):
        create_task_group(pool, name)
    own = create_policy(pool, pool.groups.get(name="own"))
    publish_revision(save_draft(own, FORMER).pk)
    return pool


def scopes(plan):
    return [(stage.share, stage.routers, stage.groups) for stage in plan.stages]


def test_without_a_plan_it_is_all_at_once_and_nobody_watches(policy):
    assert make_plan(policy) == make_plan(policy, "all_at_once") == AT_ONCE


def test_by_share_is_watched_and_ends_with_everything(policy):
    plan = make_plan(policy, "by_share")
    assert scopes(plan) == [(0.05, None, None), (0.25, None, None), (1.0, None, None)]
    assert [stage.observe_s for stage in plan.stages] == [600, 600, 0]
    assert plan.guard == GuardLimits()


def test_by_router_takes_those_that_are_present_one_after_another(fleet, policy):
    plan = make_plan(policy, "by_router", observe_s=5, guard=None)
    assert scopes(plan) == [(1.0, ("router-1",), None), (1.0, ("router-1", "router-2"), None), (1.0, None, None)]
    assert plan.guard is None


def test_by_group_takes_those_that_the_pools_policy_places(fleet, policy):
    assert scopes(make_plan(policy, "by_group"))[:-1] == [(1.0, None, ("batch",)), (1.0, None, ("batch", "chat"))]


def test_stages_mix_shares_groups_and_routers(fleet, policy):
    stages = [
        {"share": 0.1, "groups": ["chat"], "routers": ["router-1"]},
        {"share": 0.1, "groups": ["chat"]},
        {"share": 0.5},
        {"share": 1.0},
    ]
    plan = make_plan(policy, stages=stages, guard={"max_load_skew": None, "min_requests": 50})
    assert len(plan.stages) == 4
    assert (plan.guard.max_load_skew, plan.guard.min_requests, plan.guard.warm_up_s) == (None, 50, 120)


@pytest.mark.parametrize(
    ("asked", "path", "words"),
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
def test_what_cannot_be_is_refused_with_its_place(fleet, policy, asked, path, words):
    with pytest.raises(InvalidError) as refusal:
        make_plan(policy, **asked)
    assert refusal.value.faults[0].path == path
    assert words in refusal.value.faults[0].reason


def test_a_groups_own_policy_has_no_groups_to_choose_from(fleet, policy):
    own = create_policy(fleet, fleet.groups.get(name="chat"))
    for asked in ({"plan": "by_group"}, {"stages": [{"groups": ["chat"]}]}):
        with pytest.raises(InvalidError):
            make_plan(own, **asked)


def test_router_by_router_needs_a_router(policy):
    with pytest.raises(InvalidError, match="no router is connected"):
        make_plan(policy, "by_router")


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (EVERYTHING, "every request"),
        (Stage(share=0.05), "5 % of prefixes"),
        (Stage(share=0.125, groups=("chat",)), "12.5 % of prefixes of task group chat"),
        (Stage(routers=("a", "b")), "every request on routers a, b"),
        (Stage(routers=tuple("abcdef")), "every request on routers a, b, c, d and 2 more"),
    ],
)
def test_a_stage_says_its_requests_in_words(stage, words):
    assert describe_stage(stage) == words


some = st.one_of(st.none(), st.sets(st.sampled_from("abc"), min_size=1).map(lambda names: tuple(sorted(names))))
stages = st.builds(Stage, share=st.sampled_from([0.1, 0.5, 1.0]), routers=some, groups=some)
requests = st.tuples(st.floats(0, 0.999), st.sampled_from("abc"), st.sampled_from([None, *"abc"]))


def on_trial(stage, request):
    place, router, group = request
    return (
        place < stage.share
        and (stage.routers is None or router in stage.routers)
        and (stage.groups is None or group in stage.groups)
    )


@given(wider=stages, narrower=stages, request=requests)
def test_a_stage_that_includes_another_leaves_none_of_its_requests_out(wider, narrower, request):
    if wider.includes(narrower) and on_trial(narrower, request):
        assert on_trial(wider, request)
    if wider.is_everything:
        assert wider.includes(narrower)
