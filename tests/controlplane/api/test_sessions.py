"""The REST API with a browser's session: every change needs the CSRF token."""

import re
from uuid import UUID

import pytest
from django.test import Client

from controlplane.models import AuditEntry, Event
from tests.controlplane.api.test_document import DOCUMENT

UNSAFE = sorted(
    (method.upper(), path)
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
    if method != "get" and not path.endswith("/routers/announce")  # which needs the routers' token
)


@pytest.fixture
def browser(operator):
    """A signed-in browser with a CSRF cookie."""
    client = Client(enforce_csrf_checks=True)
    client.force_login(operator)
    client.get("/")
    return client


@pytest.mark.parametrize("headers", [{}, {"X-CSRFToken": "x" * 32}, {"Origin": "https://evil.example"}])
def test_every_change_of_a_session_needs_the_csrf_token(browser, headers):
    before = (Event.objects.count(), AuditEntry.objects.count())
    assert len(UNSAFE) > 40
    for method, path in UNSAFE:
        url = re.sub(r"\{\w+\}", str(UUID(int=0)) if "/deliveries/" in path else "1", path)
        response = browser.generic(method, url, "{}", content_type="application/json", headers=headers)
        assert (response.status_code, "CSRF" in response.json()["detail"]) == (403, True), (method, path)
    assert (Event.objects.count(), AuditEntry.objects.count()) == before


def test_a_session_with_the_csrf_token_can_change_things(browser):
    headers = {"X-CSRFToken": browser.cookies["csrftoken"].value}
    body = {"name": "made"}
    created = browser.post("/api/v1/projects", body, content_type="application/json", headers=headers)
    assert created.status_code == 201


def test_the_document_says_that_operations_take_a_session():
    schemes = DOCUMENT["components"]["securitySchemes"]
    assert {"apiKey", "http"} <= {scheme["type"] for scheme in schemes.values()}
