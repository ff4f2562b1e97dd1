"""Roles over REST: objects of other projects are not found, lists and bodies are restricted."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.models import Pool, Replica, Role, Scope
from controlplane.services.access.tokens import create_token
from controlplane.services.access.users import set_active
from controlplane.services.fleet.pools import create_project
from tests.rest_client import CarefulClient

ROOT = "/api/v1/"
ANY = {"If-Match": "*"}
LISTS = (
    "pools",
    "replicas",
    "replica-sources",
    "client-keys",
    "discovered-replicas",
    "task-groups",
    "policies",
    "revisions",
    "rollouts",
    "alert-rules",
    "alerts",
    "silences",
    "deliveries",
    "what-ifs",
)


def objects(project):
    return {
        "pools": project.pool.name,
        "replicas": project.replica.name,
        "replica-sources": project.source.name,
        "client-keys": project.key.pk,
        "discovered-replicas": project.discovered.pk,
        "task-groups": project.group.pk,
        "policies": project.policy.name,
        "revisions": project.draft.pk,
        "alert-rules": project.rule.pk,
        "alerts": project.alert.pk,
        "silences": project.silence.pk,
        "deliveries": project.notification.pk,
        "projects": project.project.name,
        "what-ifs": project.what_if.pk,
    }


@pytest.fixture
def script_of():
    """Creates a client with a token of a user."""

    def make(user, scope=Scope.ADMIN):
        _, text = create_token(user, name="test", scopes=[scope])
        client = CarefulClient()
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
        return client

    return make


def test_lists_show_only_the_projects_of_the_user(here, there, user_with, script_of):
    script = script_of(user_with("viewer"))
    for resource in LISTS:
        response = script.get(f"{ROOT}{resource}")
        assert response.status_code == 200, resource
        assert "there" not in response.content.decode(), resource
    assert [row["name"] for row in script.get(f"{ROOT}pools").data["results"]] == ["here-pool"]
    assert {event["pool"] for event in script.get(f"{ROOT}events").data["results"]} == {"here-pool"}


def test_objects_of_other_projects_are_not_found(here, there, user_with, script_of):
    script = script_of(user_with("admin"))
    for resource, key in objects(there).items():
        for method in ("get", "patch", "delete"):
            response = getattr(script, method)(f"{ROOT}{resource}/{key}", {})
            assert response.status_code in {404, 405}, f"{method} {resource}"
    for path in (
        f"replicas/{there.replica.name}/state",
        f"replica-sources/{there.source.name}/poll",
        f"discovered-replicas/{there.discovered.pk}/adopt",
        f"policies/{there.policy.name}/publish",
        f"task-groups/{there.group.pk}/purge-response-cache",
        f"alerts/{there.alert.pk}/acknowledge",
        f"what-ifs/{there.what_if.pk}/cancel",
    ):
        assert script.post(f"{ROOT}{path}", {"state": "disabled"}).status_code == 404
    for query in (
        f"series?metric=hit_rate&pool={there.pool.name}",
        f"capacity?pool={there.pool.name}",
        f"response-caches?pool={there.pool.name}",
        f"report?pool={there.pool.name}",
        f"report?rollout={there.rollout.pk}",
    ):
        assert script.get(f"{ROOT}{query}").status_code == 422, query  # no such pool, or rollout
    assert script.get(f"{ROOT}pools/{here.pool.name}").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("replicas", {"pool": "there-pool", "name": "spy", "url": "http://10.0.9.9:8000"}),
        ("replica-sources", {"pool": "there-pool", "name": "spy", "kind": "dns", "settings": {"host": "x.test"}}),
        ("task-groups", {"pool": "there-pool", "name": "spy"}),
        ("client-keys", {"project": "there", "name": "spy"}),
        ("task-groups", {"pool": "here-pool", "name": "spy", "replicas": ["there-replica"]}),
        ("alert-rules", {"pool": "there-pool", "name": "spy"}),
        ("pools", {"project": "there", "name": "spy"}),
        ("what-ifs", {"pool": "there-pool", "candidates": [{"name": "spy", "replicas": 2}]}),
    ],
)
@pytest.mark.usefixtures("here", "there")
def test_a_body_cannot_name_invisible_objects(user_with, script_of, path, body):
    before = (Pool.objects.count(), Replica.objects.count())
    response = script_of(user_with("admin")).post(f"{ROOT}{path}", body, format="json")
    assert response.status_code == 422
    assert "does not exist" in response.content.decode()
    assert (Pool.objects.count(), Replica.objects.count()) == before


def test_a_role_in_one_project_does_not_count_in_another(here, there, user_with, script_of):
    from controlplane.services.access.users import set_role

    user = user_with("editor")
    set_role(user, Role.VIEWER, there.project)
    script = script_of(user)
    assert script.get(f"{ROOT}pools/there-pool").status_code == 200
    assert script.patch(f"{ROOT}pools/here-pool", {"description": "x"}).status_code == 200
    assert script.patch(f"{ROOT}pools/there-pool", {"description": "x"}).status_code == 403
    response = script.post(f"{ROOT}replicas", {"pool": "there-pool", "name": "r", "url": "http://10.0.9.9:8000"})
    assert response.status_code == 403


@pytest.mark.parametrize(("scope", "status"), [(Scope.READ, 403), (Scope.WRITE, 200), (Scope.ADMIN, 200)])
def test_a_token_is_bounded_by_its_scope_and_its_user(here, user_with, script_of, scope, status):
    assert script_of(user_with("editor"), scope).patch(f"{ROOT}pools/here-pool", {}).status_code == status
    viewer = script_of(user_with("viewer"), scope)
    assert viewer.patch(f"{ROOT}pools/here-pool", {}).status_code == 403


def test_roles_are_queried_once_a_request(here, user_with, script_of):
    script = script_of(user_with("editor"))
    with CaptureQueriesContext(connection) as queries:
        assert script.patch(f"{ROOT}pools/here-pool", {"description": "x"}, headers=ANY).status_code == 200
    assert sum("controlplane_roleassignment" in query["sql"] for query in queries) == 1


def test_tokens_of_a_disabled_user_are_rejected(here, user_with, script_of):
    user_with("admin", everywhere=True)
    user = user_with("viewer")
    script = script_of(user)
    assert script.get(f"{ROOT}pools").status_code == 200
    set_active(user, False)
    assert script.get(f"{ROOT}pools").status_code == 401


def test_fleet_wide_objects_need_a_role_in_all_projects(here, user_with, script_of):
    project_admin, fleet_admin = script_of(user_with("admin")), script_of(user_with("admin", everywhere=True))
    for resource in ("projects", "routers", "channels", "tokens", "audit"):
        assert project_admin.get(f"{ROOT}{resource}").status_code == 403, resource
        assert fleet_admin.get(f"{ROOT}{resource}").status_code == 200, resource
    assert project_admin.get(f"{ROOT}channels/{here.channel.pk}").status_code == 404
    assert project_admin.post(f"{ROOT}pools", {"name": "mine"}).status_code == 403  # it would be in another project
    assert project_admin.post(f"{ROOT}pools", {"name": "mine", "project": "here", "models": ["m"]}).status_code == 201


@pytest.mark.parametrize("path", ["/", "/live/", "/events/", "/charts/hit-rate/figure/", "/charts/hit-rate.json"])
def test_pages_reveal_neither_other_projects_nor_users(here, there, user_with, client, path):
    client.force_login(user_with("viewer"))
    create_project("confidential")
    page = client.get(path).content.decode()
    for secret in ("there-", "confidential", "is viewer of"):
        assert secret not in page
