"""What will go is announced to whoever calls it, and in the document."""

from dataclasses import replace
from datetime import date

import pytest

from controlplane.api import deprecations
from controlplane.api.deprecations import DEPRECATIONS, Deprecation
from controlplane.api.schema import document

ROOT = "/api/v1/"
OPERATION = Deprecation(
    "GET /api/v1/pools/{name}",
    instead="Ask for config.",
    announced_in="0.2",
    removed_in="0.4",
    since=date(2026, 12, 1),
    sunset=date(2027, 6, 1),
)
FIELD = replace(OPERATION, operation="PATCH /api/v1/pools/{name}", field="description", instead="Use labels.")
PARAMETER = replace(OPERATION, operation="GET /api/v1/replicas", field="state")
HEADERS = {
    "Deprecation": "@1796083200",
    "Sunset": "Tue, 01 Jun 2027 00:00:00 GMT",
    "Link": '</api/v1/openapi.json>; rel="deprecation"; type="application/json"',
}


@pytest.fixture
def announced(monkeypatch):
    """An operation, a field and a parameter that will go."""
    monkeypatch.setattr(deprecations, "DEPRECATIONS", (OPERATION, FIELD, PARAMETER))


def headers(answer):
    return {name: answer[name] for name in HEADERS if answer.has_header(name)}


def test_whoever_calls_or_sends_what_will_go_is_told(api, pool, announced):
    assert headers(api.get(f"{ROOT}pools/default")) == HEADERS
    assert headers(api.get(f"{ROOT}pools/absent")) == HEADERS, "refusals tell too"
    assert headers(api.get(f"{ROOT}pools")) == {}
    assert headers(api.get(f"{ROOT}rollouts/1")) == {}

    assert headers(api.patch(f"{ROOT}pools/default", {"description": "H200s"})) == HEADERS
    assert headers(api.patch(f"{ROOT}pools/default", {"models": ["m"]})) == {}
    assert headers(api.get(f"{ROOT}replicas?state=active")) == HEADERS
    assert headers(api.get(f"{ROOT}replicas")) == {}


def test_an_address_is_not_taken_for_an_object_of_that_name(api, db, monkeypatch):
    monkeypatch.setattr(deprecations, "DEPRECATIONS", (replace(OPERATION, operation="GET /api/v1/revisions/{id}"),))
    assert headers(api.get(f"{ROOT}revisions/compare?from=1&to=2")) == {}
    assert headers(api.get(f"{ROOT}revisions/1")) == HEADERS


def test_the_document_says_so_where_it_stands(announced):
    made = document()
    operation = made["paths"]["/api/v1/pools/{name}"]["get"]
    assert operation["deprecated"] is True
    assert operation["description"].endswith("Deprecated since 0.2, gone in 0.4 at the earliest: Ask for config.")
    assert {"Deprecation", "Sunset", "Link", "ETag"} <= set(operation["responses"]["200"]["headers"])
    components = made["components"]["schemas"]
    assert components["PatchedPoolChangeRequest"]["properties"]["description"]["deprecated"] is True
    assert components["Pool"]["properties"]["description"]["deprecated"] is True
    assert "deprecated" not in components["Pool"]["properties"]["models"]
    parameters = made["paths"]["/api/v1/replicas"]["get"]["parameters"]
    assert [one["name"] for one in parameters if one.get("deprecated")] == ["state"]


def test_what_is_announced_exists(monkeypatch):
    for absent in (replace(OPERATION, operation="GET /api/v1/gadgets"), replace(FIELD, field="gadgets")):
        monkeypatch.setattr(deprecations, "DEPRECATIONS", (absent,))
        with pytest.raises(KeyError, match="gadgets"):
            document()


@pytest.mark.parametrize(
    ("announced_in", "removed_in", "days"),
    [("0.2", "0.3", 90), ("0.2", "0.2", 90), ("1.0", "0.9", 90), ("0.2", "0.4", 0)],
)
def test_nothing_goes_sooner_than_two_minor_releases_after_its_announcement(announced_in, removed_in, days):
    since = date(2026, 12, 1)
    sunset = date.fromordinal(since.toordinal() + days)
    with pytest.raises(ValueError, match="announce"):
        replace(OPERATION, announced_in=announced_in, removed_in=removed_in, since=since, sunset=sunset)
    assert replace(OPERATION, announced_in="0.9", removed_in="1.0").removed_in == "1.0"
    assert all(isinstance(one, Deprecation) for one in DEPRECATIONS)
