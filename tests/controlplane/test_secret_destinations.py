"""A stored secret is sent only to the address it was entered for; every encrypted field has that rule."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from rest_framework.test import APIClient

from controlplane.encryption import decrypt
from controlplane.models import Replica, ReplicaSource
from controlplane.services.checks import address_of, origin_of
from controlplane.services.discovery.reconcile import reconcile_source
from controlplane.services.discovery.sources import create_source, update_source
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.secret_rotation import encrypted_fields
from telemetry.channels import KINDS
from telemetry.models import Channel
from telemetry.services.metrics_servers import create_server
from telemetry.services.notifications.channels import create_channel, open_config
from tests.fakes.fake_kubernetes import TOKEN
from tests.telemetry.channels.messages import ROUTING_KEY, config

pytestmark = pytest.mark.django_db
CANARY, FRESH = "canary-3f9a51c07e", "fresh-77d0b2e4"
FRESH_KEY = "fedcba9876543210" * 2
SIGNING, FRESH_SIGNING = "whsec_" + "QUJD" * 12, "whsec_" + "WFla" * 12


@dataclass(frozen=True)
class Case:
    """A row with a secret, and REST changes of it."""

    row: Any
    path: str
    pointer: str  # of the secret
    move: dict[str, Any]  # to another address
    respelled: dict[str, Any]  # to the same address, written differently
    new_secret: dict[str, Any]
    no_secret: dict[str, Any]

    def encrypted(self) -> str:
        row = type(self.row).objects.get(pk=self.row.pk)
        stored = getattr(row, "api_key_encrypted", None) if isinstance(row, Replica) else row.encrypted
        return "" if stored is None else decrypt(bytes(stored)).decode()


def replica_case(pool):
    row = add_replica(pool, name="keyed", url="http://engine.example:80", api_key=CANARY)
    return Case(
        row,
        "/api/v1/replicas/keyed",
        "#/api_key",
        {"url": "http://evil.example"},
        {"url": "http://ENGINE.example/"},
        {"api_key": FRESH},
        {"api_key": None},
    )


def source_case(pool):
    settings = {"service": "vllm", "api_url": "https://api.example:6443", "scheme": "http"}
    row = create_source(pool, name="cluster", kind="kubernetes", settings=settings, secret=CANARY)
    return Case(
        row,
        "/api/v1/replica-sources/cluster",
        "#/secret",
        {"settings": settings | {"api_url": "https://evil.example:6443"}},
        {"settings": settings | {"api_url": "https://API.example:6443/"}},
        {"secret": FRESH},
        {"secret": ""},
    )


def server_case(pool):
    row = create_server(name="prom", url="https://prom.example", credentials={"token": CANARY})
    return Case(
        row,
        f"/api/v1/metrics-servers/{row.pk}",
        "#/credentials",
        {"url": "https://evil.example"},
        {"url": "https://prom.example:443/"},
        {"credentials": {"token": FRESH}},
        {"credentials": {}},
    )


CASES = {
    "controlplane.Replica.api_key_encrypted": replica_case,
    "controlplane.ReplicaSource.encrypted": source_case,
    "telemetry.MetricsServer.encrypted": server_case,
}
EXEMPT = {
    "telemetry.Channel.encrypted": "each secret of each kind has its own case, below",
    "telemetry.Heartbeat.encrypted": "the secret is the address as a whole: another address is another secret",
    "controlplane.FleetSecret.encrypted": "part of the configuration, which goes to routers that hold the admin token",
    "controlplane.ConfigSnapshot.encrypted": "the configuration itself, as above",
    "controlplane.IdempotencyRecord.encrypted": "returned only to the same request with the same token",
}


def test_every_encrypted_field_has_a_case_or_a_reason():
    fields = {f"{model._meta.label}.{field}" for model, field in encrypted_fields()}
    assert fields == set(CASES) | set(EXEMPT)


@pytest.fixture
def api(operator):
    client = APIClient()
    client.force_login(operator)
    return client


@pytest.fixture(params=sorted(CASES))
def case(request, pool):
    return CASES[request.param](pool)


def patch(api, case, change, **query):
    headers = {"If-Match": "*"}
    return api.patch(case.path, change, format="json", headers=headers, query_params=query)


def test_a_new_address_without_the_secret_is_rejected(api, case):
    before = case.encrypted()
    assert CANARY in before
    for query in ({}, {"dry_run": "true"}):
        response = patch(api, case, case.move, **query)
        assert response.status_code == 422, response.content
        assert [fault["pointer"] for fault in response.data["errors"]] == [case.pointer]
        assert CANARY not in response.content.decode()
    assert case.encrypted() == before
    representation = json.dumps(api.get(case.path).json())
    assert "evil" not in representation


def test_a_respelled_address_keeps_the_secret(api, case):
    before = case.encrypted()
    assert patch(api, case, case.respelled).status_code == 200
    assert case.encrypted() == before


def test_a_new_address_with_a_new_secret_is_accepted(api, case):
    assert patch(api, case, case.move | case.new_secret).status_code == 200
    assert FRESH in case.encrypted()
    assert "evil" in json.dumps(api.get(case.path).json())


def test_a_new_address_without_any_secret_is_accepted(api, case):
    assert patch(api, case, case.move | case.no_secret).status_code == 200
    assert CANARY not in case.encrypted()


def test_a_bundle_cannot_move_a_secret(api, pool):
    replica_case(pool)
    source_case(pool)
    bundle = json.loads(api.get("/api/v1/config").content)
    for key, pointer, change in (
        ("replicas", "#/pools/0/replicas/0/api_key", {"url": "http://evil.example"}),
        ("sources", "#/pools/0/sources/0/secret", {"settings": {"service": "vllm", "api_url": "https://evil.example"}}),
    ):
        moved = json.loads(json.dumps(bundle))
        moved["pools"][0][key][0].update(change)
        for query in ({}, {"dry_run": "true"}):
            response = api.put("/api/v1/config", moved, format="json", headers={"If-Match": "*"}, query_params=query)
            assert response.status_code == 422, response.content
            assert [fault["pointer"] for fault in response.data["errors"]] == [pointer]
    assert not Replica.objects.filter(url__contains="evil").exists()


# --- channels: each secret of each kind -------------------------------------------------------------------

SECRETS = {  # kind.field: a value, and a new one; None where the secret is the address itself
    "alertmanager.password": (CANARY, FRESH),
    "alertmanager.bearer_token": (CANARY, FRESH),
    "email.password": (CANARY, FRESH),
    "discord.url": None,
    "google_chat.url": None,
    "jsm.api_key": (CANARY, FRESH),
    "ntfy.topic": (CANARY, FRESH),
    "ntfy.token": (CANARY, FRESH),
    "pagerduty.routing_key": (ROUTING_KEY, FRESH_KEY),
    "slack.url": None,
    "teams.url": None,
    "template.url": None,
    "template.headers": (f"X-Key: {CANARY}", f"X-Key: {FRESH}"),
    "webhook.url": None,
    "webhook.secret": (SIGNING, FRESH_SIGNING),
    "webhook.previous_secret": (SIGNING, FRESH_SIGNING),
}


OTHER_SECRETS = {"webhook.previous_secret": {"secret": FRESH_SIGNING}, "ntfy.token": {"topic": FRESH}}  # also moved


def test_every_secret_of_every_kind_of_channel_has_a_case():
    assert {f"{kind.name}.{field.name}" for kind in KINDS.values() for field in kind.fields if field.secret} == set(
        SECRETS
    )


@pytest.fixture(params=sorted(name for name, values in SECRETS.items() if values))
def channel_case(request, db):
    """The channel, the secret's name, its values, and the change of address, which keeps no other secret."""
    kind, field = request.param.split(".")
    value, fresh = SECRETS[request.param]
    settings, moved = config(kind, "here.example", 443), config(kind, "evil.example", 443)
    move = {name: moved[name] for name in moved if moved[name] != settings[name]}
    if field == "password":
        settings |= {"username": "u"} | ({"security": "tls"} if kind == "email" else {})
    channel = create_channel("on-call", kind=kind, config=settings | {field: value})
    others = OTHER_SECRETS.get(request.param, {})
    return channel, field, value, fresh, move | others


