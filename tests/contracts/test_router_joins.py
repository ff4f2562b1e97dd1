"""A real router process and the control plane over HTTP: announce, push, acknowledge, reject."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar
from urllib.parse import urlsplit

import httpx
import pytest
from django.test import Client
from django.utils import timezone
from redis import Redis
from rest_framework.test import APIClient

from controlplane.models import AuditEntry, ConfigSnapshot, Replica, Router
from controlplane.services.access.tokens import create_token
from controlplane.services.fleet.client_keys import create_client_key, revoke_client_key, update_client_key
from controlplane.services.fleet.pools import create_pool, update_fleet_settings
from controlplane.services.fleet.replicas import add_replica, update_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.tasks import reconcile_routers
from telemetry.scraping.cycle import Shard, scrape_shard
from telemetry.scraping.fetch import check_versions
from tests.conftest import wait_until
from tests.fakes.certificates import Authority
from tests.routing.standin.replica_process import replica_process

ROUTER = [sys.executable, "-m", "routing", "serve", "--name", "router-1", "--port", "0", "--admin-port", "0"]


class Engine(BaseHTTPRequestHandler):
    """A fake engine that records ``Authorization`` headers."""

    authorizations: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self._respond({"data": [{"id": "llama"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.authorizations.append(self.headers["Authorization"])
        self._respond({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})

    def log_message(self, *_) -> None: ...

    def _respond(self, document) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def engine():
    """The URL of a fake engine; ``Engine.authorizations`` has its recorded headers."""
    Engine.authorizations.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextmanager
def serving(url, token, folder, *options):
    """A router process that announces itself."""
    environment = {**os.environ, "WARMPATH_ROUTER_ADMIN_TOKEN": token}
    command = [*ROUTER, "--control-plane", url, "--state-dir", str(folder), *options]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:  # otherwise it would announce itself to the next test
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture
def router(live_server, tmp_path, settings):
    """A router process that announces itself to the live server."""
    with serving(live_server.url, settings.ROUTER_ADMIN_TOKEN, tmp_path) as process:
        yield process


def router_after_push():
    """Push now, even if the router has just announced itself; the router's row."""
    Router.objects.update(push_after=None)
    reconcile_routers()
    return Router.objects.first()


def wait_joined(process):
    """Wait until a router has announced itself and runs the newest configuration; its row."""
    wait_until(Router.objects.exists, 40, "the router to announce itself", alive=process)
    newest = ConfigSnapshot.objects.first().number
    wait_until(
        lambda: router_after_push().running_number == newest, 30, "it to run the newest configuration", alive=process
    )
    return Router.objects.get()


@pytest.mark.django_db(transaction=True)
def test_a_router_joins_and_runs_a_published_configuration(router):
    policy = create_pool("default").policies.get()
    row = wait_joined(router)
    assert (row.last_nack, row.last_error) == (None, "")

    rollout = publish_revision(save_draft(policy, {"strategy": "prefix_hash"}).pk)
    wait_until(
        lambda: router_after_push().running_sha256 == rollout.snapshot.sha256,
        30,
        "it to run the new configuration",
        alive=router,
    )
    rollout.refresh_from_db()
    assert rollout.state == "complete"


@pytest.mark.django_db(transaction=True)
def test_over_tls_a_router_gets_its_configuration_only_if_its_certificate_is_trusted(live_server, tmp_path, settings):
    authority = Authority(tmp_path)
    certificate = authority.issue("router")
    tls = ["--admin-tls-cert", str(certificate.path), "--admin-tls-key", str(certificate.key)]
    create_pool("default")
    with serving(live_server.url, settings.ROUTER_ADMIN_TOKEN, tmp_path / "state", *tls) as process:
        wait_until(Router.objects.exists, 40, "the router to announce itself", alive=process)
        assert Router.objects.get().admin_url.startswith("https://127.0.0.1:")

        wait_until(
            lambda: "certificate verify failed" in router_after_push().last_error,
            30,
            "its certificate to be rejected",
            alive=process,
        )
        assert Router.objects.get().running_number is None
        settings.FLEET_CA_FILE = str(authority.path)
        newest = ConfigSnapshot.objects.first().number
        wait_until(
            lambda: router_after_push().running_number == newest, 30, "its certificate to be trusted", alive=process
        )


