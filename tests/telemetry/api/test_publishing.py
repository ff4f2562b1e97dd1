"""``POST /api/v1/policies/NAME/publish`` and ``PUT /api/v1/config`` in a pool that requires a prediction."""

from __future__ import annotations

import pytest

from controlplane.models import Rollout
from controlplane.services.fleet.pools import create_pool
from controlplane.services.policies.lifecycle import save_draft
from tests.telemetry.what_if_results import predict_draft

pytestmark = pytest.mark.django_db
PUBLISH = "/api/v1/policies/chat/publish"


@pytest.fixture
def draft(db):
    pool = create_pool("chat", what_if={"mode": "require"})
    return save_draft(pool.policies.select_related("pool").get(), {"strategy": "tiered"})


@pytest.mark.parametrize("query", ["", "?dry_run=true"])
def test_a_refusal_is_a_problem_document_with_figures_and_addresses(api, draft, query):
    what_if = predict_draft(draft, hit_rate=(-0.12, 0.02))
    response = api.post(PUBLISH + query, {"reason": "a try"}, HTTP_IF_MATCH="*")
    assert response.status_code == 409
    assert response["Content-Type"] == "application/problem+json"
    problem = response.json()
    assert (problem["type"], problem["code"]) == ("urn:warmpath:problem:prediction-required", "what-if-worse")
    assert problem["figures"][0]["active"] == pytest.approx(0.45)
    assert problem["figures"][0]["predicted"] == pytest.approx(0.33)
    assert problem["figures"][0]["difference"] == pytest.approx({"value": -0.12, "low": -0.14, "high": -0.10})
    assert problem["links"]["what_if"] == f"/api/v1/what-ifs/{what_if.pk}"
    assert "Hit rate 33.0 %" in problem["detail"]
    assert not Rollout.objects.exists()


def test_the_request_in_the_refusal_starts_the_prediction_that_is_missing(api, draft):
    start = api.post(PUBLISH, {}).json()["links"]["start"]
    assert api.post(start["url"], start["body"]).status_code == 201
    assert api.post(PUBLISH, {}).json()["code"] == "what-if-running"


def test_a_reason_publishes_and_is_in_the_history(api, draft):
    assert api.post(PUBLISH, {"override_reason": " "}).status_code == 409
    response = api.post(PUBLISH, {"override_reason": "the pool has no traffic yet"})
    assert response.status_code == 202, response.json()
    steps = api.get(f"/api/v1/rollouts/{response.json()['id']}").json()["history"]
    assert steps[0]["evidence"]["override_reason"] == "the pool has no traffic yet"
    assert steps[0]["evidence"]["code"] == "what-if-missing"


def test_the_diff_says_what_speaks_against_publishing(api, draft):
    finding = api.get("/api/v1/policies/chat/diff").json()["finding"]
    assert (finding["code"], finding["blocks"]) == ("what-if-missing", True)
    predict_draft(draft)
    assert api.get("/api/v1/policies/chat/diff").json()["finding"] is None


def test_the_requirement_is_a_setting_of_the_pool(api, draft):
    shown = api.get("/api/v1/pools/chat").json()["what_if"]
    assert shown == {
        "mode": "require",
        "max_hit_rate_drop": 0.03,
        "max_ttft_p50_growth": 0.2,
        "max_ttft_p95_growth": 0.25,
        "max_age_s": 86_400,
    }
    changed = api.patch("/api/v1/pools/chat", {"what_if": {"mode": "advise", "max_hit_rate_drop": None}})
    assert (changed.json()["what_if"]["mode"], changed.json()["what_if"]["max_hit_rate_drop"]) == ("advise", None)
    rejected = api.patch("/api/v1/pools/chat", {"what_if": {"mode": "advise", "max_age_s": 1}})
    assert rejected.status_code == 422
    assert rejected.json()["errors"][0]["pointer"] == "#/what_if/max_age_s"
    assert api.post(PUBLISH, {}).status_code == 202


def test_a_bundle_publishes_only_with_a_prediction_or_a_reason(api, draft):
    bundle = api.get("/api/v1/config").json()
    bundle["pools"][0]["policy"] = draft.settings
    refused = api.put("/api/v1/config", bundle)
    assert (refused.status_code, refused.json()["code"]) == (409, "what-if-missing")
    applied = api.put("/api/v1/config", {**bundle, "override_reason": "as in the repository"})
    assert applied.status_code == 200, applied.json()
    assert [rollout["policy"] for rollout in applied.json()["rollouts"]] == ["chat"]
