"""The contract of the REST API: breaking changes, compatible additions and deprecations."""

import copy
from dataclasses import replace
from datetime import date

import pytest
from django.core.management import CommandError, call_command

from controlplane.api import schema
from controlplane.api.schema import Deprecation
from controlplane.management.commands.api_contract import contract_of, differences
from tests.controlplane.api.test_document import DOCUMENT

ROOT = "/api/v1/"
POOLS, POOL = DOCUMENT["paths"][f"{ROOT}pools"], DOCUMENT["components"]["schemas"]["Pool"]


def changed(*path, to=None):
    """The document with the value at ``path`` replaced, or without it."""
    document = copy.deepcopy(DOCUMENT)
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    if to is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = to
    return document


PATHS, SCHEMAS = ("paths",), ("components", "schemas")
CREATE = (*PATHS, f"{ROOT}pools", "post")
PARAMETER = {"in": "query", "name": "colour", "schema": {"type": "string"}}
BREAKING = {
    "an operation is removed": (changed(*CREATE), "POST /api/v1/pools: removed"),
    "a response field is removed": (changed(*SCHEMAS, "Pool", "properties", "models"), "Pool: models=string[] removed"),
    "a field has another type": (
        changed(*SCHEMAS, "Pool", "properties", "name", to={"type": "integer"}),
        "Pool: name=string removed",
    ),
    "a request field becomes required": (
        changed(*SCHEMAS, "PoolInputRequest", "required", to=["name", "description"]),
        "PoolInputRequest: *description=string added",
    ),
    "a word of an enumeration is removed": (
        changed(*SCHEMAS, "ReplicaState", "enum", to=["active"]),
        'ReplicaState: "draining" removed',
    ),
    "a success status is removed": (
        changed(*CREATE, "responses", "201"),
        "POST /api/v1/pools: 201=CreatedPool removed",
    ),
    "a parameter becomes required": (
        changed(
            *PATHS,
            f"{ROOT}pools",
            "get",
            "parameters",
            to=[*POOLS["get"]["parameters"], {**PARAMETER, "required": True}],
        ),
        "GET /api/v1/pools: *query=colour added",
    ),
}
COMPATIBLE = {
    "an operation is added": changed(*PATHS, f"{ROOT}gadgets", to={"get": {"responses": {"200": {}}}}),
    "a response field is added": changed(*SCHEMAS, "Pool", "properties", to={**POOL["properties"], "colour": {}}),
    "a response field is always present": changed(*SCHEMAS, "Pool", "required", to=[*POOL["properties"]]),
    "a parameter is added": changed(
        *PATHS, f"{ROOT}pools", "get", "parameters", to=[*POOLS["get"]["parameters"], PARAMETER]
    ),
}


@pytest.mark.parametrize("case", BREAKING)
def test_a_change_that_breaks_clients_is_named(case):
    document, line = BREAKING[case]
    breaking, _ = differences(contract_of(DOCUMENT), contract_of(document))
    assert line in breaking


@pytest.mark.parametrize("case", COMPATIBLE)
def test_an_addition_breaks_no_client(case):
    assert differences(contract_of(DOCUMENT), contract_of(COMPATIBLE[case]))[0] == []


def test_the_check_compares_the_committed_contract_with_the_views(tmp_path, settings):
    call_command("api_contract", check=True)
    settings.ROOT = tmp_path
    committed = tmp_path / "controlplane/api/contract.txt"
    committed.parent.mkdir(parents=True)
    call_command("api_contract")
    call_command("api_contract", check=True)

    lines = committed.read_text()
    committed.write_text(lines + "GET /api/v1/gadgets: 200=Gadget\n")
    with pytest.raises(CommandError, match=r"break clients:\nGET /api/v1/gadgets: removed"):
        call_command("api_contract", check=True)
    committed.write_text("".join(line for line in lines.splitlines(keepends=True) if "/pools" not in line))
    with pytest.raises(CommandError, match="GET /api/v1/pools: added") as error:
        call_command("api_contract", check=True)
    assert "break clients" not in str(error.value)


# --- deprecations -----------------------------------------------------------------------------------------

OPERATION = Deprecation(
    "GET /api/v1/pools/{name}",
    replacement="Ask for config.",
    announced_in="0.2",
    removed_in="0.4",
    since=date(2026, 12, 1),
    sunset=date(2027, 6, 1),
)
FIELD = replace(OPERATION, operation="PATCH /api/v1/pools/{name}", field="description", replacement="Use labels.")
PARAMETERS = replace(OPERATION, operation="GET /api/v1/replicas", field="state")
OBJECT = replace(OPERATION, operation="GET /api/v1/revisions/{id}")
HEADERS = {
    "Deprecation": "@1796083200",
    "Sunset": "Tue, 01 Jun 2027 00:00:00 GMT",
    "Link": '</api/v1/openapi.json>; rel="deprecation"; type="application/json"',
}


@pytest.fixture
def deprecated(monkeypatch):
    monkeypatch.setattr(schema, "DEPRECATIONS", (OPERATION, FIELD, PARAMETERS, OBJECT))


@pytest.mark.parametrize(
    ("method", "path", "body", "is_deprecated"),
    [
        ("get", "pools/default", None, True),
        ("get", "pools/absent", None, True),  # errors have the headers too
        ("get", "pools", None, False),
        ("patch", "pools/default", {"description": "H200s"}, True),
        ("patch", "pools/default", {"models": ["m"]}, False),
        ("get", "replicas?state=active", None, True),
        ("get", "replicas", None, False),
        ("get", "revisions/1", None, True),
        ("get", "revisions/compare?from=1&to=2", None, False),
    ],
)
def test_requests_that_use_something_deprecated_get_headers(api, pool, deprecated, method, path, body, is_deprecated):
    response = getattr(api, method)(f"{ROOT}{path}", body)
    assert {name: response[name] for name in HEADERS if response.has_header(name)} == (HEADERS if is_deprecated else {})


def test_the_document_marks_what_is_deprecated(api, deprecated):
    paths = api.get(f"{ROOT}openapi.json").json()["paths"]
    operation = paths[f"{ROOT}pools/{{name}}"]["get"]
    assert operation["deprecated"] is True
    assert operation["description"].endswith("Deprecated since 0.2, removed in 0.4 at the earliest: Ask for config.")
    assert "`description`: deprecated since" in paths[f"{ROOT}pools/{{name}}"]["patch"]["description"]
    parameters = paths[f"{ROOT}replicas"]["get"]["parameters"]
    assert [parameter["name"] for parameter in parameters if parameter.get("deprecated")] == ["state"]
