from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.encryption import encrypt
from controlplane.models import ConfigSnapshot, Event, Router
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.routers import announce, mark_lost_routers

pytestmark = pytest.mark.django_db
ROOT = "/api/v1/configurations"


@pytest.fixture
def history(pool):
    """Two configurations: without and with a replica."""
    first = ConfigSnapshot.objects.get()
    add_replica(pool, name="r1", url="http://10.0.0.1:8000")
    return first, ConfigSnapshot.objects.first()


def test_configurations_are_listed_newest_first_and_shown_whole_without_secrets(api, history):
    first, second = history

    rows = api.get(ROOT).data["results"]
    whole = api.get(f"{ROOT}/{second.number}")

    assert [row["number"] for row in rows] == [second.number, first.number]
    assert "document" not in rows[0]
    assert whole.data["document"]["pools"][0]["replicas"][0]["name"] == "r1"
    assert whole.data["document"]["hash_secret"] == "***"


def test_two_configurations_are_compared_by_their_effects(api, history):
    first, second = (row.number for row in history)

    response = api.get(f"{ROOT}/compare?from={first}&to={second}").data

    assert [effect["kind"] for effect in response["effects"]] == ["replica_joined"]
    assert api.get(f"{ROOT}/compare?from={second}&to={second}").data["effects"] == []
    assert api.get(f"{ROOT}/compare?from={first}&to=99").status_code == 422


def test_an_undecryptable_configuration_is_compared_without_secrets(api, history):
    first, second = history
    copy = ConfigSnapshot.objects.get(pk=second.pk)
    copy.document["pools"][0]["policy"]["settings"]["min_bound"] = 4  # by an earlier release
    torn = ConfigSnapshot.objects.create(
        number=50, sha256="0" * 64, document=copy.document, encrypted=b"torn", reason="a torn one"
    )
    odd = ConfigSnapshot.objects.create(
        number=51, sha256="0" * 64, document={"pools": 7}, encrypted=encrypt(b"{}"), reason="an odd one"
    )

    response = api.get(f"{ROOT}/compare?from={first.number}&to={torn.number}")

    assert [effect["kind"] for effect in response.data["effects"] if effect["kind"] != "hash_secret"] == [
        "replica_joined"
    ]
    rejected = api.get(f"{ROOT}/compare?from={first.number}&to={odd.number}")
    assert rejected.status_code == 409
    assert "Configuration 51 was written by a release whose format this release cannot read" in rejected.data["detail"]


def test_a_lost_router_can_be_removed(api, pool):
    router = announce(name="router-1", boot="b", admin_url="http://10.0.1.1:8081")
    assert api.delete("/api/v1/routers/router-1").status_code == 409
    Router.objects.filter(pk=router.pk).update(last_seen_at=timezone.now() - timedelta(minutes=5))
    mark_lost_routers()

    assert api.delete("/api/v1/routers/router-1").status_code == 204

    assert Event.objects.filter(kind="router_removed", actor__username="olga").exists()
    assert api.get("/api/v1/routers/router-1").status_code == 404
