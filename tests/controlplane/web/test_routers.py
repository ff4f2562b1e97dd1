import re
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.models import ConfigSnapshot, Router
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.routers import announce, mark_lost_routers, record_ack, record_nack, record_unreachable
from telemetry.models import ScrapeState


@pytest.fixture
def router(pool) -> Router:
    """A router that runs the newest configuration."""
    newest = ConfigSnapshot.objects.first()
    told = announce(name="router-1", boot="boot-1", admin_url="http://10.0.1.1:8081", version="0.1.0")
    record_ack(told.pk, number=newest.number, sha256=newest.sha256)
    return told


@pytest.fixture
def behind(router, pool):
    """The same one configuration later."""
    add_replica(pool, name="r2", url="http://10.0.0.2:8000")
    return ConfigSnapshot.objects.first().number


def page(visitor, router, rest=""):
    return visitor.get(f"/routers/{router.pk}/{rest}")


def test_a_router_with_the_newest_configuration_is_in_sync(visitor, router):
    text = page(visitor, router).text

    assert "Runs the newest configuration" in text
    assert "0.1.0" in text
    assert "Router router-1 joined." in text


def test_a_refusal_stands_there_in_words_with_what_is_unaffected_and_what_is_missing(visitor, router, behind):
    reason = "Object contains unknown field `colour`"
    record_nack(router.pk, number=behind, path="$.pools[0]", reason=reason, running_number=behind - 1)

    for text in (page(visitor, router).text, visitor.get("/routers/").text):
        assert "Object contains unknown field `colour`" in text
        assert f"It continues to serve with configuration {behind - 1}, which it validated" in text
    assert "Replica r2 of pool default is added." in page(visitor, router).text  # what its requests lack


def test_a_router_that_is_not_reached_says_why(visitor, router, behind):
    record_unreachable(router.pk, number=behind, reason="ConnectTimeout: timed out")
    record_unreachable(router.pk, number=behind, reason="ConnectTimeout: timed out")

    text = page(visitor, router).text

    assert "unreachable" in text
    assert "ConnectTimeout: timed out, 2 times in a row" in text
    assert "unreachable" in visitor.get("/routers/").text


def test_a_router_with_an_unknown_configuration_is_reported(visitor, router, behind):
    announce(name="router-1", boot="boot-2", admin_url="http://10.0.1.1:8081", revision=77, sha256="a" * 64)

    assert "It runs configuration 77, which this control plane did not create" in page(visitor, router).text
    assert "runs a configuration that this control plane did not create" in visitor.get("/configurations/").text


def test_a_router_without_a_configuration(visitor, pool):
    told = announce(name="router-1", boot="boot-1", admin_url="http://10.0.1.1:8081")

    text = page(visitor, told).text

    assert "It runs no configuration yet." in text
    assert "has no configuration yet and reports not ready on /readyz" in text


def test_a_router_that_no_longer_responds_is_not_in_sync(visitor, router):
    ScrapeState.objects.create(router=router, at=timezone.now(), failures=1)
    Router.objects.update(last_seen_at=timezone.now() - timedelta(seconds=14))
    for text in (page(visitor, router).text, visitor.get("/routers/").text):
        assert "in sync" not in text
        assert re.search(r"No heartbeat for \d+ s, and scrapes fail\.", text)


def lose(router):
    Router.objects.filter(pk=router.pk).update(last_seen_at=timezone.now() - timedelta(minutes=5))
    mark_lost_routers()


def test_a_lost_router_can_be_removed_and_a_running_one_cannot(visitor, router):
    assert "Remove router</a>" not in page(visitor, router).text
    assert "Stop it first" in page(visitor, router, "remove/").text
    assert "Nothing was changed" in visitor.post(f"/routers/{router.pk}/remove/", follow=True).text
    lose(router)

    assert "Remove router</a>" in page(visitor, router).text
    answer = visitor.post(f"/routers/{router.pk}/remove/", follow=True)

    assert "Router router-1 was removed." in answer.text
    assert not Router.objects.exists()
    assert "Router router-1 was removed; its last heartbeat was at" in visitor.get("/events/?kind=router_removed").text


def test_the_list_says_whether_routers_that_share_their_state_see_each_other(visitor, router):
    states = {
        "router-1": {"peers": 2, "age_s": 0.12, "bytes_per_s": 20_480.0},
        "router-2": {"peers": 1, "age_s": 0.05},
        "router-3": {"peers": 0},
        "router-4": {},
    }
    for number, (name, shared) in enumerate(states.items()):
        row = router if name == router.name else announce(name=name, boot="b", admin_url=f"http://10.0.2.{number}:8081")
        ScrapeState.objects.create(router=row, at=timezone.now(), shared_state=shared)
    rows = re.findall("<tr>.*?</tr>", visitor.get("/routers/").text, re.DOTALL)
    cells = [re.sub("<[^>]+>", "|", row.split('class="brief"')[0]) for row in rows[1:]]

    assert ["|sharing|" in row for row in cells] == [True, False, False, False]
    assert ["|apart|" in row for row in cells] == [False, True, False, False]
    assert ["|cut off|" in row for row in cells] == [False, False, True, False]
    assert "2 of 2 others" in cells[0]
    assert "120 ms old, 20 KiB/s" in cells[0]
    assert "others" not in cells[3]


def test_a_router_without_others_that_share_is_alone(visitor, router):
    ScrapeState.objects.create(router=router, at=timezone.now(), shared_state={"peers": 0, "age_s": 0.12})
    text = visitor.get("/routers/").text

    assert "no other router shares" in text
    assert ">alone<" in re.sub("<span[^>]*></span>", "", text)
