"""Settings of pools, replicas and task groups, from REST to the routers' configuration."""

import logging
from ipaddress import ip_network

import pytest

from controlplane.egress import fleet_rules
from controlplane.errors import InvalidError
from controlplane.models import AuditEntry, ConfigSnapshot, Event, IdempotencyRecord, Replica, Role
from controlplane.push.snapshot import build_config
from controlplane.services.access.users import set_role
from controlplane.services.fleet.kv_event_sources import record_event_sources
from controlplane.services.fleet.pools import create_pool, create_project, update_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.snapshots import newest_snapshot, single_snapshot, snapshot_document
from routing import schema
from tests.controlplane.test_kv_cache import LLAMA_70B

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_pool")]
CANARY = "sk-canary-5b1f0c"
COSTS = {"gpu_hour_price": 2.5, "gpus_per_replica": 4.0, "currency": "USD"}


def running() -> schema.PoolConfig:
    """The pool ``default`` as a router reads it: through its own validation of the encrypted bytes."""
    pools = schema.load_snapshot(snapshot_document(ConfigSnapshot.objects.first())).config.pools
    return next(pool for pool in pools if pool.name == "default")


def json_of(config, field):
    """A part of the schema as JSON."""
    import msgspec

    return msgspec.json.decode(msgspec.json.encode(getattr(config, field)))


# --- each setting, there and back ---------------------------------------------------------------------------

POOL_SETTINGS = [
    ("models", ["llama", "qwen"], []),
    ("health", {"path": "/healthz", "interval_s": 5.0, "timeout_s": 1.0, "failures": 3, "successes": 2}, None),
    ("breaker", {"failures": 9, "stall_s": None}, None),
    ("caps", {"n": None, "max_tokens": 4096, "media_hosts": []}, None),
    ("concurrency", {"max_running": 64}, None),
    ("tier1", {"boundary": "marker", "boundary_marker": "---"}, None),
    ("adapter_replicas", 2, None),
    ("stream_usage", "as_sent", None),
    ("warm_up", {"max_tokens": 50_000, "priority": None}, None),
    ("session_keys", ["header:X-Conversation", "body:user"], None),
    ("session_keys", [], None),
    ("paths", ["/v1/chat/completions", "/v1/messages"], None),
    ("disaggregation", {"min_uncached_tokens": 512}, None),
    ("allowed_origins", ["app://obsidian.md", "https://chat.example:8443"], []),
    ("allowed_origins", ["*"], []),
]
GROUP_SETTINGS = [
    ("match", {"session_prefixes": ["agent-"], "tier1_hashes": ["0123456789abcdef"], "models": ["llama"]}, None),
    ("tier1", {"boundary": "bytes", "boundary_bytes": 4096}, None),
    ("priority", 7, 0),
    ("concurrency", {"max_running": 8, "max_waiting": 0}, None),
    ("caps", {"max_tokens": 100}, None),
]
KV_EVENTS = {"endpoint": "tcp://gpu-1:5557", "replay_endpoint": "tcp://10.0.0.1:5657", "topic": "kv@"}
REPLICA_SETTINGS = [
    ("weight", 2.5, 1.0),
    ("data_parallel_size", 4, 1),
    ("adapters", [], None),
    ("kv_events", KV_EVENTS, None),
    ("role", "decode", "both"),
]


@pytest.fixture
def group(pool, replica):
    return create_task_group(pool, "chat")


@pytest.mark.parametrize(("field", "value", "unset"), POOL_SETTINGS)
def test_a_pool_setting_reaches_the_routers_and_can_be_reset(api, pool, field, value, unset):
    before = newest_snapshot().sha256
    response = api.patch("/api/v1/pools/default", {field: value}, format="json")
    assert response.status_code == 200
    assert response.data[field] == json_of(running(), field)
    assert response.data[field] == (response.data[field] | value if isinstance(value, dict) else value)
    assert api.get("/api/v1/pools/default").data[field] == response.data[field]

    assert api.patch("/api/v1/pools/default", {field: unset}, format="json").data[field] == unset
    assert newest_snapshot().sha256 == before


@pytest.mark.parametrize(("field", "value", "unset"), GROUP_SETTINGS)
def test_a_task_group_setting_reaches_the_routers_and_can_be_reset(api, group, field, value, unset):
    before, path = newest_snapshot().sha256, f"/api/v1/task-groups/{group.pk}"
    response = api.patch(path, {field: value}, format="json")
    assert response.status_code == 200, response.data
    assert response.data[field] == json_of(running().groups[0], field)
    assert response.data[field] == (response.data[field] | value if isinstance(value, dict) else value)

    assert api.patch(path, {field: unset}, format="json").data[field] == unset
    assert newest_snapshot().sha256 == before


