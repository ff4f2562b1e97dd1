"""What may be kept of an answer, and by whom."""

import pytest
from django.test import Client

from tests.rest_client import CarefulClient


@pytest.mark.parametrize("path", ["/fleet/", "/audit/", "/api/v1/pools", "/api/v1/config", "/channels/", "/no/such"])
def test_what_a_person_may_see_is_kept_nowhere(path, client, operator, replica):
    client.force_login(operator)
    assert client.get(path)["Cache-Control"].replace(" ", "").split(",")[-2:] == ["private", "no-store"]


def test_neither_is_what_a_token_may_see_nor_a_refusal(operator, replica):
    assert CarefulClient().get("/api/v1/pools")["Cache-Control"] == "private, no-store"
    assert Client().get("/fleet/")["Cache-Control"] == "private, no-store"


def test_static_files_say_for_themselves_how_long_they_keep(db):
    answer = Client().get("/static/js/main.js")
    assert b"".join(answer.streaming_content)
    assert "no-store" not in answer.get("Cache-Control", "")
    answer.close()
