import pytest

pytestmark = pytest.mark.django_db
PREFIX_HASH = {"strategy": "prefix_hash", "load_factor": 1.5}


def test_an_operator_edits_compares_and_publishes(api, pool):
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


def test_a_setting_out_of_range_is_refused_where_it_stands(api, pool):
    answer = api.put("/api/v1/policies/default/draft", {"settings": {"strategy": "prefix_hash", "load_factor": 0}})
    assert (answer.status_code, answer["Content-Type"]) == (422, "application/problem+json")
    assert answer.data["errors"][0]["pointer"] == "#/settings/load_factor"


def test_publishing_what_was_edited_since_is_a_conflict(api, pool):
    api.put("/api/v1/policies/default/draft", {"settings": PREFIX_HASH})
    answer = api.post("/api/v1/policies/default/publish", {"digest": "0" * 64})
    assert answer.status_code == 409


def test_without_a_draft_there_is_nothing_to_publish_compare_or_discard(api, pool):
    assert api.post("/api/v1/policies/default/publish").status_code == 409
    assert api.get("/api/v1/policies/default/diff").status_code == 409
    assert api.delete("/api/v1/policies/default/draft").status_code == 409


def test_a_draft_is_discarded(api, pool):
    api.put("/api/v1/policies/default/draft", {"settings": PREFIX_HASH})
    assert api.delete("/api/v1/policies/default/draft").status_code == 204
    assert api.get("/api/v1/policies/default").data["draft"] is None


def test_a_group_gets_a_policy_of_its_own_and_loses_it(api, pool):
    group = api.post("/api/v1/task-groups", {"pool": "default", "name": "chat"}).data
    made = api.post("/api/v1/policies", {"group": group["id"]})
    assert (made.status_code, made.data["name"], made.data["live"]) == (201, "default.chat", None)
    assert api.post("/api/v1/policies", {"group": group["id"]}).status_code == 409
    assert api.delete("/api/v1/policies/default.chat").status_code == 204
    assert api.delete("/api/v1/policies/default").status_code == 409


def test_the_catalogue_says_what_can_be_set(api):
    strategies = {info["name"]: info for info in api.get("/api/v1/strategies").data["strategies"]}
    assert {"round_robin", "prefix_hash"} <= set(strategies)
    load_factor = strategies["prefix_hash"]["settings"][0]
    assert (load_factor["field"], load_factor["unit"], load_factor["low"]) == ("load_factor", "ratio", 1.0)
    assert all(info["help"] and all(s["help"] for s in info["settings"]) for info in strategies.values())
