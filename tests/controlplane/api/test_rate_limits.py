"""Rate limits by token and by address; an unavailable counter limits nobody."""

import json
import time

import pytest
import redis
import time_machine
from rest_framework.test import APIClient

from controlplane.models import Pool
from controlplane.services import rates
from tests.fakes.fake_metrics_server import silent
from tests.pace import is_within

pytestmark = pytest.mark.django_db
POOLS = "/api/v1/pools"
NOON = 1_900_000_020.0 - 1_900_000_020.0 % 60  # the beginning of a minute


@pytest.fixture
def counted(valkey, settings):
    """A limit of three requests a minute, counted on an empty Valkey server."""
    settings.CELERY_BROKER_URL = valkey
    settings.API_RATE = settings.API_RATE_UNAUTHENTICATED = 3
    with rates.connect(valkey) as server:
        server.flushall()
        yield server


@pytest.fixture
def clock():
    """A clock that stands still."""
    with time_machine.travel(NOON, tick=False) as clock:
        yield clock


def test_each_token_has_its_own_rate_limit(counted, clock, client_with, pool):
    one, other = client_with("read"), client_with("read")
    left = [one.get(POOLS)["RateLimit-Remaining"] for _ in range(3)]
    clock.shift(20)
    refused = one.get(POOLS)
    assert left == ["2", "1", "0"]
    assert (refused.status_code, refused["Content-Type"]) == (429, "application/problem+json")
    assert refused.data["type"] == "urn:warmpath:problem:too-many-requests"
    assert (refused["RateLimit-Limit"], refused["RateLimit-Remaining"]) == ("3", "0")
    assert refused["Retry-After"] == refused["RateLimit-Reset"] == "40"
    assert other.get(POOLS).status_code == 200
    clock.shift(40)
    assert one.get(POOLS).status_code == 200


def test_a_request_above_the_limit_changes_nothing(counted, clock, client_with, pool):
    script = client_with("write")
    answers = [script.patch(f"{POOLS}/default", {"description": str(n)}, headers={"If-Match": "*"}) for n in range(4)]
    assert [response.status_code for response in answers] == [200, 200, 200, 429]
    assert Pool.objects.get().description == "2"


def test_unauthenticated_requests_are_limited_by_address(counted, clock):
    def ask(address, text=None):
        headers = {"Authorization": f"Bearer {text}"} if text else {}
        return APIClient(REMOTE_ADDR=address).get(POOLS, headers=headers).status_code

    assert [ask("192.0.2.1", "wrong"), ask("192.0.2.1"), ask("192.0.2.1", "wrong")] == [401, 401, 401]
    assert [ask("192.0.2.1"), ask("192.0.2.1", "wrong"), ask("192.0.2.2")] == [429, 429, 401]
    assert [ask(f"2001:db8::{host}") for host in range(1, 5)] == [401, 401, 401, 429]  # one /64
    assert ask("2001:db8:0:1::1") == 401


def test_counters_expire(counted, clock, client_with, pool):
    for scope in ("read", "write"):
        client_with(scope).get(POOLS)
    names = counted.keys("warmpath:rate:*")
    assert len(names) == 2
    assert all(0 < counted.ttl(name) <= 120 for name in names)


def test_a_limit_of_zero_is_unlimited(counted, settings, client_with, pool):
    settings.API_RATE = 0
    script = client_with("read")
    answers = [script.get(POOLS) for _ in range(5)]
    assert {response.status_code for response in answers} == {200}
    assert not answers[0].has_header("RateLimit-Limit")


def test_routers_are_not_counted(counted, client):
    told = {"name": "router-1", "boot": "b1", "admin_url": "http://127.0.0.1:8081"}
    headers = {"Authorization": "Bearer router-token-for-tests"}
    for _ in range(5):
        response = client.post("/api/v1/routers/announce", json.dumps(told), "application/json", headers=headers)
        assert response.status_code == 200


def test_an_unavailable_counter_neither_rejects_nor_delays_requests(settings, client_with, pool, caplog):
    settings.API_RATE = 1
    with silent() as port:
        settings.CELERY_BROKER_URL = f"redis://127.0.0.1:{port}/0"
        script, begun = client_with("read"), time.monotonic()
        assert {script.get(POOLS).status_code for _ in range(20)} == {200}
        assert is_within(time.monotonic() - begun, 5)  # 20 waits would be as long
    assert caplog.text.count("rate_limits_suspended") == 1


def test_counting_resumes_when_the_counter_recovers(counted, client_with, pool, monkeypatch):
    counter, script = rates.counter(), client_with("read")
    with monkeypatch.context() as broken:
        broken.setattr(counter, "_server", redis.Redis(port=1, retry=None))
        assert not script.get(POOLS).has_header("RateLimit-Limit")
    assert not script.get(POOLS).has_header("RateLimit-Limit")  # left alone
    monkeypatch.setattr(rates, "RETRY_AFTER_S", 0)
    counter._retry_at = 0
    assert script.get(POOLS)["RateLimit-Remaining"] == "2"
