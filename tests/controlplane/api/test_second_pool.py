"""Warnings for clients that name no model when a second pool is created."""

import pytest

from controlplane.services.fleet.pools import create_pool, update_pool

pytestmark = pytest.mark.django_db
REFUSED = "Requests that name no model are rejected"


def added(api, **body):
    response = api.post("/api/v1/pools", {"name": "second"} | body, format="json")
    assert response.status_code == 201, response.content
    return " ".join(response.data["warnings"])


def test_the_first_pool_has_no_warning(api):
    assert added(api, models=["a"]) == ""


def test_a_second_pool_warns_that_requests_without_a_model_are_refused(api, pool):
    update_pool(pool, models=["a"])
    assert REFUSED in added(api, models=["b"])


def test_a_second_pool_that_takes_any_model_warns_that_they_go_there(api, pool):
    update_pool(pool, models=["a"])
    assert "go to pool second" in added(api)


def test_with_a_pool_that_takes_any_model_there_is_no_warning(api, pool):
    assert added(api, models=["b"]) == ""


def test_a_third_pool_warns_no_more(api, pool):
    update_pool(pool, models=["a"])
    create_pool("other", models=["c"])
    assert added(api, models=["b"]) == ""


def test_the_page_warns_too(client, operator, pool):
    update_pool(pool, models=["a"])
    client.force_login(operator)
    form = client.get("/fleet/pools/new/")
    sent = {"name": "second", "models": "b", "project": pool.project_id}
    page = client.post("/fleet/pools/new/", sent, follow=True)
    assert form.status_code == 200
    assert REFUSED in page.text