@pytest.mark.django_db(transaction=True)
def test_explain_returns_a_placement_and_the_prompt_is_neither_stored_nor_logged(router, admin_user, caplog):
    pool = create_pool("default", strategy="prefix_hash")
    add_replica(pool, name="r1", url="http://127.0.0.1:9")
    wait_joined(router)
    _, text = create_token(admin_user, name="test", scopes=["write"])
    api = APIClient()
    api.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    body = {"messages": [{"role": "user", "content": "a tripwire that must not be stored"}]}

    explained = api.post(
        "/api/v1/routers/router-1/explain", {"path": "/v1/chat/completions", "body": body}, format="json"
    )

    assert (explained.status_code, explained.data["pool"], explained.data["policy"]) == (200, "default", "default"), (
        explained.data
    )
    assert [candidate["replica"] for candidate in explained.data["candidates"]] == ["r1"]
    assert "tripwire" not in str(explained.data) + caplog.text

    rejected = api.post("/api/v1/routers/router-1/explain", {"path": "/metrics", "body": body}, format="json")
    assert (rejected.status_code, rejected.data["errors"][0]["pointer"]) == (422, "#/body")
    router.kill()
    router.wait(timeout=20)
    unreachable = api.post(
        "/api/v1/routers/router-1/explain", {"path": "/v1/chat/completions", "body": body}, format="json"
    )
    assert (unreachable.status_code, "tripwire" in str(unreachable.data) + caplog.text) == (502, False)


@pytest.mark.django_db(transaction=True)
def test_clients_need_a_key_within_its_limits_and_the_engine_gets_its_own_key(router, engine):
    pool = create_pool("default", models=["llama"])
    add_replica(pool, name="r1", url=engine, api_key="sk-engine")
    key, text = create_client_key(pool.project, "agents")
    wait_joined(router)

    def status_with(secret=None):
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        body = {"model": "llama", "messages": [{"role": "user", "content": "hello"}]}
        url = f"{Router.objects.get().data_url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=10, trust_env=False).status_code

    wait_until(lambda: status_with() == 200, 15, "the replica to be up", alive=router)  # no key is required yet
    update_fleet_settings(needs_key=True)
    wait_joined(router)
    assert (status_with(), status_with("wpk_" + "x" * 43), status_with(text)) == (401, 401, 200)
    update_client_key(key, requests_per_s=0.001, burst=1)
    wait_joined(router)
    assert (status_with(text), status_with(text)) == (200, 429)
    revoke_client_key(key)
    wait_joined(router)
    assert status_with(text) == 401
    assert set(Engine.authorizations) == {"Bearer sk-engine"}


@pytest.mark.django_db(transaction=True)
def test_the_kv_events_of_an_engine_are_found_followed_and_shown_until_it_ends(router, client, django_user_model):
    client.force_login(django_user_model.objects.create_user("olga", is_superuser=True))
    pool, cycles = create_pool("default"), iter(range(10_000))

    def page() -> str:
        """The replica's page after another scrape of everything."""
        scrape_shard(Shard(0, 1), timezone.now().timestamp() + 60 * next(cycles))
        return client.get("/replicas/gpu-1/").text

    events = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    with replica_process("--kv-events-config", json.dumps(events)) as engine:
        replica = add_replica(pool, name="gpu-1", url=f"http://127.0.0.1:{engine.port}")
        assert "Off: routers estimate" in page()
        check_versions(timezone.now())
        assert "Its engine publishes KV events at <code>tcp://127.0.0.1:" in page()
        reported = Replica.objects.get().reported_kv_events
        assert reported["problem"] == ""
        update_replica(replica, kv_events=reported["kv_events"])
        wait_joined(router)
        wait_until(lambda: "knows every block" in page(), 30, "the router to follow the events", alive=router)
    wait_until(lambda: "There is no connection" in page(), 30, "the loss of the connection to be shown", alive=router)


def purged_by(response):
    return {row["router"]: row["problem"] for row in response.json()["routers"]}


class CacheUser:
    """Requests of three scopes of response caches at a router, and the store of their entries."""

    ASKED: ClassVar = [("faq", ""), ("faq", "docs"), ("other", "")]
    BODY: ClassVar = {
        "model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "temperature": 0, "max_tokens": 2
    }  # fmt: skip

    def __init__(self, store, process):
        self.store, self.process = store, process
        self.chat = f"{wait_joined(process).data_url}/v1/chat/completions"
        self.keys: dict[tuple[str, str], str] = {}

    def ask(self, group, namespace):
        sent = {**self.BODY, "cache": {"namespace": namespace}}
        response = httpx.post(self.chat, json=sent, headers={"X-Task-Group": group}, timeout=30)
        assert response.status_code == 200, response.text
        self.keys[group, namespace] = response.headers["X-Warmpath-Cache-Key"]
        return response.headers["X-Warmpath-Cache"]

    def fill(self):
        """Store an entry of each scope."""
        wait_until(lambda: {self.ask(*names) for names in self.ASKED} == {"hit"}, 30, "hits", alive=self.process)
        wait_until(lambda: self.store.dbsize() == 3, 30, "the entries to be written", alive=self.process)

    def assert_purged(self, *purged):
        """Only these entries are purged. (A lookup in the store may take too long, which is a miss as well.)"""
        assert self.store.dbsize() == 3 - len(purged)
        assert [self.ask(*names) for names in purged] == ["miss"] * len(purged)
        self.fill()