@pytest.mark.parametrize(("field", "value", "unset"), REPLICA_SETTINGS)
def test_a_replica_setting_reaches_the_routers_and_can_be_reset(api, replica, field, value, unset):
    before = newest_snapshot().sha256
    response = api.patch("/api/v1/replicas/r1", {field: value}, format="json")
    assert response.data[field] == value == json_of(running().replicas[0], field)
    assert api.patch("/api/v1/replicas/r1", {field: unset}, format="json").data[field] == unset
    assert newest_snapshot().sha256 == before


def test_all_settings_can_be_set_on_creation(api, pool):
    assert api.delete("/api/v1/pools/default").status_code == 204
    settings = {field: value for field, value, _ in POOL_SETTINGS}
    names = {
        "aliases": [{"name": "gpt", "model": "llama"}],
        "adapters": [{"name": "law", "model": "llama"}, {"name": "art", "model": "qwen"}],
    }
    assert api.post("/api/v1/pools", {"name": "default", **settings, **names}, format="json").status_code == 201
    engine = {"pool": "default", "name": "r1", "url": "http://10.0.0.1:8000", "adapters": ["law"]}
    assert api.post("/api/v1/replicas", engine, format="json").status_code == 201
    task = {"pool": "default", "name": "chat", **{field: value for field, value, _ in GROUP_SETTINGS}}
    assert api.post("/api/v1/task-groups", task, format="json").status_code == 201
    assert [name for name, _ in running().names] == ["llama", "qwen", "gpt", "art", "law"]
    assert (running().replicas[0].adapters, running().groups[0].priority) == (("law",), 7)


def test_objectives_of_a_group_do_not_change_the_configuration(api, group):
    before = newest_snapshot().number
    facts = {"expected_tier1": "0123456789abcdef", "hit_rate_objective": 0.6, "owner": "agents"}
    response = api.patch(f"/api/v1/task-groups/{group.pk}", facts, format="json")
    assert {name: response.data[name] for name in facts} == facts
    assert newest_snapshot().number == before
    assert Event.objects.first().detail["after"]["hit_rate_objective"] == 0.6


def test_the_cache_size_and_prices_of_a_pool_are_kept_here_and_exported(api, pool):
    before = newest_snapshot().sha256
    config = {**LLAMA_70B, "architectures": ["LlamaForCausalLM"], "vocab_size": 128256}
    body = {"kv_cache": {"model_config": config}, "costs": COSTS}
    response = api.patch("/api/v1/pools/default", body, format="json")
    assert response.status_code == 200, response.data
    assert response.data["kv_cache"] == {"bytes_per_token": None, "dtype": "auto", "model_config": LLAMA_70B}
    assert (response.data["kv_bytes_per_token"], response.data["costs"]) == (320 * 1024, COSTS)
    (exported,) = api.get("/api/v1/config").data["pools"]
    assert (exported["costs"], exported["kv_cache"]["model_config"]) == (COSTS, LLAMA_70B)
    assert newest_snapshot().sha256 == before, "routers do not need them"
    response = api.patch("/api/v1/pools/default", {"kv_cache": None}, format="json")
    assert (response.data["kv_cache"], response.data["kv_bytes_per_token"]) == (None, None)


# --- what an upgrade leaves as it is ------------------------------------------------------------------------


def test_unset_settings_leave_the_configuration_unchanged(pool, replica, settings):
    create_task_group(pool, "chat", replicas=[replica])
    secret = "ab" * 32
    policy = schema.PolicyConfig(name="default", revision=1, settings=schema.RoundRobinSettings())
    former = schema.PoolConfig(
        name="default",
        policy=policy,
        models=(),
        replicas=(schema.ReplicaConfig(name="r1", url="http://10.0.0.1:8000"),),
        groups=(schema.TaskGroupConfig(name="chat", policy=None, replicas=("r1",)),),
    )
    networks = schema.ReplicaNetworks(allowed=tuple(map(str, settings.FLEET_NETWORKS)))
    expected = schema.encode_config(schema.RouterConfig(hash_secret=secret, pools=(former,), replica_networks=networks))
    assert schema.encode_config(build_config(secret)) == expected


