"""Replica sources on the fleet page, and their forms."""

import pytest
from django.utils import timezone

from controlplane.models import DiscoveredReplica, DiscoveredState, Replica, ReplicaSource
from controlplane.services.discovery.adoption import adopt
from controlplane.services.discovery.sources import create_source

DNS = {
    "name": "names",
    "host": "vllm.test",
    "record": "A",
    "port": "8000",
    "scheme": "http",
    "adoption": "propose",
    "interval_s": "30",
    "deadline_s": "10",
    "drain_after_s": "60",
    "remove_after_s": "600",
    "max_vanished_ratio": "0.5",
    "max_targets": "256",
}
KUBERNETES = DNS | {"service": "vllm", "namespace": "prod", "port": "", "api_url": "https://10.0.0.1:6443"}


@pytest.fixture
def source(pool):
    return create_source(pool, name="names", kind="dns", settings={"host": "vllm.test"})


@pytest.fixture
def proposal(source):
    return DiscoveredReplica.objects.create(source=source, key="gpu-1:8000", name="gpu-1", url="http://10.0.0.1:8000")


def test_a_source_is_added_by_a_form_of_its_kind(visitor, pool):
    page = visitor.get(f"/fleet/pools/{pool.pk}/sources/new/?kind=kubernetes").text
    assert 'aria-current="true"' in page
    assert "Service whose pods are the replicas." in page
    answer = visitor.post(
        f"/fleet/pools/{pool.pk}/sources/new/?kind=kubernetes", KUBERNETES | {"secret": "a-token"}, follow=True
    )
    made = ReplicaSource.objects.get()
    assert (made.kind, made.settings["service"], made.settings["ca"], bool(made.encrypted)) == (
        "kubernetes",
        "vllm",
        "",
        True,
    )
    assert "polled within seconds" in answer.text


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"name": "Big Name"}, "name", "lower-case letters"),
        ({"host": "no name"}, "host", "Expected"),
        ({"host": ""}, "host", "required"),
        ({"port": "70000"}, "port", "65535"),
        ({"interval_s": "1"}, "interval_s", "5 to 86400"),
        ({"remove_after_s": "10"}, "remove_after_s", "drains before its removal"),
        ({"max_vanished_ratio": "2"}, "max_vanished_ratio", "0.01 to 1"),
    ],
)
def test_errors_are_shown_at_their_fields(visitor, pool, change, field, says):
    answer = visitor.post(f"/fleet/pools/{pool.pk}/sources/new/?kind=dns", DNS | change)
    assert answer.status_code == 422
    assert says in answer.text.partition(f'id="id_{field}_error"')[2].partition("</div>")[0]
    assert not ReplicaSource.objects.exists()


def test_a_form_never_shows_a_token_and_keeps_it_unless_told_otherwise(visitor, pool):
    visitor.post(f"/fleet/pools/{pool.pk}/sources/new/?kind=kubernetes", KUBERNETES | {"secret": "a-token-of-mine"})
    made = ReplicaSource.objects.get()
    assert "a-token-of-mine" not in visitor.get(f"/fleet/sources/{made.pk}/").text
    visitor.post(f"/fleet/sources/{made.pk}/", KUBERNETES | {"enabled": "on", "interval_s": "45"})
    made.refresh_from_db()
    assert (made.interval_s, made.enabled, made.encrypted is not None) == (45, True, True)
    moved = visitor.post(f"/fleet/sources/{made.pk}/", KUBERNETES | {"api_url": "https://10.6.6.6:6443"})
    assert moved.status_code == 422
    assert "enter the token for the new address" in moved.text
    visitor.post(f"/fleet/sources/{made.pk}/", KUBERNETES | {"forget_secret": "on"})
    made.refresh_from_db()
    assert (made.encrypted, made.enabled) == (None, False)


def test_proposals_are_adopted_from_the_fleet_page(visitor, proposal):
    page = visitor.get("/fleet/").text
    assert f'action="/fleet/discovered/{proposal.pk}/adopt/"' in page
    assert ">Adopt<" in page
    answer = visitor.post(f"/fleet/discovered/{proposal.pk}/adopt/", follow=True)
    assert Replica.objects.get().name == "gpu-1-8000"
    assert "was added" in answer.text
    assert f"/discovered/{proposal.pk}/" not in answer.text
    again = visitor.post(f"/fleet/discovered/{proposal.pk}/adopt/", follow=True)
    assert "adopted already. Nothing was changed." in again.text


def test_a_replica_that_its_source_misses_says_what_will_happen_to_it(visitor, proposal):
    adopt(proposal)
    DiscoveredReplica.objects.update(missing_since=timezone.now())
    page = visitor.get("/fleet/").text
    assert "drains 1 min after it went missing" in page


def test_what_a_source_says_is_shown_as_text(visitor, source):
    evil = "<script>alert(1)</script>"
    ReplicaSource.objects.update(error=evil, rejected=[evil], last_poll_at=timezone.now())
    DiscoveredReplica.objects.create(source=source, key=evil, name="x", url=f"http://{evil}", labels={evil: evil})
    page = visitor.get("/fleet/").text
    assert "&lt;script&gt;alert(1)" in page
    assert evil not in page


def test_a_refresh_is_the_part_of_one_pool_alone(visitor, proposal):
    part = visitor.get(f"/fleet/pools/{proposal.source.pool_id}/sources/").text
    assert "gpu-1:8000" in part
    assert "<html" not in part


def test_a_source_is_polled_on_request_but_not_while_it_is_disabled(visitor, source):
    ReplicaSource.objects.update(next_poll_at=timezone.now() + timezone.timedelta(hours=1))
    assert "is being polled" in visitor.post(f"/fleet/sources/{source.pk}/poll/", follow=True).text
    assert ReplicaSource.objects.get().next_poll_at <= timezone.now()
    ReplicaSource.objects.update(enabled=False)
    assert "is paused" in visitor.post(f"/fleet/sources/{source.pk}/poll/", follow=True).text


def test_removing_a_source_says_first_what_stays(visitor, proposal):
    adopt(proposal)
    path = f"/fleet/sources/{proposal.source_id}/remove/"
    assert "Its 1 replicas stay as they are" in visitor.get(path).text
    visitor.post(path)
    assert not ReplicaSource.objects.exists()
    assert Replica.objects.get().state == "active"


def test_the_fleet_page_asks_as_often_for_many_sources_as_for_one(visitor, pool, django_assert_num_queries):
    for number in range(6):
        made = create_source(pool, name=f"s{number}", kind="dns", settings={"host": "vllm.test"})
        for pod in range(5):
            DiscoveredReplica.objects.create(
                source=made, key=f"p{pod}", name=f"p{pod}", url=f"http://10.{number}.{pod}.1"
            )
    assert DiscoveredReplica.objects.filter(state=DiscoveredState.PROPOSED).count() == 30
    with django_assert_num_queries(8):
        visitor.get("/fleet/")
