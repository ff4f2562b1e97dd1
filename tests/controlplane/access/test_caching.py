"""Cache-Control of pages, REST responses and static files."""

import pytest
from django.test import Client

from tests.rest_client import CarefulClient


@pytest.mark.parametrize("path", ["/fleet/", "/audit/", "/api/v1/pools", "/api/v1/config", "/channels/", "/no/such"])
def test_pages_and_responses_are_not_cached(path, client, operator, replica):
    client.force_login(operator)
    assert client.get(path)["Cache-Control"].replace(" ", "").split(",")[-2:] == ["private", "no-store"]


def test_errors_are_not_cached(operator, replica):
    assert CarefulClient().get("/api/v1/pools")["Cache-Control"] == "private, no-store"
    assert Client().get("/fleet/")["Cache-Control"] == "private, no-store"


def test_static_files_are_cached(db):
    response = Client().get("/static/js/main.js")
    assert b"".join(response.streaming_content)
    assert "no-store" not in response.get("Cache-Control", "")
    response.close()
