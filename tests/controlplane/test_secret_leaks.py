"""Secrets sent through any interface appear in no table, log line, page, response or export."""

import base64
import logging
import re
from urllib.parse import urlencode

import pytest
from allauth.mfa.models import Authenticator
from django.db import connection
from django.test import Client
from psycopg import sql
from rest_framework.test import APIClient

from controlplane.services.access.users import add_user
from controlplane.tasks import reconcile_routers
from telemetry.tasks import deliver_notifications

PASSWORD = "canary-password-7f3a91"
WRONG = "canary-typed-5b1c22"
API_KEY = "canary-engine-key-90ad44"
WEBHOOK = "canary-webhook-path-1177ee"
SECRET = base64.b64encode(b"canary-signing-secret-1c9f03-1234567").decode()
PAGES = ("/fleet/", "/channels/", "/tokens/", "/users/", "/audit/", "/events/", "/audit.csv", "/routers/")
LISTS = ("replicas", "channels", "deliveries", "tokens", "audit", "events", "config")
pytestmark = pytest.mark.django_db


@pytest.fixture
def logs(caplog):
    """Everything that is logged with ``WARMPATH_LOG_LEVEL=DEBUG``."""
    caplog.set_level(logging.DEBUG)
    return caplog


@pytest.fixture
def planted(operator, pool, logs):
    """(secrets, responses) of many requests, rejected ones among them."""
    responses = []
    browser, rest = Client(raise_request_exception=False), APIClient(raise_request_exception=False)
    browser.force_login(operator)
    rest.force_login(operator)

    def web(path, **fields):
        responses.append(browser.post(path, fields))
        return responses[-1].text

    def api(method, path, body):
        responses.append(getattr(rest, method)(path, body, headers={"If-Match": "*"}))
        return responses[-1].text

    web("/users/new/", username="ada", password=PASSWORD)
    web("/users/new/", username="not a name", password=PASSWORD)
    for fields in ({"login": "ada", "password": WRONG}, {"login": "ada", "password": PASSWORD}):
        responses += [Client().post("/accounts/login/", fields)]
    responses.append(Client().post("/accounts/login/", {"login": WRONG, "password": "x"}))
    add_user("bob", password=PASSWORD)
    replica = {"pool": pool.name, "name": "r1", "url": "http://10.0.0.1:8000", "api_key": API_KEY}
    assert '"r1"' in api("post", "/api/v1/replicas", replica)
    api("post", "/api/v1/replicas", replica | {"name": "r2", "api_key": API_KEY + " \n"})
    api("patch", "/api/v1/replicas/r1", {"api_key": API_KEY, "weight": -1})
    config = {"url": f"http://127.0.0.1:1/{WEBHOOK}", "secret": f"whsec_{SECRET}"}
    assert "on-call" in api("post", "/api/v1/channels", {"name": "on-call", "kind": "webhook", "config": config})
    assert responses.pop().status_code == 201  # shows the signing secret, only here
    api("post", "/api/v1/channels", {"name": "on-call", "kind": "webhook", "config": config})
    api("post", "/api/v1/channels", {"name": "x", "kind": "webhook", "config": config | {"secret": SECRET[:9]}})
    api("post", "/api/v1/channels/on-call/test", {})
    token = re.search(r"wp_[0-9a-f]{16}\.([\w-]{43})", web("/tokens/", name="deploy", scope="write", days="7"))[1]
    responses.pop()  # shows the token, only here
    page = browser.get("/accounts/second-factor/set-up/").text
    factor = re.search(r'id="key" value="([A-Z2-7]{32})"', page)[1]
    web("/accounts/second-factor/set-up/", code="000000")
    responses.pop()  # shows the key of the second factor
    reconcile_routers()
    deliver_notifications()
    responses += [browser.get(path) for path in PAGES]
    responses += [rest.get(f"/api/v1/{path}") for path in LISTS]
    assert not Authenticator.objects.exists()
    return {PASSWORD, WRONG, API_KEY, WEBHOOK, SECRET, token, factor}, responses


def spellings(secret):
    """Encodings from which the secret can be recovered."""
    raw = secret.encode()
    inner = [base64.b64encode(b"\0" * pad + raw)[4 if pad else 0 : -4].decode() for pad in range(3)]
    return {secret, raw.hex(), urlencode({"": secret})[1:], secret[::-1], *inner}


def found_in(text, secrets):
    return [secret for secret in secrets for spelling in spellings(secret) if spelling in text]


def test_no_table_has_a_plain_secret(planted):
    secrets, _ = planted
    with connection.cursor() as cursor:
        cursor.execute("select tablename from pg_tables where schemaname = 'public' order by 1")
        tables, leaks, rows = [name for (name,) in cursor.fetchall()], {}, 0
        for table in tables:
            cursor.execute(sql.SQL("select t::text from {} t").format(sql.Identifier(table)))
            texts = [row for (row,) in cursor.fetchall()]
            rows += len(texts)
            if leaked := found_in("\n".join(texts), secrets):
                leaks[table] = leaked
    assert leaks == {}
    assert len(tables) > 25
    assert rows > 50


def test_no_log_line_has_a_secret(planted, logs):
    secrets, _ = planted
    records = logs.get_records("setup")
    lines = "\n".join(f"{record.getMessage()} {record.exc_text or ''}" for record in records)
    assert len(records) > 4
    assert found_in(lines, secrets) == []


def test_no_response_has_a_secret(planted):
    secrets, responses = planted
    for response in responses:
        body = b"".join(response.streaming_content) if response.streaming else response.content
        # A failed sign-in form shows the name that was typed; no other response does.
        leaked = found_in(body.decode(), secrets - {WRONG})
        assert leaked == [], response.request["PATH_INFO"]
    assert {response.status_code for response in responses} >= {200, 201, 302, 422}