# --- what routers would refuse ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "pointer"),
    [
        ("pools/default", {"health": {"interval_s": 0}}, "#/health/interval_s"),
        ("pools/default", {"breaker": {"stall": 1}}, "#/breaker"),
        ("pools/default", {"aliases": [{"name": "a"}]}, "#/aliases/0"),
        ("pools/default", {"concurrency": {}}, "#/concurrency"),
        ("pools/default", {"adapter_replicas": 0}, "#/adapter_replicas"),
        ("pools/default", {"session_keys": ["body:user", "header:X-Request-ID"]}, "#/session_keys/1"),
        ("pools/default", {"session_keys": ["header:Authorization"]}, "#/session_keys/0"),
        ("pools/default", {"session_keys": ["X-Session-ID"]}, "#/session_keys/0"),
        ("pools/default", {"paths": []}, "#/paths"),
        ("pools/default", {"allowed_origins": ["https://chat.example/"]}, "#/allowed_origins/0"),
        ("pools/default", {"allowed_origins": ["*", "https://Chat.example"]}, "#/allowed_origins/1"),
        ("pools/default", {"allowed_origins": ["null"]}, "#/allowed_origins/0"),
        ("pools/default", {"allowed_origins": [f"https://a{n}" for n in range(101)]}, "#/allowed_origins"),
        ("pools/default", {"paths": ["/v1/models"]}, "#/paths/0"),
        ("pools/default", {"models": ["m"], "aliases": [{"name": "a", "model": "x"}]}, "#/aliases/0/model"),
        ("pools/default", {"aliases": [{"name": "a", "model": "x"}] * 2}, "#/aliases/1/name"),
        ("pools/default", {"kv_cache": {}}, "#/kv_cache/bytes_per_token"),
        ("pools/default", {"kv_cache": {"bytes_per_token": 0}}, "#/kv_cache/bytes_per_token"),
        ("pools/default", {"kv_cache": {"bytes_per_token": 1, "dtype": "int3"}}, "#/kv_cache/dtype"),
        ("pools/default", {"kv_cache": {"model_config": {"num_hidden_layers": 2}}}, "#/kv_cache/model_config"),
        ("pools/default", {"kv_cache": {"model_config": []}}, "#/kv_cache/model_config"),
        ("pools/default", {"costs": {"currency": "USD"}}, "#/costs"),
        ("pools/default", {"costs": {"gpu_hour_price": 0}}, "#/costs/gpu_hour_price"),
        ("pools/default", {"costs": {"gpu_hour_price": 1, "gpus_per_replica": -1}}, "#/costs/gpus_per_replica"),
        ("replicas/r1", {"adapters": ["none"]}, "#/adapters/0"),
        ("replicas/r1", {"data_parallel_size": 0}, "#/data_parallel_size"),
        ("replicas/r1", {"labels": {"a b": "c"}}, "#/labels"),
        ("replicas/r1", {"labels": {f"k{n}": "v" for n in range(40)}}, "#/labels"),
        ("replicas/r1", {"api_key": "with a blank"}, "#/api_key"),
        ("replicas/r1", {"kv_events": {}}, "#/kv_events"),
        ("replicas/r1", {"kv_events": {"endpoint": "tcp://*:5557"}}, "#/kv_events/endpoint"),
        ("replicas/r1", {"kv_events": {"endpoint": "tcp://gpu-1:0"}}, "#/kv_events/endpoint"),
        ("replicas/r1", {"kv_events": {"endpoint": "tcp://a:1", "topic": "x" * 257}}, "#/kv_events/topic"),
        ("replicas/r1", {"kv_events": {"endpoint": "tcp://a:1", "port": 1}}, "#/kv_events"),
        (
            "replicas/r1",
            {"kv_events": {"endpoint": "tcp://a:1", "replay_endpoint": "tcp://8.8.8.8:1"}},
            "#/kv_events/replay_endpoint",
        ),
        (
            "replicas/r1",
            {"kv_events": {"endpoint": "tcp://a:65535"}, "data_parallel_size": 2},
            "#/kv_events/endpoint",
        ),
        ("task-groups/GROUP", {"match": {"tier1_hashes": ["xyz"]}}, "#/match/tier1_hashes/0"),
        ("task-groups/GROUP", {"priority": 10}, "#/priority"),
        ("task-groups/GROUP", {"tier1": {"boundary": "marker"}}, "#/tier1"),
        ("task-groups/GROUP", {"match": {"session_prefixes": ["taken-"]}}, "#/match/session_prefixes/0"),
        ("task-groups/GROUP", {"expected_tier1": "123"}, "#/expected_tier1"),
        ("task-groups/GROUP", {"hit_rate_objective": 60}, "#/hit_rate_objective"),
    ],
)
def test_invalid_settings_are_rejected_with_a_pointer(api, group, path, body, pointer):
    create_task_group(group.pool, "agents", match={"session_prefixes": ["taken-"]})
    before = newest_snapshot().number
    response = api.patch(f"/api/v1/{path.replace('GROUP', str(group.pk))}", body, format="json")
    assert (response.status_code, [fault["pointer"] for fault in response.data["errors"]]) == (422, [pointer])
    assert newest_snapshot().number == before