def test_a_channel_with_a_new_address_needs_its_secret_again(api, channel_case):
    channel, field, value, fresh, move = channel_case
    path = f"/api/v1/channels/{channel.pk}"
    before = open_config(channel)
    for query in ({}, {"dry_run": "true"}):
        response = api.patch(path, {"config": move}, format="json", headers={"If-Match": "*"}, query_params=query)
        assert response.status_code == 422, response.content
        assert [fault["pointer"] for fault in response.data["errors"]] == [f"#/config/{field}"]
    assert open_config(Channel.objects.get()) == before
    response = api.patch(path, {"config": move | {field: fresh}}, format="json", headers={"If-Match": "*"})
    assert response.status_code == 200, response.content
    stored = open_config(Channel.objects.get())
    assert stored[field] == fresh
    assert value not in stored.values()


def test_the_channel_form_names_the_missing_secret(client, operator, db):
    channel = create_channel("am", kind="alertmanager", config={"url": "https://am.example", "bearer_token": CANARY})
    client.force_login(operator)
    page = client.post(f"/channels/{channel.pk}/", {"name": "am", "url": "https://evil.example"})
    assert page.status_code == 422
    assert "address changed" in page.context["form"].errors["bearer_token"][0]
    assert open_config(Channel.objects.get())["url"] == "https://am.example"
    client.post(f"/channels/{channel.pk}/", {"name": "am", "url": "https://evil.example", "remove": "bearer_token"})
    assert open_config(Channel.objects.get()) == {"url": "https://evil.example"}


