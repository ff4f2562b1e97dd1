import pytest

from controlplane.models import ConfigSnapshot, Event, Router
from controlplane.services.fleet.pools import create_pool

pytestmark = pytest.mark.django_db


def test_a_replica_can_be_added_changed_drained_and_removed(api, pool):
    created = api.post("/api/v1/replicas", {"pool": "default", "name": "r1", "url": "http://10.0.0.1:8000/"})
    assert (created.status_code, created.data["url"], created.data["block_tokens"]) == (
        201,
        "http://10.0.0.1:8000",
        None,
    )

    changed = api.patch("/api/v1/replicas/r1", {"weight": 2.5})
    assert changed.data["weight"] == 2.5
    assert api.post("/api/v1/replicas/r1/state", {"state": "draining"}).data["state"] == "draining"
    assert ConfigSnapshot.objects.first().document["pools"][0]["replicas"][0]["state"] == "draining"

    assert api.delete("/api/v1/replicas/r1").status_code == 204
    assert api.get("/api/v1/replicas/r1").status_code == 404
    kinds = list(Event.objects.filter(kind__startswith="replica").values_list("kind", flat=True))
    assert kinds == ["replica_removed", "replica_state_changed", "replica_changed", "replica_added"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"name": "r1", "url": "ftp://10.0.0.1"}, "#/url"),
        ({"name": "R 1", "url": "http://10.0.0.1:8000"}, "#/name"),
        ({"name": "r1", "url": "http://10.0.0.1:8000", "weight": 0}, "#/weight"),
        ({"name": "r1"}, "#/url"),
        ({"name": "r1", "url": "http://10.0.0.1:8000", "pool": "other"}, "#/pool"),
    ],
)
def test_an_invalid_replica_is_rejected_with_a_pointer(api, pool, body, pointer):
    response = api.post("/api/v1/replicas", {"pool": "default", **body})
    assert response.status_code == 422
    assert [fault["pointer"] for fault in response.data["errors"]] == [pointer]


def test_a_pool_can_be_created_changed_and_removed(api, db):
    assert api.post("/api/v1/pools", {"name": "big", "models": ["qwen", "qwen"]}).data["models"] == ["qwen"]
    assert api.post("/api/v1/pools", {"name": "big"}).status_code == 409
    assert api.patch("/api/v1/pools/big", {"description": "H200s"}).data["description"] == "H200s"
    assert api.delete("/api/v1/pools/big").status_code == 204
    assert ConfigSnapshot.objects.first().document["pools"] == []


@pytest.mark.parametrize("adapters", [7, "lora", {"name": "lora"}, [7], None, True])
def test_invalid_adapters_are_rejected_with_a_pointer(api, pool, adapters):
    response = api.post("/api/v1/pools", {"name": "big", "models": ["qwen"], "adapters": adapters})
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"].startswith("#/adapters")


def test_a_model_belongs_to_one_pool(api, pool):
    response = api.post("/api/v1/pools", {"name": "second"})
    assert (response.status_code, response.data["errors"][0]["pointer"]) == (422, "#/models")
    assert api.get("/api/v1/pools").data["count"] == 1


@pytest.mark.parametrize(
    ("pools", "models", "warning"),
    [
        ([], ["a"], None),
        ([["a"]], ["b"], "Requests that name no model are rejected"),
        ([["a"]], [], "go to pool new"),
        ([[]], ["b"], None),
        ([["a"], ["c"]], ["b"], None),  # the second one warned
    ],
)
def test_a_second_pool_warns_of_requests_that_name_no_model(api, client, operator, pools, models, warning):
    for number, served in enumerate(pools):
        project = create_pool(f"pool-{number}", models=served).project
    created = api.post("/api/v1/pools", {"name": "new", "models": models}, format="json")
    warnings = created.data["warnings"]
    assert len(warnings) == bool(warning)
    assert all(warning in text for text in warnings)
    if warning:
        api.delete("/api/v1/pools/new")
        client.force_login(operator)
        form = {"name": "new", "models": "\n".join(models), "project": project.pk}
        assert warning in client.post("/fleet/pools/new/", form, follow=True).text


def test_a_task_group_can_be_limited_to_replicas_of_its_pool(api, replica):
    created = api.post("/api/v1/task-groups", {"pool": "default", "name": "chat", "replicas": ["r1"]})
    assert created.data["replicas"] == ["r1"]
    assert api.delete("/api/v1/replicas/r1").status_code == 409  # the subset would widen to all
    assert (
        api.patch(f"/api/v1/task-groups/{created.data['id']}", {"replicas": [], "owner": "web"}).data["replicas"] == []
    )
    assert api.delete(f"/api/v1/task-groups/{created.data['id']}").status_code == 204


