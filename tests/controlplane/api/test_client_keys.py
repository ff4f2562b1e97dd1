"""Client keys and fleet settings, from REST to the routers' configuration."""

import hashlib
import logging

import pytest

from controlplane.models import AuditEntry, ClientKey, ConfigSnapshot, Event
from controlplane.push.snapshot import build_config
from controlplane.services.fleet.client_keys import create_client_key, revoke_client_key
from controlplane.services.fleet.pools import create_pool, create_project, update_fleet_settings, update_pool
from controlplane.services.fleet.task_groups import create_task_group, remove_task_group, update_task_group
from controlplane.services.snapshots import newest_snapshot, snapshot_document
from routing import schema

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_pool")]
KEYS, FLEET = "/api/v1/client-keys", "/api/v1/fleet-settings"


def running() -> schema.RouterConfig:
    """The configuration as a router reads it: through its own validation of the encrypted bytes."""
    return schema.load_snapshot(snapshot_document(ConfigSnapshot.objects.first())).config


@pytest.fixture
def chat(pool):
    return create_task_group(pool, "chat")


@pytest.fixture
def keys_required(pool):
    """Requests now need a client key."""
    update_fleet_settings(needs_key=True)


# --- a key's life -------------------------------------------------------------------------------------------


def test_a_client_key_can_be_created_changed_and_revoked(api, chat, keys_required):
    body = {"project": "default", "name": "agents", "groups": ["chat"], "requests_per_s": 5, "burst": 20}
    created = api.post(KEYS, body, format="json")
    assert (created.status_code, created.data["full_name"], created["Cache-Control"]) == (
        201,
        "default.agents",
        "private, no-store",
    )
    text = created.data["key"]
    (key,) = running().access.keys
    assert (key.name, key.digest) == ("default.agents", hashlib.sha256(text.encode()).hexdigest())
    assert (key.models, key.groups, key.requests_per_s, key.burst) == (None, ("chat",), 5.0, 20)

    path = f"{KEYS}/{created.data['id']}"
    assert key.queue_weight == 1.0
    limits = {"burst": None, "requests_per_s": None, "tokens_per_min": 9000, "queue_weight": 2}
    changed = api.patch(path, limits, format="json")
    assert (changed.data["burst"], changed.data["tokens_per_min"]) == (None, 9000)
    assert (running().access.keys[0].tokens_per_min, running().access.keys[0].queue_weight) == (9000, 2.0)
    assert "key" not in changed.data

    assert api.delete(path).status_code == 204
    assert running().access.keys == ()
    assert api.delete(path).status_code == 409
    assert api.patch(path, {"burst": None}, format="json").status_code == 409
    assert api.post(KEYS, body, format="json").status_code == 201  # the name is free again
    assert api.get(KEYS, {"revoked": "false"}).data["count"] == 1


def test_the_expiry_of_a_key_is_part_of_the_configuration(api, chat, keys_required):
    """Routers reject an expired key by their own clocks: nothing is pushed at that time."""
    ends = "2090-03-04T12:00:00Z"
    created = api.post(KEYS, {"project": "default", "name": "agents", "expires_at": ends}, format="json")
    assert (created.status_code, created.data["expires_at"]) == (201, ends)
    assert running().access.keys[0].expires_at == 3_792_312_000
    path = f"{KEYS}/{created.data['id']}"
    assert api.patch(path, {"expires_at": "2020-01-01T00:00:00Z"}, format="json").status_code == 422
    ClientKey.objects.update(expires_at="2021-01-01T00:00:00Z")
    assert api.patch(path, {"tokens_per_min": 5}, format="json").data["expires_at"] == "2021-01-01T00:00:00Z"
    assert api.patch(path, {"expires_at": None}, format="json").status_code == 200
    assert b"expires_at" not in snapshot_document(ConfigSnapshot.objects.first())  # as routers before it read it