def test_a_wrong_endpoint_of_kv_events_says_what_was_expected(api, replica):
    for endpoint, expected in (
        ("tcp://*:5557", "expected tcp://host:port with the host that routers connect to, such as tcp://gpu-1:5557"),
        ("tcp://169.254.169.254:80", "WARMPATH_FLEET_NETWORKS lists the networks that replicas may be in"),
    ):
        response = api.patch("/api/v1/replicas/r1", {"kv_events": {"endpoint": endpoint}}, format="json")
        assert expected in response.data["errors"][0]["detail"]


def test_what_an_engine_says_of_its_kv_events_is_shown_and_is_no_change(api, replica):
    record_event_sources(replica.pk, {"kv_events": KV_EVENTS, "problem": "Something."})
    response = api.get("/api/v1/replicas/r1")
    assert response.data["reported_kv_events"] == {"kv_events": KV_EVENTS, "problem": "Something."}
    assert "reported_kv_events" not in api.get("/api/v1/config").json()["pools"][0]["replicas"][0]
    refused = api.patch("/api/v1/replicas/r1", {"reported_kv_events": None}, format="json")
    assert refused.status_code == 422


def test_names_in_use_cannot_be_removed(api, pool, replica):
    names = {"models": ["llama"], "adapters": [{"name": "law", "model": "llama"}]}
    api.patch("/api/v1/pools/default", names, format="json")
    api.patch("/api/v1/replicas/r1", {"adapters": ["law"]}, format="json")
    create_task_group(pool, "chat", match={"models": ["llama"]})
    for change, pointer, who in (
        ({"adapters": []}, "#/adapters", "replica r1"),
        ({"models": ["qwen"], "adapters": [{"name": "law", "model": "qwen"}]}, "#/models", "task group chat"),
    ):
        response = api.patch("/api/v1/pools/default", change, format="json")
        assert (response.status_code, response.data["errors"][0]["pointer"]) == (422, pointer)
        assert who in response.data["errors"][0]["detail"]


# --- labels -------------------------------------------------------------------------------------------------


def test_replicas_can_be_filtered_by_labels(api, pool):
    for name, labels in (("a", {"zone": "z1", "gpu": "h200"}), ("b", {"zone": "z2", "gpu": "h200"}), ("c", {})):
        add_replica(pool, name=name, url=f"http://{name}:8000", labels=labels)

    def found(*asked):
        return [row["name"] for row in api.get("/api/v1/replicas", {"label": asked}).data["results"]]

    assert found("gpu=h200") == found("gpu") == ["a", "b"]
    assert found("gpu=h200", "zone=z2") == ["b"]
    assert found("zone=") == found("zone=z3") == []
    assert found("a=\0", "gpu") == []
    assert api.get("/api/v1/replicas", {"label": "\0"}).status_code == 422


# --- an engine's key ----------------------------------------------------------------------------------------


def test_an_engine_api_key_reaches_the_routers_and_is_never_shown(api, replica, caplog):
    caplog.set_level(logging.DEBUG)
    headers = {"Idempotency-Key": "once"}
    response = api.patch("/api/v1/replicas/r1?dry_run=true", {"api_key": CANARY}, format="json")
    seen = [response.content.decode()]
    response = api.patch("/api/v1/replicas/r1", {"api_key": CANARY}, format="json", headers=headers)
    assert response.data["api_key_set_at"] is not None
    assert running().replicas[0].api_key == CANARY

    api.patch("/api/v1/replicas/r1", {"api_key": CANARY + " "}, format="json")  # refused, and not repeated
    paths = ("replicas/r1", "replicas", "events", "audit", "config")
    seen += [api.get(f"/api/v1/{path}").content.decode() for path in paths]
    seen += [str(row) for row in IdempotencyRecord.objects.values()]
    seen += [str(row) for row in ConfigSnapshot.objects.values("document", "reason")]
    seen += [str(row) for row in (*Event.objects.values(), *AuditEntry.objects.values(), *Replica.objects.values())]
    seen += [bytes(row).decode("latin-1") for row in Replica.objects.values_list("api_key_encrypted", flat=True)]
    assert not [text for text in (*seen, response.content.decode(), caplog.text) if CANARY in text]