def test_lists_can_be_filtered(api, replica):
    api.post("/api/v1/replicas/r1/state", {"state": "disabled"})
    count = {state: api.get("/api/v1/replicas", {"state": state}).data["count"] for state in ("active", "disabled")}
    assert count == {"active": 0, "disabled": 1}
    assert api.get("/api/v1/replicas", {"state": "asleep"}).status_code == 422
    assert api.get("/api/v1/replicas", {"pool": "\0"}).status_code == 422


# --- routers -----------------------------------------------------------------------------------------------

ANNOUNCEMENT = {"name": "router-1", "boot": "b1", "admin_url": "http://127.0.0.1:8081", "revision": None}


@pytest.fixture
def router_api(client):
    def post(body, token="router-token-for-tests"):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return client.post("/api/v1/routers/announce", body, content_type="application/json", headers=headers)

    return post


def test_an_announced_router_is_listed_with_its_desired_configuration(router_api, api, pool):
    desired = ConfigSnapshot.objects.first().number
    assert router_api(ANNOUNCEMENT).json() == {"desired_revision": desired, "acknowledged_events": 0}
    listed = api.get("/api/v1/routers/router-1").data
    assert (listed["desired_number"], listed["running_number"], listed["in_sync"]) == (desired, None, False)


def test_a_router_reports_warm_up_progress(router_api, api, pool):
    progress = {"gpu-7": {"prefixes_done": 1, "prefixes": 9, "tokens_done": 800, "tokens": 9000}}
    assert router_api(ANNOUNCEMENT | {"warming": progress}).status_code == 200
    assert api.get("/api/v1/routers/router-1").data["warming"] == progress
    assert router_api(ANNOUNCEMENT).status_code == 200
    assert api.get("/api/v1/routers/router-1").data["warming"] == {}


def test_unknown_fields_of_a_newer_router_are_ignored(router_api, api, pool):
    """Routers may be upgraded before the control plane."""
    signature = {"state": "verified", "key": "0123456789abcdef", "expires_at": 1_900_000_000, "chain": ["x"]}
    newer = {"mood": "good", "nested": {"a": [1]}, "signature": signature}
    assert router_api(ANNOUNCEMENT | newer).status_code == 200
    listed = api.get("/api/v1/routers/router-1").data
    assert (listed["signature_state"], listed["signature_key"]) == ("verified", "0123456789abcdef")
    assert listed["lost_at"] is None


@pytest.mark.parametrize("token", ["", "wrong", "router-token-for-test", "r\xf6uter"])
def test_announcing_needs_the_routers_token(router_api, token, db):
    assert router_api(ANNOUNCEMENT, token=token).status_code == 401
    assert not Router.objects.exists()


def test_user_tokens_and_router_tokens_are_not_interchangeable(api, client, db):
    assert api.post("/api/v1/routers/announce", ANNOUNCEMENT).status_code == 401
    headers = {"Authorization": "Bearer router-token-for-tests"}
    assert client.get("/api/v1/routers", headers=headers).status_code == 401


@pytest.mark.parametrize(("address", "status"), [("10.1.2.3", 200), ("203.0.113.9", 403)])
def test_a_router_may_announce_over_plain_http_from_the_fleets_networks(settings, client, pool, address, status):
    settings.SECURE_SSL_REDIRECT, settings.BEHIND_TLS_PROXY = True, True
    settings.SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    settings.SECURE_REDIRECT_EXEMPT = [r"^api/"]
    headers = {"Authorization": "Bearer router-token-for-tests", "X-Forwarded-For": address}
    path, body = "/api/v1/routers/announce", {"data": ANNOUNCEMENT, "content_type": "application/json"}
    assert client.post(path, **body, headers={**headers, "X-Forwarded-Proto": "http"}).status_code == status
    assert client.post(path, **body, headers={**headers, "X-Forwarded-Proto": "https"}).status_code == 200


def test_without_a_configured_token_no_router_can_announce(router_api, settings, db):
    settings.ROUTER_ADMIN_TOKEN = ""
    for token in ("", "anything"):
        assert router_api(ANNOUNCEMENT, token=token).status_code == 401


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"name": ""}, "#/name"),
        ({"name": "a/b"}, "#/name"),
        ({"name": None}, "#/name"),
        ({"admin_url": "file:///etc/passwd"}, "#/admin_url"),
        ({"data_url": "nonsense"}, "#/data_url"),
        ({"revision": 0}, "#/revision"),
        ({"sha256": "x"}, "#/sha256"),
        ({"warming": []}, "#/warming"),
        ({"warming": {"gpu-7": {"prefixes": 1}}}, "#/warming/gpu-7/prefixes_done"),
    ],
)
def test_an_invalid_announcement_is_rejected(router_api, change, pointer, db):
    response = router_api(ANNOUNCEMENT | change)
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == pointer
    assert not Router.objects.exists()
