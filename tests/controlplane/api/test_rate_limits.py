"""Rate limits by token and by address; without the counters there is no limit."""

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
def counters(valkey, settings):
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


def test_each_token_has_its_own_rate_limit(counters, clock, client_with, pool):
    first, second = client_with("read"), client_with("read")
    remaining = [first.get(POOLS)["RateLimit-Remaining"] for _ in range(3)]
    clock.shift(20)
    rejected = first.get(POOLS)
    assert remaining == ["2", "1", "0"]
    assert (rejected.status_code, rejected["Content-Type"]) == (429, "application/problem+json")
    assert rejected.data["type"] == "urn:warmpath:problem:too-many-requests"
    assert (rejected["RateLimit-Limit"], rejected["RateLimit-Remaining"]) == ("3", "0")
    assert rejected["Retry-After"] == rejected["RateLimit-Reset"] == "40"
    assert second.get(POOLS).status_code == 200
    clock.shift(40)
    assert first.get(POOLS).status_code == 200


def test_a_request_above_the_limit_changes_nothing(counters, clock, client_with, pool):
    script = client_with("write")
    responses = [script.patch(f"{POOLS}/default", {"description": str(n)}, headers={"If-Match": "*"}) for n in range(4)]
    assert [response.status_code for response in responses] == [200, 200, 200, 429]
    assert Pool.objects.get().description == "2"


def test_unauthenticated_requests_are_limited_by_address(counters, clock):
    def status_of(address, text=None):
        headers = {"Authorization": f"Bearer {text}"} if text else {}
        return APIClient(REMOTE_ADDR=address).get(POOLS, headers=headers).status_code

    assert [status_of("192.0.2.1", "wrong"), status_of("192.0.2.1"), status_of("192.0.2.1", "wrong")] == [401, 401, 401]
    assert [status_of("192.0.2.1"), status_of("192.0.2.1", "wrong"), status_of("192.0.2.2")] == [429, 429, 401]
    assert [status_of(f"2001:db8::{host}") for host in range(1, 5)] == [401, 401, 401, 429]  # one /64
    assert status_of("2001:db8:0:1::1") == 401


def test_counters_expire(counters, clock, client_with, pool):
    for scope in ("read", "write"):
        client_with(scope).get(POOLS)
    names = counters.keys("warmpath:rate:*")
    assert len(names) == 2
    assert all(0 < counters.ttl(name) <= 120 for name in names)


def test_a_limit_of_zero_is_unlimited(counters, settings, client_with, pool):
    settings.API_RATE = 0
    script = client_with("read")
    responses = [script.get(POOLS) for _ in range(5)]
    assert {response.status_code for response in responses} == {200}
    assert not responses[0].has_header("RateLimit-Limit")


def test_routers_are_not_counted(counters, client):
    heartbeat = {"name": "router-1", "boot": "b1", "admin_url": "http://127.0.0.1:8081"}
    headers = {"Authorization": "Bearer router-token-for-tests"}
    for _ in range(5):
        response = client.post("/api/v1/routers/announce", json.dumps(heartbeat), "application/json", headers=headers)
        assert response.status_code == 200


def test_an_unavailable_counter_neither_rejects_nor_delays_requests(settings, client_with, pool, caplog, monkeypatch):
    settings.API_RATE = 1
    monkeypatch.setattr(rates, "RETRY_AFTER_S", 600.0)
    with silent() as port:
        settings.CELERY_BROKER_URL = f"redis://127.0.0.1:{port}/0"
        script, started_s = client_with("read"), time.monotonic()
        assert {script.get(POOLS).status_code for _ in range(20)} == {200}
        assert is_within(time.monotonic() - started_s, 5)  # 20 waits would be as long
    assert caplog.text.count("rate_limits_suspended") == 1


def test_counting_resumes_when_the_counter_recovers(counters, client_with, pool, monkeypatch):
    counter, script = rates.request_counter(), client_with("read")
    with monkeypatch.context() as broken:
        broken.setattr(counter, "_server", redis.Redis(port=1, retry=None))
        assert not script.get(POOLS).has_header("RateLimit-Limit")
    assert not script.get(POOLS).has_header("RateLimit-Limit")  # not retried yet
    monkeypatch.setattr(rates, "RETRY_AFTER_S", 0)
    counter._retry_at = 0
    assert script.get(POOLS)["RateLimit-Remaining"] == "2"
