"""The whole fleet as one document."""

import copy
import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from rest_framework.test import APIClient

from controlplane.models import (
    ConfigSnapshot,
    DiscoveredReplica,
    Event,
    PolicyRevision,
    Pool,
    Replica,
    ReplicaSource,
    Role,
    Rollout,
    TaskGroup,
)
from controlplane.services.access.users import set_role
from controlplane.services.discovery.sources import create_source
from controlplane.services.fleet.pools import create_pool, create_project
from controlplane.services.fleet.replicas import add_replica, set_replica_state
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import publish_revision, save_draft

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_fleet")]
CONFIG = "/api/v1/config"


@pytest.fixture(scope="module")
def stored_fleet(once_for_module):
    return once_for_module(store_fleet)


def store_fleet():
    """Pool ``default`` with replicas r1 and r2, and task groups ``agents`` (on r1 alone) and ``chat``; r1."""
    pool = create_pool("default", strategy="round_robin")
    replica = add_replica(pool, name="r1", url="http://10.0.0.1:8000")
    add_replica(pool, name="r2", url="http://10.0.0.2:8000", weight=2.0)
    create_task_group(pool, "agents", replicas=[replica], owner="team-a")
    create_task_group(pool, "chat")
    return replica


@pytest.fixture
def replica(stored_fleet, db):
    return copy.deepcopy(stored_fleet)


@pytest.fixture
def pool(replica):
    return replica.pool


@pytest.fixture
def fleet(pool):
    return pool


@pytest.fixture
def exported(api, fleet):
    """The exported fleet."""
    return json.loads(api.get(CONFIG).content)


def put(api, bundle, **query):
    return api.put(
        CONFIG, bundle, format="json", QUERY_STRING="&".join(f"{name}={value}" for name, value in query.items())
    )


def actions_of(response):
    """The actions as short lines."""
    assert response.status_code == 200, response.data
    return [f"{row['op']} {row['kind']} {row['name']}" for row in response.data["actions"]]


def test_applying_an_export_changes_nothing(api, exported):
    before = (ConfigSnapshot.objects.count(), Event.objects.count())
    assert actions_of(put(api, exported, prune="true")) == []
    assert (ConfigSnapshot.objects.count(), Event.objects.count()) == before


def test_exports_are_reproducible_and_ordered_by_name(api, exported):
    assert api.get(CONFIG).content == api.get(CONFIG).content
    (pool,) = exported["pools"]
    assert [row["name"] for row in pool["replicas"]] == ["r1", "r2"]
    assert pool["replicas"][1]["weight"] == 2.0
    assert [(row["name"], row["replicas"], row["policy"]) for row in pool["groups"]] == [
        ("agents", ["r1"], None),
        ("chat", [], None),
    ]
    assert pool["policy"]["strategy"] == "round_robin"


def test_an_export_restores_the_fleet(api, exported):
    removals = actions_of(put(api, {"format": 1, "pools": []}, prune="true"))
    assert removals[-1] == "remove pool default"
    assert Pool.objects.count() == Replica.objects.count() == TaskGroup.objects.count() == 0

    rebuilt = put(api, exported)
    assert actions_of(rebuilt)[0] == "create pool default"
    again = json.loads(api.get(CONFIG).content)
    assert again == exported


def test_all_changes_of_a_bundle_make_one_configuration_and_are_reported(api, exported):
    bundle = copy.deepcopy(exported)
    pool = bundle["pools"][0]
    pool["description"] = "H200s"
    pool["replicas"][0]["weight"] = 3
    pool["replicas"][1]["state"] = "draining"
    pool["replicas"].append({"name": "r3", "url": "http://10.0.0.3:8000"})
    pool["groups"][1]["replicas"] = ["r3"]  # made by the same bundle
    before = ConfigSnapshot.objects.count()

    response = put(api, bundle)

    assert actions_of(response) == [
        "change pool default",
        "change replica r1",
        "change replica r2",
        "create replica r3",
        "change task group chat",
    ]
    assert list(response.data["actions"][1]["changes"]) == [{"field": "weight", "before": 1.0, "after": 3.0}]
    assert list(response.data["actions"][2]["changes"]) == [{"field": "state", "before": "active", "after": "draining"}]
    assert ConfigSnapshot.objects.count() == before + 1
    assert actions_of(put(api, bundle)) == []


