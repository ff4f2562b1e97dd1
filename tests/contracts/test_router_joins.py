"""A real router and the real control plane, over the wire: join, push, acknowledge, refuse."""

import os
import subprocess
import sys

import pytest

from controlplane.models import ConfigSnapshot, Router
from controlplane.services.policies import publish_revision, save_draft
from controlplane.services.pools import create_pool
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