def test_the_text_and_digest_of_a_key_appear_only_in_the_response_that_created_it(api, chat, keys_required, caplog):
    caplog.set_level(logging.DEBUG)
    headers = {"Idempotency-Key": "once"}
    created = api.post(KEYS, {"project": "default", "name": "agents"}, format="json", headers=headers)
    digest = ClientKey.objects.get().digest
    texts = [api.get(f"/api/v1/{path}").content.decode() for path in ("client-keys", "events", "audit", "config")]
    texts += [str(row) for row in ConfigSnapshot.objects.values("document", "reason")]
    texts += [str(row) for row in (*Event.objects.values(), *AuditEntry.objects.values())]
    assert not [text for text in (*texts, caplog.text) if created.data["key"] in text or digest in text]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"groups": ["nobody"]}, "#/groups/0"),
        ({"groups": []}, "#/groups"),
        ({"models": ["gpt"]}, "#/models/0"),
        ({"burst": 3}, "#/burst"),
        ({"queue_weight": 0.0009}, "#/queue_weight"),
        ({"queue_weight": None}, "#/queue_weight"),
        ({"requests_per_s": 0}, "#/requests_per_s"),
        ({"tokens_per_min": 0.5}, "#/tokens_per_min"),
        ({"tenant": "Red Team"}, "#/tenant"),
        ({"name": "Agents"}, "#/name"),
        ({"project": "nowhere"}, "#/project"),
        ({"digest": "0" * 64}, "#/digest"),
    ],
)
@pytest.mark.parametrize("needs_key", [False, True])
def test_an_invalid_key_is_rejected_whether_or_not_keys_are_required(api, chat, body, pointer, needs_key):
    update_pool(chat.pool, models=["llama"])
    update_fleet_settings(needs_key=needs_key)
    response = api.post(KEYS, {"project": "default", "name": "agents", **body}, format="json")
    assert (response.status_code, [fault["pointer"] for fault in response.data["errors"]]) == (422, [pointer])
    assert not ClientKey.objects.exists()


def test_key_names_are_unique_within_a_project(api, pool):
    other = create_project("other")
    create_client_key(other, "agents")
    for status in (201, 409):
        assert api.post(KEYS, {"project": "default", "name": "agents"}, format="json").status_code == status


# --- projects -----------------------------------------------------------------------------------------------


def test_a_key_permits_only_the_models_and_tenants_of_its_project(db):
    keys = {}
    for name in ("red", "blue"):
        project = create_project(name)
        pool = create_pool(f"{name}-pool", project=project, models=[f"{name}-llm"])
        update_pool(pool, aliases=[{"name": f"{name}-alias", "model": f"{name}-llm"}])
        keys[name], _ = create_client_key(project, "agents", tenant="one")
    update_fleet_settings(needs_key=True)
    keys_by_name = {key.name: key for key in running().access.keys}
    assert keys_by_name["red.agents"].models == ("red-alias", "red-llm")
    assert keys_by_name["blue.agents"].models == ("blue-alias", "blue-llm")
    assert (keys_by_name["red.agents"].tenant, keys_by_name["blue.agents"].tenant) == ("red.one", "blue.one")


def test_a_key_cannot_name_models_or_groups_of_another_project(api, chat):
    update_pool(chat.pool, models=["llama"])
    other = create_pool("other", project=create_project("other"), models=["qwen"])
    create_task_group(other, "batch")
    for body, pointer in (({"groups": ["batch"]}, "#/groups/0"), ({"models": ["qwen"]}, "#/models/0")):
        response = api.post(KEYS, {"project": "default", "name": "agents", **body}, format="json")
        assert (response.status_code, response.data["errors"][0]["pointer"]) == (422, pointer)