def test_setting_the_same_api_key_again_changes_nothing(api, replica):
    def change(key):
        response = api.patch("/api/v1/replicas/r1", {"api_key": key}, format="json")
        return response.data["api_key_set_at"], newest_snapshot().number, Event.objects.count()

    first = change("one")
    assert change("one") == first
    second = change("two")
    assert second[0] != first[0]
    assert second[1:] == (first[1] + 1, first[2] + 1)
    assert change(None)[0] is None
    assert running().replicas[0].api_key is None


# --- what others may know -----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{"models": ["llama"]}, {"aliases": [{"name": "llama", "model": "mine"}]}])
def test_a_model_conflict_does_not_reveal_an_invisible_pool(client, django_user_model, body):
    mine, secret = create_project("mine"), create_project("secret")
    create_pool("confidential", project=secret, models=["llama"])
    pool = create_pool("open", project=mine, models=["mine"])
    user = django_user_model.objects.create_user("eve", password="a long enough password")
    set_role(user, Role.EDITOR, mine)
    client.force_login(user)

    def refusal():
        response = client.patch("/api/v1/pools/open", body, "application/json", headers={"If-Match": "*"})
        assert response.status_code == 422
        return response.content.decode()

    assert "model 'llama' cannot be used here; choose another" in refusal()
    assert not any(word in refusal() for word in ("confidential", "already", "another pool"))
    set_role(user, Role.VIEWER, secret)
    assert "already served by pool 'confidential'" in refusal()
    pool.refresh_from_db()
    assert pool.models == ["mine"]


def test_a_model_conflict_in_a_bundle_does_not_reveal_an_invisible_pool(db, django_user_model):
    mine, secret = create_project("mine"), create_project("secret")
    create_pool("confidential", project=secret, models=["llama"])
    pool = create_pool("open", project=mine, models=["mine"])
    eve = django_user_model.objects.create_user("eve", password="a long enough password")
    set_role(eve, Role.ADMIN, mine)
    with (
        pytest.raises(InvalidError, match="model 'llama' cannot be used here") as refusal,
        single_snapshot(reason="all", by=eve),
    ):
        update_pool(pool, models=["llama"], by=eve)
    assert "confidential" not in str(refusal.value)


def test_a_fully_configured_fleet_round_trips_through_a_bundle(api, group):
    for path, settings in (
        ("pools/default", POOL_SETTINGS),
        ("replicas/r1", REPLICA_SETTINGS),
        (f"task-groups/{group.pk}", GROUP_SETTINGS),
    ):
        body = {field: value for field, value, _ in settings}
        assert api.patch(f"/api/v1/{path}", body, format="json").status_code == 200
    api.patch("/api/v1/replicas/r1", {"api_key": CANARY, "labels": {"zone": "a"}}, format="json")
    before = newest_snapshot().number
    bundle = api.get("/api/v1/config").json()
    assert (bundle["pools"][0]["breaker"]["failures"], bundle["pools"][0]["groups"][0]["priority"]) == (9, 7)
    assert api.put("/api/v1/config?prune=true", bundle, format="json").data["actions"] == []
    assert newest_snapshot().number == before
    assert running().replicas[0].api_key == CANARY


# --- the document -------------------------------------------------------------------------------------------


def test_the_document_describes_settings_as_the_schema_does(api, db):
    components = api.get("/api/v1/openapi.json").json()["components"]["schemas"]
    breaker = components["BreakerConfig"]["properties"]
    assert (breaker["failures"]["minimum"], breaker["failures"]["default"]) == (1, 5)
    assert "#/components/schemas/BreakerConfig" in str(components["PatchedPoolChangeRequest"]["properties"]["breaker"])
    assert "#/components/schemas/GroupMatch" in str(components["TaskGroupInputRequest"]["properties"]["match"])
    assert "api_key" in components["PatchedReplicaChangeRequest"]["properties"]
    assert "api_key" not in components["Replica"]["properties"]


def test_the_configuration_has_the_allowed_networks(pool, replica, settings):
    """Routers and the control plane allow the same addresses."""
    settings.FLEET_NETWORKS = tuple(map(ip_network, ("10.0.0.0/8", "fc00::/7")))
    networks = build_config("ab" * 32).replica_networks
    assert networks.allowed == ("10.0.0.0/8", "fc00::/7")
    for address in ("169.254.169.254", "::ffff:169.254.169.254", "10.0.0.1", "11.0.0.1", "fd00:ec2::254"):
        refused_here = fleet_rules().denial_reason(address) is not None
        assert (schema.AddressRules(networks).rejection_reason(address) is not None) is refused_here, address
