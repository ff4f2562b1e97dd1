"""Rollouts over REST."""

import pytest

from controlplane.models import Role
from controlplane.services.access.tokens import create_token
from controlplane.services.access.users import set_role
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from tests.controlplane.rollouts import FAILED, FORMER, NEXT, ack, nack, publish_stages, start_routers, verdict
from tests.rest_client import CarefulClient

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_pool")]
ROLLOUTS = "/api/v1/rollouts"


def publish(api, policy, **body):
    save_draft(policy, NEXT)
    return api.post(f"/api/v1/policies/{policy.name}/publish", {"reason": "warmer", **body}, format="json")


@pytest.fixture
def client_of(django_user_model):
    """A client of a user with a role in all projects."""

    def make(role):
        user = django_user_model.objects.create_user(f"some-{role}")
        set_role(user, role, None)
        client = CarefulClient()
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {create_token(user, name='t', scopes=['write'])[1]}")
        return client

    return make


def test_a_plan_becomes_stages_with_the_guard_on(api, policy):
    response = publish(api, policy, plan="by_share")
    shown = response.json()
    assert response.status_code == 202, shown
    assert [stage["share"] for stage in shown["stages"]] == [0.05, 0.25, 1.0]
    assert shown["guard"]["max_hit_rate_drop"] == 0.05
    policy_shown = api.get("/api/v1/policies/default").json()
    assert (policy_shown["live"]["number"], policy_shown["canary"]["number"]) == (1, 2)


def test_stages_and_guard_limits_can_be_set(api, policy):
    start_routers("router-1")
    stages = [{"share": 0.5, "routers": ["router-1"], "observe_s": 30}]
    shown = publish(api, policy, stages=stages, guard={"max_error_ratio": None}).json()
    assert shown["plan"] == "stages"
    assert shown["stages"][0] == {"share": 0.5, "routers": ["router-1"], "groups": None, "observe_s": 30}
    assert shown["guard"]["max_error_ratio"] is None
    assert publish(api, policy, stages=stages, guard=None).json()["guard"] is None


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"plan": "slowly"}, "#/plan"),
        ({"stages": "all of them"}, "#/stages"),
        ({"stages": [{"groups": ["nobody"]}]}, "#/stages/0/groups/0"),
        ({"plan": "by_share", "guard": {"min_requests": 0}}, "#/guard/min_requests"),
    ],
)
def test_an_invalid_plan_is_rejected_with_a_pointer(api, policy, body, pointer):
    response = publish(api, policy, **body)
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == pointer
    assert policy.draft() is not None


def test_a_rollout_shows_its_steps_and_every_router(api, policy):
    first, second, third = start_routers("router-1", "router-2", "router-3")
    ack()
    rollout = publish_stages(policy, [{"routers": ["router-1"]}], guard={})
    ack(first)
    nack(second)

    shown = api.get(f"{ROLLOUTS}/{rollout.pk}").json()

    assert (shown["state"], shown["held_by"]) == ("holding", "rejection")
    assert [step["transition"] for step in shown["history"]] == ["publish", "start", "hold"]
    assert shown["history"][-1]["evidence"][0]["router"] == "router-2"
    progress = {router["name"]: (router["progress"], router["gets_canary_requests"]) for router in shown["routers"]}
    assert progress == {
        "router-1": ("acknowledged", True),
        "router-2": ("rejected", False),
        "router-3": ("pending", False),
    }
    assert third.name in progress


def test_readings_are_shown_with_their_limits(api, policy):
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy, guard={})
    reading = {"name": "hit_rate", "unit": "ratio", "baseline": 0.6, "canary": None, "limit": 0.05}
    tag = api.get(f"{ROLLOUTS}/{rollout.pk}").json()["etag"]
    verdict(rollout, "warming", [{**reading, "verdict": "inconclusive", "detail": "Too few requests."}])
    shown = api.get(f"{ROLLOUTS}/{rollout.pk}").json()
    assert (shown["readings"][0]["baseline"], shown["readings"][0]["canary"]) == (0.6, None)
    assert shown["etag"].partition(".")[0] == tag.partition(".")[0], "observed fields do not change the configured half"


def test_each_transition_is_an_action_with_a_reason(api, policy, operator):
    start_routers("router-1")
    ack()
    rollout = publish_stages(policy)
    ack()
    for transition, state in (
        ("pause", "paused"),
        ("resume", "progressing"),
        ("promote", "progressing"),
        ("abort", "aborted"),
    ):
        response = api.post(
            f"{ROLLOUTS}/{rollout.pk}/{transition}", {"reason": f"because of {transition}"}, format="json"
        )
        assert (response.status_code, response.json()["state"]) == (200, state), transition
        step = response.json()["history"][-1]
        assert (step["transition"], step["by"], step["reason"]) == (transition, "olga", f"because of {transition}")
    assert api.post(f"{ROLLOUTS}/{rollout.pk}/abort").status_code == 409
    assert api.post(f"{ROLLOUTS}/99999/abort").status_code == 404


def test_a_publisher_cannot_approve_their_own_rollout(api, policy, client_of):
    api.patch("/api/v1/projects/default", {"needs_approval": True}, format="json")
    shown = publish(api, policy).json()
    assert (shown["state"], shown["snapshot"]) == ("awaiting_approval", None)
    path = f"{ROLLOUTS}/{shown['id']}/approve"
    own = api.post(path)
    assert (own.status_code, "another user" in own.json()["detail"]) == (403, True)
    response = client_of(Role.APPROVER).post(path, {"reason": "read it"}, format="json")
    assert (response.status_code, response.json()["approved_by"]) == (200, "some-approver")
    assert policy.live().number == 2


def test_rollouts_can_be_filtered(api, policy):
    first = publish_stages(policy)
    second = publish_stages(policy, settings=FORMER, guard={})
    verdict(second, "failed", FAILED)
    third = publish_revision(save_draft(policy, NEXT).pk)

    def ids(query):
        return [row["id"] for row in api.get(f"{ROLLOUTS}?{query}").json()["results"]]

    assert ids("open=true") == [third.pk]
    assert ids("open=false") == [second.pk, first.pk]
    assert ids("state=rolled_back&state=superseded") == [second.pk, first.pk]
    assert ids("pool=default&policy=default") == [third.pk, second.pk, first.pk]
    assert ids("pool=another") == []
    assert "history" not in api.get(ROLLOUTS).json()["results"][0]
