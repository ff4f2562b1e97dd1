"""The control plane's own figures, and who may read them."""

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone
from prometheus_client.parser import text_string_to_metric_families

from controlplane.models import Router
from controlplane.services.routers import announce, record_ack, record_nack
from controlplane.services.snapshots import newest_snapshot
from telemetry.models import ScrapeShard

pytestmark = pytest.mark.django_db
ELSEWHERE = {"REMOTE_ADDR": "203.0.113.9"}


def read(**headers):
    answer = Client(headers=headers).get("/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.content.decode())
    return {
        (sample.name.removeprefix("warmpath_controlplane_"), *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_routers_are_counted_by_what_they_run(pool):
    desired = newest_snapshot()
    for name in ("a", "b", "c", "d"):
        announce(name=name, boot="b", admin_url="http://127.0.0.1:1")
    a, b, c, _ = Router.objects.order_by("name")
    record_ack(a.pk, number=desired.number, sha256=desired.sha256)
    record_nack(b.pk, number=desired.number, path="$", reason="no room", running_number=None)
    Router.objects.filter(pk=c.pk).update(lost_at=timezone.now())

    figures = read()
    assert [figures["routers", state] for state in ("in_sync", "behind", "lost")] == [1, 2, 1]
    assert (figures["routers_refusing",], figures["config_number",]) == (1, desired.number)
    assert figures["config_lag_seconds",] > 0


def test_each_shard_of_the_fleet_tells_how_late_it_is(db):
    now = timezone.now()
    ScrapeShard.objects.create(number=0, due_at=now, lag_s=0.2, took_s=0.7, targets=100, failures=3, missed=4)
    ScrapeShard.objects.create(number=1, due_at=now - timedelta(minutes=1), lag_s=0.0)

    figures = read()
    names = ("scrape_lag_seconds", "scrape_took_seconds", "scrape_missed_ticks", "scrape_targets", "scrape_failures")
    assert [figures[name, "0"] for name in names] == [0.2, 0.7, 4, 100, 3]
    assert 54 < figures["scrape_lag_seconds", "1"] < 120
    assert ("scrape_took_seconds", "1") not in figures  # it runs


def test_what_is_not_known_is_left_out(db):
    figures = read()
    assert ("scrape_age_seconds",) not in figures
    assert (figures["database_up",], figures["outbox_pending",], figures["config_lag_seconds",]) == (1, 0, 0)


def test_answers_are_counted_by_route_and_not_by_address(db):
    def counted():
        return sum(value for key, value in read().items() if key[0] == "requests_total" and "account_login" in key)

    before = counted()
    for number in range(3):
        Client().get(f"/accounts/login/?{number}")
    Client().get("/no/such/address")
    assert counted() == before + 3
    assert not any("no/such" in label for key in read() for label in key)


def test_others_need_the_token(db, settings):
    settings.METRICS_TOKEN = "a" * 32
    client = Client(**ELSEWHERE)
    assert client.get("/metrics").status_code == 403
    assert client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 403
    for scheme in ("Bearer", "bearer"):
        assert client.get("/metrics", headers={"Authorization": f"{scheme} {'a' * 32}"}).status_code == 200
    assert client.post("/metrics").status_code == 405


def test_without_a_token_an_empty_one_opens_nothing(db, settings):
    settings.METRICS_TOKEN = ""
    assert Client(**ELSEWHERE).get("/metrics", headers={"Authorization": "Bearer "}).status_code == 403


def test_it_costs_the_same_number_of_queries_whatever_the_fleet(pool, django_assert_num_queries):
    for number in range(20):
        announce(name=f"r{number}", boot="b", admin_url="http://127.0.0.1:1")
    with django_assert_num_queries(19):
        read()
