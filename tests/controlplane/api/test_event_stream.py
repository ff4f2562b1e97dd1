"""Long polls and event streams: each visible event exactly once, while the client has access."""

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import httpx
import pytest
from django.conf import settings as django_settings
from django.db import connection, transaction
from rest_framework.test import APIClient

from controlplane.api import event_stream
from controlplane.models import Event, EventKind, Role, Scope
from controlplane.services import events
from controlplane.services.access.tokens import create_token, revoke_token
from controlplane.services.access.users import set_active, set_role
from controlplane.services.events import record_event
from controlplane.services.fleet.pools import create_pool, create_project, update_pool
from tests.conftest import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
EVENTS = "/api/v1/events"
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # made once: to load the trusted certificates takes long


def record(summary, **more):
    return record_event(EventKind.REPLICA_DOWN, summary, **more)


def newest():
    return Event.objects.order_by("-pk").values_list("pk", flat=True).first() or 0


@pytest.fixture
def token(operator):
    """A token and its text."""
    return create_token(operator, name="test", scopes=[Scope.READ])


@pytest.fixture
def script(token):
    """A client that may read."""
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {token[1]}")
    return client


def in_a_thread(function):
    def closing():
        try:
            return function()
        finally:
            connection.close()

    return ThreadPoolExecutor(1).submit(closing)


# --- the long poll ------------------------------------------------------------------------------------------


def test_events_after_an_id_are_listed_oldest_first(script, pool):
    last = newest()
    event_ids = [record(f"number {number}").pk for number in range(5)]
    first = script.get(EVENTS, {"after": last, "limit": 3}).json()
    second = script.get(EVENTS, {"after": first["last"], "limit": 3}).json()
    assert [row["id"] for row in (*first["results"], *second["results"])] == event_ids
    assert script.get(EVENTS, {"after": second["last"]}).json() == {"results": [], "last": event_ids[-1]}


def test_a_long_poll_returns_as_soon_as_there_is_an_event(script, pool):
    last, started_s = newest(), time.monotonic()
    response = in_a_thread(lambda: script.get(EVENTS, {"after": last, "wait": 30, "kind": "replica_down"}).json())
    update_pool(pool, description="not what was asked for")
    expected = record("this is")
    assert [row["id"] for row in response.result(timeout=20)["results"]] == [expected.pk]
    assert time.monotonic() - started_s < 15


def test_a_long_poll_returns_nothing_after_its_wait(script, pool):
    started_s = time.monotonic()
    assert script.get(EVENTS, {"after": newest(), "wait": 0.6}).json()["results"] == []
    assert 0.5 < time.monotonic() - started_s < 10


@pytest.mark.parametrize("query", [{"wait": 5}, {"after": "7", "wait": -1}, {"after": "7", "wait": 61}])
def test_invalid_waits_are_rejected(script, query):
    assert script.get(EVENTS, query).status_code == 422


def test_an_event_that_is_committed_late_is_not_skipped(script, pool):
    """The event that is committed later has the lower id."""
    last, written, commit = newest(), threading.Event(), threading.Event()

    def slow():
        with transaction.atomic():
            late = record("late").pk
            written.set()
            assert commit.wait(timeout=20)
        return late

    working = in_a_thread(slow)
    assert written.wait(timeout=20)
    early = record("early")
    meanwhile = script.get(EVENTS, {"after": last}).json()
    assert meanwhile["results"] == []  # withheld until the earlier transaction commits
    commit.set()
    late = working.result(timeout=20)
    assert late < early.pk
    shown = script.get(EVENTS, {"after": meanwhile["last"]}).json()
    assert [row["id"] for row in shown["results"]] == [late, early.pk]
    assert script.get(EVENTS, {"after": shown["last"]}).json()["results"] == []


def test_with_concurrent_writers_every_event_is_returned_once(script, pool):
    last, done = newest(), threading.Event()

    def write(number):
        for count in range(10):
            with transaction.atomic():
                record(f"{number}-{count}")

    def follow():
        received, at = [], last
        while True:
            writers_done = done.is_set()  # before the request that returns no more events
            page = script.get(EVENTS, {"after": at, "limit": 7}).json()
            received += [row["id"] for row in page["results"]]
            at = page["last"]
            if writers_done and not page["results"]:
                return received

    following = in_a_thread(follow)
    for writer in [in_a_thread(lambda number=number: write(number)) for number in range(6)]:
        writer.result(timeout=60)
    done.set()
    received = following.result(timeout=60)
    assert len(received) == len(set(received)) == 60
    assert set(received) == set(Event.objects.filter(pk__gt=last).values_list("pk", flat=True))


def test_a_long_poll_returns_only_visible_events(django_user_model, pool):
    theirs = create_pool("theirs", project=create_project("theirs"), models=["m"])
    user = django_user_model.objects.create_user("vera")
    set_role(user, Role.VIEWER, pool.project)
    _, text = create_token(user, name="test", scopes=[Scope.READ])
    client, last = APIClient(), newest()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    record("theirs", pool=theirs)
    record("without a pool")
    visible_event = record("visible", pool=pool)
    assert [row["id"] for row in client.get(EVENTS, {"after": last}).json()["results"]] == [visible_event.pk]