@pytest.mark.django_db(transaction=True)
def test_a_purge_reaches_routers_and_their_store_and_reports_who_did_not_confirm(
    live_server, tmp_path, settings, admin_user, valkey, monkeypatch
):
    url = f"unix://{urlsplit(valkey).path}?db=8"
    store = Redis.from_url(url)
    store.flushdb()
    monkeypatch.setenv("WARMPATH_ROUTER_CACHE_URL", url)
    pool = create_pool("default")
    groups = {name: create_task_group(pool, name, response_cache={"ttl_s": 600}) for name in ("faq", "other")}
    _, text = create_token(admin_user, name="test", scopes=["write"])
    api = APIClient()
    api.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    path = f"/api/v1/task-groups/{groups['faq'].pk}/purge-response-cache"

    with replica_process() as replica, serving(live_server.url, settings.ROUTER_ADMIN_TOKEN, tmp_path) as process:
        add_replica(pool, name="r1", url=f"http://127.0.0.1:{replica.port}")
        user = CacheUser(store, process)
        user.fill()

        plan = api.post(f"{path}?dry_run=true", {}, format="json")
        assert plan.json()["result"]["routers"][0]["store_entries"] == 2
        assert not AuditEntry.objects.filter(kind="response_cache_purged").exists()
        only_docs = api.post(path, {"namespace": "docs"}, format="json", headers={"Idempotency-Key": "once"})
        assert (only_docs.status_code, purged_by(only_docs)) == (200, {"router-1": None})
        user.assert_purged(("faq", "docs"))

        everything = api.post(path, {}, format="json")
        assert everything.json()["routers"][0].items() >= {"store_entries": 2, "remaining_entries": 0}.items()
        user.assert_purged(("faq", ""), ("faq", "docs"))
        assert api.post(path, {"key": user.keys["faq", ""]}, format="json").status_code == 200
        user.assert_purged(("faq", ""))
        replayed = api.post(path, {"namespace": "docs"}, format="json", headers={"Idempotency-Key": "once"})
        assert replayed.headers["Idempotency-Replayed"] == "true"
        assert store.dbsize() == 3
        assert api.post(path, {"model": "gpt"}, format="json").status_code == 200  # the pool accepts any model

        Router.objects.create(name="router-2", boot="b", admin_url="http://127.0.0.1:9", last_seen_at=timezone.now())
        partly = api.post(path, {}, format="json", headers={"Idempotency-Key": "twice"})
        assert (partly.status_code, partly.json()["type"]) == (502, "urn:warmpath:problem:purge-incomplete")
        assert purged_by(partly) == {"router-1": None, "router-2": "no response (ConnectError)"}
        Router.objects.filter(name="router-2").delete()
        again = api.post(path, {}, format="json", headers={"Idempotency-Key": "twice"})
        assert again.status_code == 200  # the failure is not replayed

    entries = AuditEntry.objects.filter(kind="response_cache_purged").order_by("number")
    assert [(entry.actor, entry.summary.partition(" was purged")[2]) for entry in entries] == [
        ("admin", ": namespace 'docs'."),
        ("admin", "."),
        ("admin", f": key '{user.keys['faq', '']}'."),
        ("admin", ": model 'gpt'."),
        ("admin", " at 1 of 2 routers only."),
        ("admin", "."),
    ]


@pytest.mark.django_db(transaction=True)
def test_a_purge_while_the_store_is_down_does_not_claim_success(
    live_server, tmp_path, settings, admin_user, monkeypatch
):
    monkeypatch.setenv("WARMPATH_ROUTER_CACHE_URL", "redis://:tripwire@127.0.0.1:9/0")
    group = create_task_group(create_pool("default"), "faq", response_cache={})
    client = Client()
    client.force_login(admin_user)
    page = f"/task-groups/{group.pk}/purge/"
    wrong = client.post(page, {"model": "", "namespace": "", "key": "x"})
    assert wrong.status_code == 422
    assert "expected 16 to 64 of the characters 0-9 and a-f" in wrong.content.decode()
    without_routers = client.post(page, {"model": "", "namespace": ""})
    assert "No router has announced itself" in without_routers.content.decode()
    with serving(live_server.url, settings.ROUTER_ADMIN_TOKEN, tmp_path) as process:
        wait_joined(process)
        answer = client.post(page, {"model": "", "namespace": ""}, follow=True).content.decode()

    assert "may be left at 1 of 1 routers" in answer
    assert "the store of response caches failed (ConnectionError)" in answer
    assert "tripwire" not in answer
    assert AuditEntry.objects.get(kind="response_cache_purged").summary.endswith("at 0 of 1 routers only.")