def test_policies_are_published_with_the_reason_unless_they_are_active(api, exported, policy):
    bundle = {**copy.deepcopy(exported), "reason": "shared prompts"}
    bundle["pools"][0]["policy"] = {"strategy": "prefix_hash"}
    bundle["pools"][0]["groups"][0]["policy"] = {"strategy": "random"}

    response = put(api, bundle)

    assert actions_of(response) == ["change policy default", "create policy default.agents"]
    assert (policy.live().strategy, policy.live().reason) == ("prefix_hash", "shared prompts")
    assert [row["policy"] for row in response.data["rollouts"]] == ["default", "default.agents"]
    assert actions_of(put(api, bundle)) == []

    bundle["pools"][0]["groups"][0]["policy"] = None
    assert actions_of(put(api, bundle)) == ["remove policy default.agents"]


@pytest.mark.parametrize(
    ("stored", "change"),
    [
        ({"strategy": "lowest_cost", "alpha": 1.5, "fetch_s": 0.5}, {"alpha": 1.0}),  # with a removed one
        ({"strategy": "prefix_hash", "load_factor": 1.25, "min_bound": 8}, {"slack_s": 5.0}),  # and without a new one
    ],
)
def test_settings_that_an_earlier_release_stored_or_exported_are_active_still(api, exported, policy, stored, change):
    draft = save_draft(policy, {"strategy": stored["strategy"]})
    PolicyRevision.objects.filter(pk=draft.pk).update(settings=stored)
    publish_revision(draft.pk)
    bundle = copy.deepcopy(exported)
    bundle["pools"][0]["policy"] = stored
    bundle["pools"][0]["share_half_life"] = None
    bundle["pools"][0]["groups"][0]["auto_replicas"] = {"reserved": 1}

    assert actions_of(put(api, bundle)) == []
    bundle["pools"][0]["policy"] |= change
    assert actions_of(put(api, bundle)) == ["change policy default"]


def test_missing_fields_and_lists_stay_unchanged(api, exported, fleet):
    set_replica_state(fleet.replicas.get(name="r2"), "draining")
    assert actions_of(put(api, {"format": 1, "pools": [{"name": "default", "replicas": [{"name": "r1"}]}]})) == []
    assert actions_of(put(api, {"format": 1, "pools": []})) == []
    assert Replica.objects.get(name="r2").state == "draining"


def test_pruning_removes_only_what_a_given_list_does_not_name(api, exported):
    bundle = {"format": 1, "pools": [{"name": "default", "groups": [{"name": "chat"}]}]}
    assert actions_of(put(api, bundle)) == []
    assert actions_of(put(api, bundle, prune="true")) == ["remove task group agents"]
    assert Replica.objects.count() == 2


def test_two_pools_can_swap_models_in_one_bundle(api, db):
    create_pool("a", models=["qwen"])
    create_pool("b", models=["llama"])
    bundle = {"format": 1, "pools": [{"name": "a", "models": ["llama"]}, {"name": "b", "models": ["qwen"]}]}
    assert actions_of(put(api, bundle)) == ["change pool a", "change pool b"]


@pytest.fixture
def followed(fleet):
    """The fleet with a source that follows r2, and one with a token."""
    source = create_source(fleet, name="pods", kind="dns", settings={"host": "vllm.test"}, adoption="adopt")
    r2 = Replica.objects.get(name="r2")
    DiscoveredReplica.objects.create(source=source, key="10.0.0.2", name="r2", url=r2.url, state="adopted", replica=r2)
    settings = {"namespace": "ml", "service": "vllm", "api_url": "https://10.9.9.9:6443"}
    create_source(fleet, name="cluster", kind="kubernetes", settings=settings, secret="source-secret", interval_s=60)
    return fleet


def test_sources_are_exported_and_discovered_replicas_are_not(api, followed):
    exported = json.loads(api.get(CONFIG).content)
    (pool,) = exported["pools"]
    assert [(row["name"], row["kind"], row["interval_s"]) for row in pool["sources"]] == [
        ("cluster", "kubernetes", 60.0),
        ("pods", "dns", 30.0),
    ]
    assert [row["name"] for row in pool["replicas"]] == ["r1"], "a source discovers r2 again"
    assert "source-secret" not in str(exported)
    assert "last_poll_at" not in pool["sources"][0], "results of polls are not exported"
    assert actions_of(put(api, exported, prune="true")) == []
    assert Replica.objects.filter(name="r2").exists()
    assert ReplicaSource.objects.get(name="cluster").encrypted is not None

    pool["sources"] = [
        pool["sources"][1] | {"interval_s": 10},
        {"name": "file", "kind": "dns", "settings": {"host": "x.test"}},
    ]
    response = put(api, exported, prune="true")
    assert actions_of(response) == [
        "change replica source pods",
        "create replica source file",
        "remove replica source cluster",
    ]
    assert list(response.data["actions"][0]["changes"]) == [{"field": "interval_s", "before": 30.0, "after": 10.0}]
    assert actions_of(put(api, {"format": 1, "pools": []}, prune="true"))[-1] == "remove pool default"
    assert not ReplicaSource.objects.exists()
    rebuilt = [row for row in actions_of(put(api, exported)) if "source" in row]
    assert rebuilt == ["create replica source pods", "create replica source file"]


