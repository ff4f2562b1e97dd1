"""Entity tags and ``If-Match`` prevent lost updates."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
from django.db import connection
from rest_framework.test import APIClient

from controlplane.api.bundle import _Application
from controlplane.models import Event, Pool, Replica
from controlplane.services.access.tokens import create_token
from controlplane.services.fleet.replicas import add_replica, update_replica

ROOT = "/api/v1/"
DRAFT = {"settings": {"strategy": "prefix_hash"}}


def tag(client, path):
    return client.get(f"{ROOT}{path}")["ETag"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("patch", "pools/default", {"description": "x"}),
        ("delete", "pools/default", None),
        ("patch", "replicas/r1", {"weight": 2}),
        ("post", "replicas/r1/state", {"state": "disabled"}),
        ("delete", "replicas/r1", None),
        ("put", "policies/default/draft", DRAFT),
        ("delete", "policies/default/draft", None),
        ("post", "policies/default/publish", {}),
    ],
)
def test_a_change_needs_the_current_version_in_if_match(script, replica, method, path, body):
    if "draft" not in path or method == "delete":
        script.put(f"{ROOT}policies/default/draft", DRAFT, headers={"If-Match": "*"})
    before = Event.objects.count()
    send = getattr(script, method)
    missing = send(f"{ROOT}{path}", body)
    assert (missing.status_code, missing.data["type"]) == (428, "urn:warmpath:problem:precondition-required")
    weak = f"W/{tag(script, '/'.join(path.split('/')[:2]))}"
    for stale in ('"0123456789abcdef01234567"', "nonsense", "", weak):
        rejected = send(f"{ROOT}{path}", body, headers={"If-Match": stale})
        assert (rejected.status_code, rejected.data["type"]) == (412, "urn:warmpath:problem:changed-meanwhile"), stale
    assert Event.objects.count() == before


@pytest.mark.django_db
def test_a_412_shows_the_present_object_and_its_etag(script, pool):
    tag_before = tag(script, "pools/default")
    assert (
        script.patch(f"{ROOT}pools/default", {"description": "a"}, headers={"If-Match": tag_before}).status_code == 200
    )
    rejected = script.patch(f"{ROOT}pools/default", {"description": "b"}, headers={"If-Match": tag_before})
    assert (rejected.status_code, rejected.data["current"]["description"]) == (412, "a")
    assert rejected.data["changes"] == [{"pointer": "#/description", "before": "a", "after": "b"}]
    assert rejected.data["etag"] == tag(script, "pools/default")
    again = script.patch(f"{ROOT}pools/default", {"description": "b"}, headers={"If-Match": rejected.data["etag"]})
    assert (again.status_code, again["ETag"]) == (200, tag(script, "pools/default"))


@pytest.mark.django_db
def test_draft_and_publication_return_the_next_etag(script, policy):
    saved = script.put(f"{ROOT}policies/default/draft", DRAFT, headers={"If-Match": tag(script, "policies/default")})
    assert saved["ETag"] == tag(script, "policies/default")
    published = script.post(f"{ROOT}policies/default/publish", {}, headers={"If-Match": saved["ETag"]})
    assert (published.status_code, published["ETag"]) == (202, tag(script, "policies/default"))


@pytest.mark.django_db
def test_lists_carry_the_tag_of_each_object(script, replica):
    for resource, name in (("pools", "default"), ("replicas", "r1"), ("policies", "default"), ("projects", "default")):
        (row,) = script.get(f"{ROOT}{resource}").data["results"]
        assert row["etag"] == tag(script, f"{resource}/{name}")


@pytest.mark.django_db(transaction=True)
def test_of_fifty_concurrent_edits_of_a_version_one_succeeds(operator, replica):
    _, text = create_token(operator, name="test", scopes=["write"])
    script = APIClient()
    script.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    tag_before, before = tag(script, "replicas/r1"), Event.objects.filter(kind="replica_changed").count()

    def edit(number):
        try:
            client = APIClient()
            client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
            response = client.patch(f"{ROOT}replicas/r1", {"weight": number}, headers={"If-Match": tag_before})
            return number, response.status_code, json.loads(response.content)
        finally:
            connection.close()

    with ThreadPoolExecutor(50) as threads:
        outcomes = list(threads.map(edit, range(2, 52), timeout=60))
    ((winner, _, shown),) = [outcome for outcome in outcomes if outcome[1] == 200]
    losers = [body for _, status, body in outcomes if status == 412]
    assert len(losers) == 49
    assert all(body["current"]["weight"] == winner and body["etag"] == shown["etag"] for body in losers)
    assert Event.objects.filter(kind="replica_changed").count() == before + 1


@pytest.mark.django_db(transaction=True)
def test_a_change_during_the_application_of_a_bundle_is_a_conflict(api, pool, replica, monkeypatch):
    """Another connection changes a replica after the bundle's version was compared."""
    add_replica(pool, name="r2", url="http://10.0.0.2:8000")
    apply_pool = _Application.apply_pool

    def change_meanwhile(self, *arguments):
        if not change_meanwhile.done:
            change_meanwhile.done = True
            thread = Thread(target=change_replica)
            thread.start()
            thread.join(20)
        return apply_pool(self, *arguments)

    def change_replica():
        update_replica(Replica.objects.get(name="r2"), weight=9)
        connection.close()

    change_meanwhile.done = False
    monkeypatch.setattr(_Application, "apply_pool", change_meanwhile)
    bundle = {"pools": [{"name": "default", "description": "mine", "replicas": [{"name": "r1", "weight": 4}]}]}
    response = api.put(f"{ROOT}config", {"format": 1, **bundle}, format="json")
    assert response.status_code == 409
    assert [(row.name, row.weight) for row in Replica.objects.order_by("name")] == [("r1", 1.0), ("r2", 9.0)]
    assert Pool.objects.get().description == ""
