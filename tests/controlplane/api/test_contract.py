"""The contract of the REST API: breaking changes and compatible additions."""

import copy

import pytest
from django.core.management import CommandError, call_command

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