def test_the_webhook_form_generates_a_new_signing_secret(client, operator, db):
    channel = create_channel("hook", config={"url": "https://hooks.example/x", "secret": SIGNING})
    client.force_login(operator)
    moved = {"name": "hook", "url": "https://other.example/x"}
    assert client.post(f"/channels/{channel.pk}/", moved).status_code == 422
    page = client.post(f"/channels/{channel.pk}/", moved | {"remove": "secret"})
    stored = open_config(Channel.objects.get())
    assert stored["url"] == "https://other.example/x"
    assert stored["secret"] != SIGNING
    assert stored["secret"] in page.content.decode()


def test_a_new_path_keeps_the_signing_secret(api, db):
    channel = create_channel("hook", config={"url": "https://hooks.example/x", "secret": SIGNING})
    change = {"config": {"url": "https://hooks.example/y"}}
    assert api.patch(f"/api/v1/channels/{channel.pk}", change, format="json", headers={"If-Match": "*"}).data
    assert open_config(Channel.objects.get()) == {"url": "https://hooks.example/y", "secret": SIGNING}


# --- discovered replicas ---------------------------------------------------------------------------


@pytest.fixture
def followed_source(pool):
    """A replica with an API key that follows a source, and the source's discovered row."""
    settings = {"service": "vllm", "api_url": "https://api.example:6443"}
    source = create_source(pool, name="cluster", kind="kubernetes", settings=settings, secret=TOKEN)
    replica = add_replica(pool, name="vllm-1", url="http://10.0.0.1:8000", api_key=CANARY)
    row = source.discovered.create(
        key="vllm-1", name="vllm-1", url="http://10.0.0.9:8000", state="adopted", replica=replica, condition="ready"
    )
    return source, replica, row


def test_an_api_key_follows_its_engine_while_the_source_is_unchanged(followed_source):
    source, replica, _ = followed_source
    reconcile_source(source.pk)
    replica.refresh_from_db()
    assert replica.url == "http://10.0.0.9:8000"
    assert decrypt(replica.api_key_encrypted).decode() == CANARY


def test_an_api_key_does_not_follow_a_changed_source(api, followed_source):
    source, replica, row = followed_source
    update_source(ReplicaSource.objects.get(), settings=source.settings | {"port": "9999"})
    reconcile_source(source.pk)
    replica.refresh_from_db()
    row.refresh_from_db()
    assert replica.url == "http://10.0.0.1:8000"
    assert "$.api_key" in row.problem
    # The same key, entered again, is sent to the engine again.
    change = {"api_key": CANARY}
    api.patch("/api/v1/replicas/vllm-1", change, format="json", headers={"If-Match": "*"})
    reconcile_source(source.pk)
    replica.refresh_from_db()
    row.refresh_from_db()
    assert (replica.url, row.problem) == ("http://10.0.0.9:8000", "")


def test_a_swap_is_rejected_where_one_key_may_not_move(pool, followed_source):
    source, _, row = followed_source
    other = add_replica(pool, name="vllm-2", url="http://10.0.0.9:8000")
    source.discovered.create(
        key="vllm-2", name="vllm-2", url="http://10.0.0.1:8000", state="adopted", replica=other, condition="ready"
    )
    update_source(ReplicaSource.objects.get(), settings=source.settings | {"port": "9999"})
    reconcile_source(source.pk)
    row.refresh_from_db()
    assert "$.api_key" in row.problem
    assert {replica.name: replica.url for replica in Replica.objects.all()} == {
        "vllm-1": "http://10.0.0.1:8000",
        "vllm-2": "http://10.0.0.9:8000",
    }


def test_another_ca_is_another_server(api, pool):
    case = source_case(pool)
    settings = ReplicaSource.objects.get().settings | {"ca": "-----BEGIN CERTIFICATE-----"}
    response = patch(api, case, {"settings": settings})
    assert [fault["pointer"] for fault in response.data["errors"]] == ["#/secret"]


# --- addresses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("http://a", "http://A:80/", True),
        ("https://a", "https://a:443", True),
        ("http://a", "https://a", False),
        ("http://a:8000", "http://a:8001", False),
        ("http://a", "http://u@a", False),
        ("http://a", "http://a.", True),
        ("http://a", "http://b", False),
        ("http://[::1]:1", "http://[::1]:1", True),
    ],
)
def test_an_origin_is_scheme_user_host_and_port(first, second, same):
    assert (origin_of(first) == origin_of(second)) is same
    assert (address_of(first) == address_of(second)) is same


def test_an_address_is_an_origin_and_a_path():
    assert origin_of("http://a/x") == origin_of("http://a/y")
    assert address_of("http://a/x") != address_of("http://a/y")
    assert address_of("http://a/x/") == address_of("http://a/x")