def test_the_number_of_waiting_clients_is_limited(script, pool, monkeypatch):
    monkeypatch.setattr(event_stream, "_slots", threading.BoundedSemaphore(1))
    event_stream.acquire_slot()
    for path in (f"{EVENTS}?after={newest()}&wait=30", f"{EVENTS}/stream"):
        response = script.get(path)
        assert (response.status_code, response["Retry-After"]) == (503, "5")
        assert json.loads(response.content)["type"] == "urn:warmpath:problem:too-many-waiting"
    assert script.get(EVENTS, {"after": newest()}).status_code == 200  # a request without wait needs no slot


def test_restored_events_sort_before_new_ones(pool):
    Event.objects.update(xact=2**60)
    fresh = record("fresh")
    assert events.reset_foreign_events() > 0
    assert events.newest_position() == (fresh.xact, fresh.pk)
    assert events.reset_foreign_events() == 0


# --- the stream ---------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def asgi_server(django_db_setup):
    """The application behind uvicorn, as ``make run`` has it, on the tests' database; started once for the module."""
    database, port = connection.settings_dict, free_port()
    code = (
        "import django.conf, controlplane.settings.test as s;"
        f"s.DATABASES['default'].update(HOST={database['HOST']!r}, NAME={database['NAME']!r});"
        "import uvicorn; from controlplane.asgi import application;"
        f"uvicorn.run(application, port={port}, log_level='warning', timeout_graceful_shutdown=1)"
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings.test"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=django_settings.ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_up(url), 40, "uvicorn", alive=process)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=20)


def is_up(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/healthz", trust_env=False, verify=NO_TLS).status_code == 200
    return False


@contextlib.contextmanager
def stream(url, text, **options):
    headers = {"Authorization": f"Bearer {text}", "Accept": "text/event-stream", **options.pop("headers", {})}
    with (
        httpx.Client(base_url=url, headers=headers, timeout=20, trust_env=False, verify=NO_TLS) as client,
        client.stream("GET", f"{EVENTS}/stream", **options) as response,
    ):
        yield response


def parse_events(lines):
    """The events of a stream, as (id, kind, data)."""
    event = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        elif "id" in event:
            yield int(event["id"]), event["event"], json.loads(event["data"])
            event = {}


def test_a_stream_delivers_events_and_resumes_after_the_last_id(asgi_server, token, pool):
    with stream(asgi_server, token[1]) as response:
        assert response.headers["content-type"] == "text/event-stream"
        lines = response.iter_lines()
        assert next(lines) == "retry: 2000"
        event_ids = [record(f"number {number}").pk for number in range(3)]
        received = list(islice(parse_events(lines), 3))
    assert [number for number, *_ in received] == event_ids
    assert received[0][1:] == ("replica_down", {**received[0][2], "summary": "number 0"})
    missed = record("while away").pk
    with stream(asgi_server, token[1], headers={"Last-Event-ID": str(event_ids[1])}) as response:
        assert [number for number, *_ in islice(parse_events(response.iter_lines()), 2)] == [event_ids[2], missed]


def test_a_stream_ends_when_its_token_is_revoked(asgi_server, token, pool):
    with stream(asgi_server, token[1]) as response:
        lines = response.iter_lines()
        next(lines)
        record("before")
        assert next(parse_events(lines))[2]["summary"] == "before"
        revoke_token(token[0])
        record("after")
        assert list(parse_events(lines)) == []


def test_a_stream_ends_when_its_user_is_disabled(asgi_server, token, operator, pool, django_user_model):
    django_user_model.objects.create_superuser("root")
    with stream(asgi_server, token[1]) as response:
        lines = response.iter_lines()
        next(lines)
        set_active(operator, False)
        started_s = time.monotonic()
        assert all("replica" not in line for line in lines)  # to the end
        assert time.monotonic() - started_s < 19


def test_a_stream_takes_the_filters_of_the_list(asgi_server, token, pool):
    with stream(asgi_server, token[1], params={"kind": "pool_changed"}) as response:
        lines = response.iter_lines()
        next(lines)
        record("something else")
        update_pool(pool, description="news")
        assert next(parse_events(lines))[1] == "pool_changed"
    with stream(asgi_server, token[1], params={"kind": "nonsense"}) as response:
        assert response.status_code == 422
        assert response.headers["content-type"] == "application/problem+json"


def test_a_disconnected_client_releases_its_slot(asgi_server, token, pool):
    for _ in range(event_stream.MAX_WAITERS + 8):
        with stream(asgi_server, token[1]) as response:
            assert response.status_code == 200
            next(response.iter_lines())


def test_a_stream_needs_authentication_and_a_valid_id(script, pool):
    response = APIClient().get(f"{EVENTS}/stream", headers={"Accept": "text/event-stream"})
    assert (response.status_code, response["Content-Type"]) == (401, "application/problem+json")
    assert script.get(f"{EVENTS}/stream", {"after": "yesterday"}).status_code == 422


def test_a_stream_ends_with_the_session(operator, pool):
    browser = APIClient()
    browser.force_login(operator)
    follower = browser.get(f"{EVENTS}/stream").streaming_content
    assert b"retry" in next(follower)
    browser.logout()
    record("after")
    assert list(follower) == []