def test_removed_groups_are_left_out_of_keys(chat, keys_required):
    batch = create_task_group(chat.pool, "batch")
    create_client_key(chat.pool.project, "both", groups=["batch", "chat"])
    create_client_key(chat.pool.project, "one", groups=["batch"])
    assert [key.name for key in running().access.keys] == ["default.both", "default.one"]
    remove_task_group(batch)
    assert [(key.name, key.groups) for key in running().access.keys] == [("default.both", ("chat",))]


# --- groups that match keys --------------------------------------------------------------------------


def test_a_group_matches_api_keys_while_keys_are_required(chat):
    key, _ = create_client_key(chat.pool.project, "agents")
    update_task_group(chat, match={"api_keys": ["agents"], "api_key_prefixes": ["team-"]})
    update_fleet_settings(needs_key=True)
    match = running().pools[0].groups[0].match
    assert (match.api_keys, match.api_key_prefixes) == (("default.agents",), ("default.team-",))

    update_fleet_settings(needs_key=False)
    assert (running().access, running().pools[0].groups[0].match.api_keys) == (None, ())
    update_fleet_settings(needs_key=True)
    revoke_client_key(key)
    assert running().pools[0].groups[0].match.api_keys == ()


def test_a_group_cannot_match_a_key_of_another_project(api, chat):
    create_client_key(create_project("other"), "agents")
    response = api.patch(f"/api/v1/task-groups/{chat.pk}", {"match": {"api_keys": ["agents"]}}, format="json")
    assert (response.status_code, response.data["errors"][0]["pointer"]) == (422, "#/match/api_keys/0")


# --- what holds for all routers -----------------------------------------------------------------------------


def test_no_key_is_required_and_no_limit_is_set_by_default(api, pool):
    create_client_key(pool.project, "agents")
    before = newest_snapshot().number
    assert api.get(FLEET).data == {"needs_key": False, "limits": None, "etag": api.get(FLEET)["ETag"]}
    assert (running().access, running().limits) == (None, schema.Limits())
    created = build_config("ab" * 32)
    assert created == schema.RouterConfig("ab" * 32, created.pools, replica_networks=created.replica_networks)
    assert newest_snapshot().number == before


def test_fleet_limits_reach_the_routers_and_can_be_reset(api, pool):
    before = newest_snapshot().sha256
    limits = {"max_in_flight": 100, "max_connections_per_address": 8, "retry_ratio": 0.0}
    limits |= {"retry_on": ["connect", "timeout"], "response_timeout_s": 60.0}
    response = api.patch(FLEET, {"limits": limits}, format="json")
    assert response.data["limits"] == response.data["limits"] | limits
    assert (running().limits.max_in_flight, running().limits.retries) == (100, 2)
    assert (running().limits.retry_on, running().limits.response_timeout_s) == (("connect", "timeout"), 60.0)
    assert api.patch(FLEET, {"limits": None}, format="json").data["limits"] is None
    assert newest_snapshot().sha256 == before


def test_requiring_keys_creates_one_configuration_and_one_event(api, pool):
    before = newest_snapshot().number
    for _ in range(2):
        assert api.patch(FLEET, {"needs_key": True}, format="json").data["needs_key"] is True
    assert newest_snapshot().number == before + 1
    event = Event.objects.first()
    assert (event.kind, event.summary) == ("fleet_changed", "Requests now need a client key.")
    assert running().access == schema.Access()


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"limits": {"retries": 9}}, "#/limits/retries"),
        ({"limits": {"retires": 1}}, "#/limits"),
        ({"limits": {"retry_on": ["connect", "timeouts"]}}, "#/limits/retry_on/1"),
        ({"limits": {"retry_on": []}}, "#/limits/retry_on"),
        ({"limits": {"response_timeout_s": 0}}, "#/limits/response_timeout_s"),
        ({"needs_key": None}, "#/needs_key"),
    ],
)
def test_invalid_limits_are_rejected(api, pool, body, pointer):
    response = api.patch(FLEET, body, format="json")
    assert (response.status_code, response.data["errors"][0]["pointer"]) == (422, pointer)
    assert running().limits == schema.Limits()
