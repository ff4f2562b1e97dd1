import pytest

from controlplane.models import PolicyRevision

pytestmark = pytest.mark.django_db
PREFIX_HASH = {"strategy": "prefix_hash", "slack_s": 1.5}


def test_a_policy_is_drafted_compared_and_published(api, pool):
    saved = api.put("/api/v1/policies/default/draft", {"settings": PREFIX_HASH, "reason": "warmer", "based_on": 1})
    assert (saved.status_code, saved.data["state"], saved.data["author"]) == (200, "draft", "olga")

    diff = api.get("/api/v1/policies/default/diff")
    assert (diff.data["before"], diff.data["after"]) == (1, 2)
    strategy = diff.data["changes"][0]
    assert (strategy["field"], strategy["before"], strategy["after"]) == ("strategy", "round_robin", "prefix_hash")
    assert all(change["meaning"] for change in diff.data["changes"])

    published = api.post("/api/v1/policies/default/publish", {"digest": diff.data["digest"]})
    assert (published.status_code, published.data["state"]) == (202, "pending")
    assert api.get(f"/api/v1/rollouts/{published.data['id']}").data["revision"] == 2

    policy = api.get("/api/v1/policies/default").data
    assert (policy["live"]["number"], policy["draft"]) == (2, None)
    assert [revision["state"] for revision in api.get("/api/v1/revisions").data["results"]] == ["live", "retired"]


def test_a_removed_setting_is_rejected_by_name(api, pool):
    response = api.put("/api/v1/policies/default/draft", {"settings": {"strategy": "prefix_hash", "load_factor": 2.0}})
    assert response.status_code == 422
    assert "load_factor was removed; slack_s bounds the additional wait" in str(response.data["errors"])


def test_publishing_comparing_and_discarding_need_a_draft(api, pool):
    assert api.post("/api/v1/policies/default/publish").status_code == 409
    assert api.get("/api/v1/policies/default/diff").status_code == 409
    assert api.delete("/api/v1/policies/default/draft").status_code == 409


def test_the_catalogue_lists_strategies_and_settings(api):
    strategies = {info["name"]: info for info in api.get("/api/v1/strategies").data["strategies"]}
    assert {"round_robin", "prefix_hash"} <= set(strategies)
    slack = strategies["prefix_hash"]["settings"][0]
    assert (slack["field"], slack["unit"], slack["low"]) == ("slack_s", "seconds", 0.0)
    assert all(info["help"] and all(s["help"] for s in info["settings"]) for info in strategies.values())


def test_a_diff_shows_effects(api, pool):
    for number in range(4):
        api.post("/api/v1/replicas", {"pool": "default", "name": f"r{number}", "url": f"http://10.0.0.{number + 1}:80"})
    api.put("/api/v1/policies/default/draft", {"settings": PREFIX_HASH})

    diff = api.get("/api/v1/policies/default/diff").data
    (effect,) = diff["effects"]

    assert list(effect["affected"]) == ["pool default"]
    assert "placed by prefix_hash instead of round_robin" in effect["text"]
    assert (effect["impact"], effect["moved_ratio"]) == ("cold_caches", None)
    assert diff["warnings"] == []


def test_a_diff_shows_warnings(api, pool):
    api.put("/api/v1/policies/default/draft", {"settings": PREFIX_HASH})

    (warning,) = api.get("/api/v1/policies/default/diff").data["warnings"]

    assert (warning["id"], warning["text"]) == ("no-active-replica", "Pool default has no active replica.")
    assert warning["unaffected"]
    assert warning["to_do"]


def publish(api, **settings):
    api.put("/api/v1/policies/default/draft", {"settings": settings})
    api.post("/api/v1/policies/default/publish", {"reason": "to compare"})
    return api.get("/api/v1/revisions?policy=default").data["results"][0]["id"]


def test_any_two_revisions_of_a_policy_are_compared(api, pool):
    older = publish(api, strategy="prefix_hash", slack_s=1.5)
    newer = publish(api, strategy="prefix_hash", slack_s=3)
    publish(api, strategy="random")

    response = api.get(f"/api/v1/revisions/compare?from={older}&to={newer}").data

    assert (response["before"], response["after"]) == (2, 3)
    assert [change["field"] for change in response["changes"]] == ["slack_s"]
    assert [effect["impact"] for effect in response["effects"]] == ["placement"]
    assert api.get(f"/api/v1/revisions/compare?from={older}&to={older}").data["effects"] == []


def test_revisions_of_two_policies_cannot_be_compared(api, pool):
    group = api.post("/api/v1/task-groups", {"pool": "default", "name": "chat"}).data
    api.post("/api/v1/policies", {"group": group["id"]})
    api.put("/api/v1/policies/default.chat/draft", {"settings": PREFIX_HASH})
    first, second = (row["id"] for row in api.get("/api/v1/revisions").data["results"])

    response = api.get(f"/api/v1/revisions/compare?from={first}&to={second}")

    assert response.status_code == 422
    assert response.data["errors"][0]["pointer"] == "#/to"
    assert api.get(f"/api/v1/revisions/compare?from={first}").status_code == 422
    assert api.get(f"/api/v1/revisions/compare?from={first}&to=999999").status_code == 422


def test_settings_that_an_alert_named_are_published_again_only_with_a_confirmation(api, pool):
    publish(api, strategy="prefix_hash")
    PolicyRevision.objects.filter(number=1).update(fault="alert", fault_alert=7)
    listed = {row["number"]: (row["fault"], row["fault_alert"]) for row in api.get("/api/v1/revisions").data["results"]}
    assert listed == {1: ("alert", 7), 2: ("", None)}

    api.put("/api/v1/policies/default/draft", {"settings": {"strategy": "round_robin"}})
    bundle = api.get("/api/v1/config").data
    bundle["pools"][0]["policy"] = {"strategy": "round_robin"}
    body = {"revision": 1, "reason": "again"}
    for refused in (
        api.post("/api/v1/policies/default/revert", body),
        api.post("/api/v1/policies/default/publish", {"reason": "again"}),
        api.put("/api/v1/config", bundle, headers={"If-Match": "*"}),
    ):
        assert (refused.status_code, refused.data["type"].rpartition(":")[2]) == (409, "faulted-revision")
        assert (refused.data["revision"], refused.data["fault"], refused.data["alert"]) == (1, "alert", 7)
    assert api.get("/api/v1/policies/default").data["live"]["number"] == 2

    confirmed = api.post("/api/v1/policies/default/revert", body | {"confirm_faulted": True})
    assert (confirmed.status_code, confirmed.data["revision"]) == (202, 3)
    publish(api, strategy="random")
    assert api.put("/api/v1/config", bundle | {"confirm_faulted": True}, headers={"If-Match": "*"}).status_code == 200


def test_reverting_publishes_a_new_revision(api, pool):
    publish(api, strategy="prefix_hash")

    response = api.post("/api/v1/policies/default/revert", {"revision": 1, "reason": "slow", "live": 2})

    assert (response.status_code, response.data["revision"]) == (202, 3)
    live = api.get("/api/v1/policies/default").data["live"]
    assert (live["settings"], live["reason"]) == ({"strategy": "round_robin"}, "Back to revision 1: slow")
    assert api.post("/api/v1/policies/default/revert", {"revision": 1}).status_code == 409
    assert api.post("/api/v1/policies/default/revert", {"revision": 2, "live": 2}).status_code == 409
    assert api.post("/api/v1/policies/default/revert", {"revision": 9}).status_code == 404
