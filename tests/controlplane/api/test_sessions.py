"""The REST API with a browser's session (S10): what the document says, and nothing unsafe without the CSRF token."""

import re
from uuid import UUID

import pytest
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from django.test import Client
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from controlplane.models import AuditEntry, Event
from tests.controlplane.access.conftest import furnished
from tests.controlplane.api.test_document import DOCUMENT, OPERATIONS
from tests.controlplane.api.test_document import api as described_api

CHECKS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)
UNSAFE = {"POST", "PUT", "PATCH", "DELETE"}
ROUTERS_OWN = "POST /api/v1/routers/announce"  # asks for the routers' token, whoever else one is
PEOPLES = [operation for operation in OPERATIONS if operation != ROUTERS_OWN]


@pytest.fixture
def person(db, operator):
    """Signed in, with a CSRF cookie; there is one of everything. Requests keep the test's transaction."""
    furnished("here", 1)
    client = Client(enforce_csrf_checks=True)
    client.force_login(operator)
    client.get("/")
    for signal in (request_started, request_finished):  # of which the client has connected one again
        signal.disconnect(close_old_connections)
    yield client
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


def cookies(client: Client) -> dict[str, str]:
    return {name: morsel.value for name, morsel in client.cookies.items()}


def test_every_unsafe_call_of_a_session_is_refused_without_the_csrf_token(person):
    """Neither the cookie alone, nor a token of one's own making, nor another site's."""
    before = (Event.objects.count(), AuditEntry.objects.count())
    unsafe = [operation.split() for operation in PEOPLES if operation.split()[0] in UNSAFE]
    assert len(unsafe) > 40
    for method, path in unsafe:
        address = re.sub(r"\{\w+\}", str(UUID(int=0)) if "/deliveries/" in path else "1", path)
        for headers in ({}, {"X-CSRFToken": "x" * 32}, {"Origin": "https://evil.example"}):
            answer = person.generic(method, address, "{}", content_type="application/json", headers=headers)
            told = (answer.status_code, answer["Content-Type"].partition(";")[0])
            assert told == (403, "application/problem+json"), (method, path, headers)
            assert "CSRF" in answer.json()["detail"]
    assert (Event.objects.count(), AuditEntry.objects.count()) == before


def holds(described, headers: dict[str, str], known: dict[str, str]) -> set[int]:
    """The statuses of right requests to an operation, each as the document says it."""
    seen = set()

    @settings(max_examples=2, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=described.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def each(case):
        case.headers.pop("Authorization", None)  # the document's other way in
        answer = case.call_and_validate(checks=CHECKS, headers=headers, cookies=known)
        assert answer.status_code != 401
        assert "CSRF" not in answer.text
        seen.add(answer.status_code)

    each()
    return seen


def test_with_it_every_operation_does_what_the_document_says(person):
    known = cookies(person)
    headers = {"X-CSRFToken": known["csrftoken"]}
    statuses = {}
    for operation in PEOPLES:
        method, path = operation.split()
        statuses[operation] = holds(described_api[path][method], headers, known)
    reached = {operation for operation, seen in statuses.items() if any(status < 300 for status in seen)}
    assert len(reached) > 20  # most others name what is not there
    made = person.post("/api/v1/projects", {"name": "made"}, content_type="application/json", headers=headers)
    assert made.status_code == 201


def test_the_document_says_which_calls_take_a_session():
    schemes = DOCUMENT["components"]["securitySchemes"]
    assert {"apiKey", "http"} <= {scheme["type"] for scheme in schemes.values()}
