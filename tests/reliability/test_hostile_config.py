"""After any push, valid or not, a router runs the old or the new configuration completely, and its disk
agrees.
"""

import json
import random
import time

import httpx
import pytest

from controlplane.models import Event, Router
from controlplane.services.fleet.replicas import add_replica
from controlplane.tasks import reconcile_routers
from routing.proxy.config_store import LastKnownGood
from routing.schema import load_snapshot
from tests.pace import is_within
from tests.reliability.fleet import fleet
from tests.reliability.stand import soon
from tests.routing.schema.damage import CONFIG, damage, encrypted

ROUNDS = 60
NACK_S = 5.0
MIB = 1 << 20


@pytest.fixture
def router(tmp_path, settings, transactional_db):
    with fleet(tmp_path, 1, settings.ROUTER_ADMIN_TOKEN) as (router,):
        yield router


@pytest.fixture
def admin(router, settings):
    headers = {"Authorization": f"Bearer {settings.ROUTER_ADMIN_TOKEN}"}
    url = f"http://127.0.0.1:{router.proxy._replica.port}/admin"
    with httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False) as client:
        yield client


def running(admin):
    config = admin.get("/config").json()
    return config["revision"], config["sha256"]


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_document_is_applied_completely_or_rejected(router, admin, tmp_path, seed):
    chance = random.Random(seed)
    assert admin.put("/config", content=encrypted(CONFIG)).status_code == 200
    applied = rejected = 0
    for revision in range(2, ROUNDS):
        before = running(admin)
        tree = json.loads(json.dumps(CONFIG))
        for _ in range(chance.randrange(1, 3)):
            damage(tree, chance)
        document = encrypted(tree, revision=revision)
        if chance.random() < 0.2:
            document = document[: chance.randrange(len(document))]
        response = admin.put("/config", content=document)
        if response.status_code == 200:
            applied += 1
            assert running(admin) == (revision, load_snapshot(document).sha256)
        else:
            rejected += 1
            assert (response.status_code, bool(response.json()["reason"])) == (422, True)
            assert running(admin) == before
        stored = load_snapshot(LastKnownGood(tmp_path / "router-00").load()[0])
        assert (stored.revision, stored.sha256) == running(admin)
    assert applied > 0
    assert rejected > 10


def test_an_oversized_document_changes_nothing(router, admin):
    assert admin.put("/config", content=encrypted(CONFIG)).status_code == 200
    before = running(admin)
    assert admin.put("/config", content=b" " * (65 * MIB)).status_code == 413
    assert running(admin) == before


def test_a_rejection_is_shown_within_five_seconds(router, pool, tmp_path, client, admin_user):
    router.announce()
    reconcile_routers()
    before = router.revision
    folder = tmp_path / "router-00"
    folder.rename(tmp_path / "moved")
    folder.touch()  # writing fails
    started = time.monotonic()
    add_replica(pool, name="r1", url="http://127.0.0.1:9")
    reconcile_routers()
    soon(lambda: Router.objects.get().last_nack, NACK_S, "the rejection to be stored")
    client.force_login(admin_user)
    assert "cannot be written" in client.get("/routers/").content.decode()
    assert is_within(time.monotonic() - started, NACK_S)
    assert router.revision == before
    assert Event.objects.filter(kind="config_rejected").count() == 1