def test_a_bundle_can_draft_policies(client_with, fleet, policy, django_user_model):
    editor, olga = client_with("write"), django_user_model.objects.get()
    django_user_model.objects.create_superuser("root")
    django_user_model.objects.filter(pk=olga.pk).update(is_superuser=False)
    set_role(olga, Role.EDITOR, fleet.project)
    prefix_hash = {"strategy": "prefix_hash"}
    bundle = of_default(policy=prefix_hash, groups=[{"name": "chat", "policy": {"strategy": "random"}}])

    assert put(editor, bundle).status_code == 403, "publishing takes an approver"
    planned = put(editor, bundle, draft="true", dry_run="true").data["result"]
    assert policy.draft() is None
    response = put(editor, {**bundle, "reason": "from the repository"}, draft="true")

    assert actions_of(response) == ["change draft default", "create draft default.chat"]
    assert list(response.data["actions"]) == list(planned["actions"])
    assert response.data["rollouts"] == []
    assert (policy.live().strategy, policy.draft().strategy) == ("round_robin", "prefix_hash")
    assert policy.draft().reason == "from the repository"
    assert actions_of(put(editor, bundle, draft="true")) == [], "it is drafted already"
    assert put(editor, of_default(policy={"strategy": "random"}), draft="true").status_code == 409


def of_default(**fields):
    """A bundle of pool ``default`` alone."""
    return {"format": 1, "pools": [{"name": "default", **fields}]}


@pytest.mark.parametrize(
    ("bundle", "pointer"),
    [
        ([], "#"),
        ({"pools": []}, "#/format"),
        ({"format": 1}, "#/pools"),
        ({"format": 1, "pools": [], "pool": []}, "#/pool"),
        ({"format": 1, "pools": [{}]}, "#/pools/0"),
        ({"format": 1, "pools": [{"name": "a"}, {"name": "a"}]}, "#/pools/1/name"),
        ({"format": 1, "pools": [{"name": "A"}]}, "#/pools/0/name"),
        (of_default(colour="red"), "#/pools/0/colour"),
        (of_default(project="other"), "#/pools/0/project"),
        (of_default(replicas={"name": "r1"}), "#/pools/0/replicas"),
        (of_default(replicas=[{"name": "r1", "weight": -1}]), "#/pools/0/replicas/0/weight"),
        (of_default(replicas=[{"name": "r1", "state": "off"}]), "#/pools/0/replicas/0/state"),
        (of_default(replicas=[{"name": "r9"}]), "#/pools/0/replicas/0/url"),
        (of_default(groups=[{"name": "chat", "replicas": ["r9"]}]), "#/pools/0/groups/0/replicas"),
        (of_default(sources=[{"name": "pods"}]), "#/pools/0/sources/0/settings"),
        (of_default(sources=[{"name": "pods", "kind": "dns", "settings": {}}]), "#/pools/0/sources/0/settings/host"),
        (of_default(sources=[{"name": "pods"}, {"name": "pods"}]), "#/pools/0/sources/1/name"),
        (of_default(policy={"strategy": "prefix_hash", "slack_s": -1}), "#/pools/0/policy/slack_s"),
        (of_default(groups=[{"name": "chat", "policy": {"strategy": "fast"}}]), "#/pools/0/groups/0/policy/strategy"),
    ],
)
def test_an_invalid_bundle_is_rejected_with_a_pointer(api, fleet, bundle, pointer):
    before = (ConfigSnapshot.objects.count(), Event.objects.count())
    response = put(api, bundle)
    assert response.status_code == 422, response.data
    assert response.data["errors"][0]["pointer"] == pointer
    assert (ConfigSnapshot.objects.count(), Event.objects.count()) == before


