"""Replica sources and discovered replicas over REST."""

import json

import pytest

from controlplane.models import AuditEntry, DiscoveredReplica, Event, Replica, ReplicaSource
from controlplane.services.discovery.sources import create_source

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("stored_pool")]
ROOT = "/api/v1/"
SECRET = "a-token-that-nobody-shows"
KUBERNETES = {
    "pool": "default",
    "name": "cluster",
    "kind": "kubernetes",
    "settings": {"service": "vllm", "api_url": "https://10.0.0.1:6443"},
    "secret": SECRET,
}


@pytest.fixture
def found(pool):
    """Two proposals."""
    source = create_source(pool, name="names", kind="dns", settings={"host": "vllm.test"})
    for number in (1, 2):
        key = f"10.0.0.{number}:8000"
        DiscoveredReplica.objects.create(source=source, key=key, name=f"10.0.0.{number}-8000", url=f"http://{key}")
    return source


def test_a_source_can_be_added_changed_polled_and_removed(api, pool):
    made = api.post(f"{ROOT}replica-sources", {**KUBERNETES, "adoption": "adopt"})
    assert made.status_code == 201
    assert (made.data["status"], made.data["adoption"], made.data["has_secret"]) == ("new", "adopt", True)
    assert made.data["settings"]["namespace"] == "default"  # defaults are written out
    changed = api.patch(f"{ROOT}replica-sources/cluster", {"interval_s": 10, "enabled": False})
    assert (changed.data["interval_s"], changed.data["status"]) == (10, "paused")
    assert api.post(f"{ROOT}replica-sources/cluster/poll").status_code == 409
    api.patch(f"{ROOT}replica-sources/cluster", {"enabled": True})
    assert api.post(f"{ROOT}replica-sources/cluster/poll").status_code == 202
    assert api.delete(f"{ROOT}pools/default").status_code == 409  # it still has a source
    assert api.delete(f"{ROOT}replica-sources/cluster").status_code == 204
    kinds = list(Event.objects.filter(kind__startswith="source").values_list("kind", flat=True))
    assert kinds == ["source_removed", "source_changed", "source_changed", "source_added"]


def test_the_secret_of_a_source_is_never_shown(api, pool):
    answers = [api.post(f"{ROOT}replica-sources", KUBERNETES), api.get(f"{ROOT}replica-sources/cluster")]
    answers.append(api.patch(f"{ROOT}replica-sources/cluster", {"secret": SECRET + "-2"}))
    answers.append(api.patch(f"{ROOT}replica-sources/cluster", {"secret": SECRET + " 3"}))
    assert [response.status_code for response in answers] == [201, 200, 200, 422]
    kept = [*Event.objects.values(), *AuditEntry.objects.values(), *ReplicaSource.objects.values()]
    assert SECRET not in "".join(response.content.decode() for response in answers) + json.dumps(kept, default=repr)
    assert SECRET.encode() not in bytes(ReplicaSource.objects.get().encrypted)


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"kind": "consul"}, "#/kind"),
        ({"name": "Big Name"}, "#/name"),
        ({"settings": {}}, "#/settings/service"),
        ({"settings": {"service": "vllm", "namespace": "../kube-system"}}, "#/settings/namespace"),
        ({"settings": {"service": "vllm", "namespace": "kube-system\n"}}, "#/settings/namespace"),
        ({"settings": {"service": "vllm", "port": "http\n"}}, "#/settings/port"),
        ({"settings": {"service": "vllm", "nonsense": 1}}, "#/settings/nonsense"),
        ({"settings": {"service": 7}}, "#/settings/service"),
        ({"settings": []}, "#/settings"),
        ({"interval_s": 1}, "#/interval_s"),
        ({"drain_after_s": 900}, "#/remove_after_s"),
        ({"max_vanished_ratio": 0}, "#/max_vanished_ratio"),
        ({"max_targets": 5000}, "#/max_targets"),
        ({"secret": "two words"}, "#/secret"),
        ({"kind": "dns", "settings": {"host": "vllm.test"}}, "#/secret"),
        ({"kind": "file", "secret": "", "settings": {"path": "/etc/passwd"}}, "#/settings/path"),
        ({"kind": "file", "secret": "", "settings": {"path": "fleet.json\n"}}, "#/settings/path"),
        ({"kind": "dns", "secret": "", "settings": {"host": "vllm.test\n"}}, "#/settings/host"),
        *(
            (settings | {"settings": settings["settings"] | {"api_url": "https://8.8.8.8"}}, "#/settings/api_url")
            for settings in (
                KUBERNETES,
                KUBERNETES | {"kind": "inference_pool", "settings": {"inference_pool": "llama"}},
            )
        ),
        *(
            ({"kind": "dns", "secret": "", "settings": {"host": "vllm.test", "server": server}}, "#/settings/server")
            for server in ("169.254.169.254", "[fe80::1]:53", "10.0.0.2:0", "10.0.0.2:70000")
        ),
        ({"kind": "file", "secret": "", "settings": {"path": "a/../../x.json"}}, "#/settings/path"),
        ({"adoption": "maybe"}, "#/adoption"),
    ],
)
def test_an_invalid_source_is_rejected_with_a_pointer(api, pool, change, pointer):
    response = api.post(f"{ROOT}replica-sources", KUBERNETES | change)
    assert response.status_code == 422
    assert [fault["pointer"] for fault in response.data["errors"]] == [pointer]
    assert not ReplicaSource.objects.exists()


def test_an_api_server_is_stored_in_its_normal_form(api, pool):
    source = KUBERNETES | {"settings": KUBERNETES["settings"] | {"api_url": "HTTPS://K8s.Test:6443/"}}
    assert api.post(f"{ROOT}replica-sources", source).data["settings"]["api_url"] == "https://k8s.test:6443"
    refused = api.patch(f"{ROOT}replica-sources/cluster", {"settings": source["settings"] | {"api_url": "file:///x"}})
    assert (refused.status_code, refused.data["errors"][0]["pointer"]) == (422, "#/settings/api_url")


def test_source_names_are_unique(api, pool):
    assert [api.post(f"{ROOT}replica-sources", KUBERNETES).status_code for _ in range(2)] == [201, 409]


def test_proposals_are_adopted(api, found):
    first, second = found.discovered.values_list("pk", flat=True)
    adopted = api.post(f"{ROOT}discovered-replicas/{first}/adopt", {"name": "gpu-1"})
    assert (adopted.status_code, adopted.data["state"], adopted.data["replica"]) == (200, "adopted", "gpu-1")
    assert Replica.objects.get().url == "http://10.0.0.1:8000"
    assert api.post(f"{ROOT}discovered-replicas/{first}/adopt").status_code == 409
    assert api.post(f"{ROOT}discovered-replicas/{second}/adopt").data["replica"] == "10.0.0.2-8000"


def test_lists_can_be_filtered(api, found, django_assert_max_num_queries):
    first = found.discovered.first()
    api.post(f"{ROOT}discovered-replicas/{first.pk}/adopt")
    with django_assert_max_num_queries(6):
        listed = api.get(f"{ROOT}discovered-replicas", {"source": "names"}).data
    assert listed["count"] == 2
    for query, count in (("state=proposed", 1), ("pool=other", 0), ("missing=true", 0), ("missing=false", 2)):
        assert api.get(f"{ROOT}discovered-replicas?{query}").data["count"] == count, query
    assert api.get(f"{ROOT}discovered-replicas?state=lost").status_code == 422
    assert api.get(f"{ROOT}replica-sources?pool=default&kind=dns").data["count"] == 1
