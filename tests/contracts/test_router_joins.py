"""A real router and the real control plane, over the wire: join, push, acknowledge, refuse."""

import os
import subprocess
import sys

import pytest
from rest_framework.test import APIClient

from controlplane.models import ConfigSnapshot, Router
from controlplane.services.policies import publish_revision, save_draft
from controlplane.services.pools import create_pool
from controlplane.services.replicas import add_replica
from controlplane.services.tokens import create_token
from controlplane.tasks import reconcile_routers
from tests.conftest import wait_until

ROUTER = [sys.executable, "-m", "routing", "serve", "--name", "router-1", "--port", "0", "--admin-port", "0"]


@pytest.fixture
def router(live_server, tmp_path, settings):
    """A router process that announces itself to the live server."""
    environment = {**os.environ, "WARMPATH_ROUTER_ADMIN_TOKEN": settings.ROUTER_ADMIN_TOKEN}
    command = [*ROUTER, "--control-plane", live_server.url, "--state-dir", str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    yield process
    process.terminate()
    process.wait(timeout=20)


@pytest.mark.django_db(transaction=True)
def test_a_router_joins_and_runs_what_is_published(router):
    policy = create_pool("default").policies.get()
    wait_until(Router.objects.exists, 15, "the router to announce itself", alive=router)

    reconcile_routers()
    known = Router.objects.get()
    assert (known.running_number, known.last_nack, known.last_error) == (
        ConfigSnapshot.objects.first().number,
        None,
        "",
    )

    rollout = publish_revision(save_draft(policy, {"strategy": "prefix_hash"}).pk)
    reconcile_routers()
    rollout.refresh_from_db()
    known.refresh_from_db()
    assert (rollout.state, known.running_sha256) == ("complete", rollout.snapshot.sha256)


@pytest.mark.django_db(transaction=True)
def test_a_router_says_where_it_would_place_a_request_and_the_prompt_is_kept_nowhere(router, admin_user, caplog):
    pool = create_pool("default", strategy="prefix_hash")
    add_replica(pool, name="r1", url="http://127.0.0.1:9")
    wait_until(Router.objects.exists, 15, "the router to announce itself", alive=router)
    reconcile_routers()
    _, text = create_token(admin_user, name="test", scopes=["write"])
    api = APIClient()
    api.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    body = {"messages": [{"role": "user", "content": "a canary that nobody repeats"}]}

    said = api.post("/api/v1/routers/router-1/explain", {"path": "/v1/chat/completions", "body": body}, format="json")

    assert (said.status_code, said.data["pool"], said.data["policy"]) == (200, "default", "default"), said.data
    assert [one["replica"] for one in said.data["candidates"]] == ["r1"]
    assert "canary" not in str(said.data) + caplog.text

    wrong = api.post("/api/v1/routers/router-1/explain", {"path": "/metrics", "body": body}, format="json")
    assert (wrong.status_code, wrong.data["errors"][0]["pointer"]) == (422, "#/body")
    router.kill()
    router.wait(timeout=20)
    gone = api.post("/api/v1/routers/router-1/explain", {"path": "/v1/chat/completions", "body": body}, format="json")
    assert (gone.status_code, "canary" in str(gone.data) + caplog.text) == (502, False)