def test_one_invalid_object_rolls_back_the_whole_bundle(api, exported):
    bundle = copy.deepcopy(exported)
    bundle["pools"][0]["description"] = "changed"
    bundle["pools"].append({"name": "late", "replicas": [{"name": "r9", "url": "ftp://10.0.0.9"}]})
    response = put(api, bundle)
    assert response.status_code == 422
    assert response.data["errors"][0]["pointer"] == "#/pools/1/replicas/0/url"
    assert Pool.objects.get().description == ""


def test_a_bundle_that_makes_an_invalid_configuration_is_rejected(api, db):
    create_pool("a", models=["qwen"])
    bundle = {"format": 1, "pools": [{"name": "b", "models": ["qwen"]}]}
    response = put(api, bundle)
    assert response.status_code == 422
    assert not Pool.objects.filter(name="b").exists()


def test_a_different_draft_is_a_conflict(api, exported, policy):
    save_draft(policy, {"strategy": "random"})
    bundle = copy.deepcopy(exported)
    bundle["pools"][0]["policy"] = {"strategy": "prefix_hash"}
    assert put(api, bundle).status_code == 409
    assert policy.draft().strategy == "random"


def test_each_action_of_a_bundle_needs_its_own_role(client_with, fleet, exported, django_user_model):
    editor = client_with("write")
    project = fleet.project
    olga = django_user_model.objects.get()
    olga.is_superuser = False
    olga.save()
    django_user_model.objects.create_superuser("root")
    set_role(olga, Role.EDITOR, project)

    bundle = copy.deepcopy(exported)
    bundle["pools"][0]["replicas"][0]["weight"] = 5
    assert actions_of(put(editor, bundle)) == ["change replica r1"]

    bundle["pools"][0]["policy"] = {"strategy": "random"}
    response = put(editor, bundle)
    assert (response.status_code, "approver" in response.data["detail"]) == (403, True)
    assert Rollout.objects.count() == 0
    new_pool = {"format": 1, "pools": [{"name": "mine"}]}
    assert put(editor, new_pool).status_code == 403
    assert put(editor, {"format": 1, "pools": []}, prune="true").status_code == 403
    assert Pool.objects.get().name == "default"

    set_role(olga, Role.VIEWER, project)
    assert put(editor, exported).status_code == 403
    assert editor.get(CONFIG).status_code == 200


def test_other_projects_are_neither_exported_nor_pruned(client_with, exported, django_user_model):
    create_pool("theirs", project=create_project("theirs"), models=["theirs"])
    olga = django_user_model.objects.get()
    olga.is_superuser = False
    olga.save()
    django_user_model.objects.create_superuser("root")
    set_role(olga, Role.ADMIN, Pool.objects.get(name="default").project)
    api = client_with("admin")

    assert [pool["name"] for pool in api.get(CONFIG).data["pools"]] == ["default"]
    assert "remove pool theirs" not in actions_of(put(api, {"format": 1, "pools": []}, prune="true"))
    assert [pool.name for pool in Pool.objects.all()] == ["theirs"]


def test_an_export_takes_a_fixed_number_of_queries(api, fleet, django_assert_num_queries):
    api.get(CONFIG)
    with CaptureQueriesContext(connection) as small:
        api.get(CONFIG)
    for number in range(5):
        replica = add_replica(fleet, name=f"more-{number}", url=f"http://10.0.1.{number}:8000")
        create_task_group(fleet, f"group-{number}", replicas=[replica])
    with django_assert_num_queries(len(small)):
        api.get(CONFIG)


def test_applying_a_bundle_needs_the_current_etag(api, exported):
    first_tag = api.get(CONFIG)["ETag"]
    assert APIClient.generic(api, "PUT", CONFIG, json.dumps(exported), "application/json").status_code == 428
    bundle = of_default(description="H200s")
    assert api.put(CONFIG, bundle, format="json", headers={"If-Match": first_tag}).status_code == 200
    late = api.put(CONFIG, of_default(description="mine"), format="json", headers={"If-Match": first_tag})
    assert (late.status_code, late.data["current"]["pools"][0]["description"]) == (412, "H200s")
    assert late.data["etag"] == api.get(CONFIG)["ETag"]
    assert api.patch("/api/v1/replicas/r1", {"api_key": "new"}).status_code == 200  # no export shows it
    assert api.put(CONFIG, bundle, format="json", headers={"If-Match": late.data["etag"]}).status_code == 412
