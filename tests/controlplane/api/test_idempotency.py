"""Idempotency keys: a repeated request is performed once and its response replayed."""

from datetime import timedelta

import pytest
import time_machine
from django.db import connection, transaction
from django.utils import timezone
from rest_framework.test import APIClient

from controlplane.models import ApiToken, IdempotencyRecord, Pool
from controlplane.services import idempotency
from controlplane.services.access.tokens import create_token
from tests.controlplane.threads import at_once

pytestmark = pytest.mark.django_db
ROOT = "/api/v1/"
KEY = {"Idempotency-Key": "deploy-17"}
POOL = {"name": "big", "models": ["qwen"]}


def test_a_repeated_request_replays_the_response(api):
    first = api.post(f"{ROOT}pools", POOL, headers=KEY)
    again = api.post(f"{ROOT}pools", dict(reversed(POOL.items())), headers={"Idempotency-Key": '"deploy-17"'})
    assert (first.status_code, again.status_code, again.json()) == (201, 201, first.json())
    assert (again["ETag"], again["Location"]) == (first["ETag"], f"{ROOT}pools/big")
    assert (again["Idempotency-Replayed"], first.has_header("Idempotency-Replayed")) == ("true", False)
    assert Pool.objects.count() == 1


def test_an_idempotency_key_identifies_one_request_for_a_day(api):
    api.post(f"{ROOT}pools", POOL, headers=KEY)
    for path, body in (("pools", {"name": "other"}), ("projects", POOL)):
        other = api.post(f"{ROOT}{path}", body, headers=KEY)
        assert (other.status_code, other.json()["type"]) == (422, "urn:warmpath:problem:key-reused")
    with time_machine.travel(timezone.now() + timedelta(hours=25), tick=False):
        assert api.post(f"{ROOT}pools", {"name": "other", "models": ["m"]}, headers=KEY).status_code == 201


def test_idempotency_keys_belong_to_their_token(api, client_with):
    assert api.post(f"{ROOT}pools", POOL, headers=KEY).status_code == 201
    assert client_with("admin").post(f"{ROOT}pools", POOL, headers=KEY).status_code == 409  # the name is taken


def test_errors_are_not_stored(api, pool):
    replica = {"pool": "default", "name": "r1", "url": "http://10.0.0.1:8000", "weight": 0}
    assert api.post(f"{ROOT}replicas", replica, headers=KEY).status_code == 422
    assert not IdempotencyRecord.objects.exists()
    assert api.post(f"{ROOT}replicas", {**replica, "weight": 1}, headers=KEY).status_code == 201


def test_a_failure_leaves_neither_change_nor_record(api, monkeypatch):
    def fail(*_args, **_options):
        raise RuntimeError

    with monkeypatch.context() as broken:
        broken.setattr("controlplane.services.idempotency.encrypt", fail)  # the very last step
        assert api.post(f"{ROOT}pools", POOL, headers=KEY).status_code == 500
    assert (Pool.objects.count(), IdempotencyRecord.objects.count()) == (0, 0)
    assert api.post(f"{ROOT}pools", POOL, headers=KEY).status_code == 201


def test_a_replayed_secret_is_stored_encrypted(api):
    wanted = {"name": "ci", "scopes": ["read"]}
    text = api.post(f"{ROOT}tokens", wanted, headers=KEY).json()["token"]
    assert api.post(f"{ROOT}tokens", wanted, headers=KEY).json()["token"] == text
    assert ApiToken.objects.filter(name="ci").count() == 1
    with connection.cursor() as cursor:
        cursor.execute("select k::text, convert_from(encrypted, 'latin1') from controlplane_idempotencyrecord k")
        ((row, encrypted),) = cursor.fetchall()
    assert text.partition(".")[2] not in row + encrypted


@pytest.mark.parametrize("key", ["", '""', "x" * 256, "tab\there", "ä"])
def test_an_invalid_idempotency_key_is_rejected(api, key):
    assert api.post(f"{ROOT}pools", POOL, headers={"Idempotency-Key": key}).status_code == 400
    assert not Pool.objects.exists()


def test_records_expire_and_their_number_is_limited(api, monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_KEYS", 1)
    assert api.post(f"{ROOT}pools", POOL, headers=KEY).status_code == 201
    full = api.post(f"{ROOT}pools", {"name": "more", "models": ["m"]}, headers={"Idempotency-Key": "other"})
    assert full.status_code == 429
    assert Pool.objects.count() == 1
    IdempotencyRecord.objects.update(created_at=timezone.now() - timedelta(hours=24, seconds=1))
    assert (idempotency.delete_expired_records(), IdempotencyRecord.objects.count()) == (1, 0)


@pytest.mark.django_db(transaction=True)
def test_a_concurrent_repeat_is_a_conflict(operator):
    token, text = create_token(operator, name="test", scopes=["admin"])
    script = APIClient()
    script.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")

    def second():
        return script.post(f"{ROOT}pools", POOL, headers=KEY)

    with transaction.atomic():  # the first, as far as the lock
        idempotency.find_record(idempotency.IdempotentRequest(f"token:{token.pk}", "deploy-17", "whatever"))
        (response,) = at_once(second)
    assert (response.status_code, response.data["type"], response["Retry-After"]) == (
        409, "urn:warmpath:problem:still-running", "2",
    )  # fmt: skip
    assert second().status_code == 201


@pytest.mark.django_db(transaction=True)
def test_of_many_concurrent_repeats_one_is_performed(operator):
    _, text = create_token(operator, name="test", scopes=["admin"])

    def send():
        script = APIClient()
        script.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
        return script.post(f"{ROOT}pools", POOL, headers=KEY).status_code

    assert set(at_once(*[send] * 12)) <= {201, 409}
    assert Pool.objects.count() == 1
    assert send() == 201
