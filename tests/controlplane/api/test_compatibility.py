"""Which changes of the REST API's document break scripts that were written for the one before."""

import copy
import json

import pytest
from django.core.management import CommandError, call_command

from controlplane.api.compatibility import breaking_changes
from tests.contracts.documents.reading import ROOT

BODY = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 63, "pattern": "^[a-z]+$"},
        "weight": {"type": ["number", "null"], "minimum": 0, "maximum": 10},
        "mode": {"$ref": "#/components/schemas/Mode"},
        "sizes": {"type": "array", "maxItems": 5, "items": {"type": "integer", "maximum": 9}},
        "until": {"type": "string"},
        "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
ANSWER = {
    "type": "object",
    "required": ["name", "size"],
    "properties": {
        "name": {"type": "string", "maxLength": 63},
        "size": {"type": "integer"},
        "mode": {"$ref": "#/components/schemas/Mode"},
        "inner": {"type": "array", "items": {"$ref": "#/components/schemas/Thing"}},
        "etag": {"type": "string"},
    },
}
DOCUMENT = {
    "paths": {
        "/things/{name}": {
            "get": {
                "parameters": [{"in": "query", "name": "limit", "schema": {"type": "integer", "maximum": 1000}}],
                "responses": {
                    "200": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}},
                    "404": {"description": "none"},
                },
                "security": [{"token": []}, {"cookie": []}],
            },
            "patch": {
                "requestBody": {
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ThingRequest"}}}
                },
                "responses": {"200": {}, "202": {}},
            },
        }
    },
    "components": {
        "schemas": {"Thing": ANSWER, "ThingRequest": BODY, "Mode": {"type": "string", "enum": ["fast", "slow"]}}
    },
}
THING = "paths", "/things/{name}"
GET, PATCH, SCHEMAS = (*THING, "get"), (*THING, "patch"), ("components", "schemas")
ASKED, TOLD = (*SCHEMAS, "ThingRequest"), (*SCHEMAS, "Thing")
GONE = object()


def changed(where, value):
    """The document with one place of it changed, or taken away."""
    made = copy.deepcopy(DOCUMENT)
    *way, last = where
    inner = made
    for step in way:
        inner = inner[step]
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    return made


BREAKS = {
    "an address goes": (THING, GONE, "GET /things/{name}: it is gone"),
    "a method goes": (PATCH, GONE, "PATCH /things/{name}: it is gone"),
    "a parameter goes": ((*GET, "parameters"), [], "takes no parameter limit any more"),
    "a parameter is needed": (
        (*GET, "parameters", 0, "required"),
        True,
        "GET /things/{name}: needs the parameter limit",
    ),
    "a parameter takes less": (
        (*GET, "parameters", 0, "schema", "maximum"),
        100,
        "the parameter limit: maximum is 100 now",
    ),
    "a parameter has another type": (
        (*GET, "parameters", 0, "schema"),
        {"type": "boolean"},
        "the parameter limit: takes no integer any more",
    ),
    "a way to sign in goes": ((*GET, "security"), [{"token": []}], "nobody signs in by cookie any more"),
    "an answer goes": ((*PATCH, "responses"), {"200": {}}, "does not answer 202 any more"),
    "another kind of answer": (
        (*GET, "responses", "200", "content"),
        {"text/csv": {}},
        "does not answer application/json any more",
    ),
    "a field of an answer goes": ((*TOLD, "properties", "etag"), GONE, "the answer: etag is gone"),
    "a field may be missing": ((*TOLD, "required"), ["name"], "the answer: size may be missing now"),
    "a field may be null": (
        (*TOLD, "properties", "size", "type"),
        ["integer", "null"],
        "the answer: size: may be null now",
    ),
    "a field has a wider type": ((*TOLD, "properties", "size", "type"), "number", "size: may be number now"),
    "a field is told as another type": ((*TOLD, "properties", "name"), {"type": "array"}, "name: may be array now"),
    "items have another type": (
        (*TOLD, "properties", "inner", "items"),
        {"type": "string"},
        "the answer: inner.[]: may be string now",
    ),
    "a body is needed": ((*PATCH, "requestBody", "required"), True, "PATCH /things/{name}: needs a body"),
    "a body is not taken": ((*PATCH, "requestBody"), GONE, "takes no body any more"),
    "another kind of body": (
        (*PATCH, "requestBody", "content"),
        {"text/csv": {}},
        "takes no application/json any more",
    ),
    "a field is needed": ((*ASKED, "required"), ["name", "weight"], "the body: needs weight"),
    "a field is not taken": ((*ASKED, "properties", "until"), GONE, "the body: takes no until any more"),
    "no null": ((*ASKED, "properties", "weight", "type"), "number", "weight: takes no null any more"),
    "a higher minimum": ((*ASKED, "properties", "weight", "minimum"), 1, "weight: minimum is 1 now"),
    "a lower maximum": ((*ASKED, "properties", "weight", "maximum"), 9, "weight: maximum is 9 now"),
    "no fractions": ((*ASKED, "properties", "weight", "type"), ["integer", "null"], "takes no number any more"),
    "longer at least": ((*ASKED, "properties", "name", "minLength"), 2, "name: minLength is 2 now"),
    "shorter at most": ((*ASKED, "properties", "name", "maxLength"), 62, "name: maxLength is 62 now"),
    "another pattern": ((*ASKED, "properties", "name", "pattern"), "^[a-f]+$", "has to match ^[a-f]+$ now"),
    "a bound where none was": ((*ASKED, "properties", "until", "maxLength"), 5, "until: maxLength is 5 now"),
    "a form where none was": ((*ASKED, "properties", "until", "format"), "date", "until: has to be a date now"),
    "fewer items": ((*ASKED, "properties", "sizes", "maxItems"), 4, "sizes: maxItems is 4 now"),
    "smaller items": ((*ASKED, "properties", "sizes", "items", "maximum"), 8, "sizes.[]: maximum is 8 now"),
    "a word less": ((*SCHEMAS, "Mode", "enum"), ["fast"], "the body: mode: takes no slow any more"),
    "only some words": ((*ASKED, "properties", "until", "enum"), ["now"], "takes no other than ['now'] any more"),
    "a branch less": (
        (*ASKED, "properties", "either"),
        {"type": "string"},
        "either: takes no integer any more",
    ),
    "other values of further fields": (
        (*ASKED, "properties", "labels", "additionalProperties"),
        {"type": "integer"},
        "labels.*: takes no string any more",
    ),
}
HARMLESS = {
    "an address more": (("paths", "/others"), {"get": {"responses": {}}}),
    "a parameter more": ((*GET, "parameters", 0, "schema", "maximum"), 2000),
    "a way to sign in more": ((*GET, "security"), [{"token": []}, {"cookie": []}, {"router": []}]),
    "a refusal less": ((*GET, "responses", "404"), GONE),
    "a field of an answer more": ((*TOLD, "properties", "more"), {"type": "string"}),
    "a field that is always there": ((*TOLD, "required"), ["name", "size", "etag"]),
    "a longer answer": ((*TOLD, "properties", "name", "maxLength"), 100),
    "a word more": ((*SCHEMAS, "Mode", "enum"), ["fast", "slow", "slower"]),
    "a field more": ((*ASKED, "properties", "more"), {"type": "string"}),
    "nothing is needed": ((*ASKED, "required"), []),
    "null too": ((*ASKED, "properties", "name", "type"), ["string", "null"]),
    "wider bounds": ((*ASKED, "properties", "weight", "maximum"), 11),
    "any name": ((*ASKED, "properties", "name", "pattern"), GONE),
    "a branch more": (
        (*ASKED, "properties", "either", "oneOf"),
        [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
    ),
    "said in another way": ((*ASKED, "properties", "either"), {"type": ["integer", "string"]}),
    "by a component": ((*ASKED, "properties", "mode"), {"allOf": [{"$ref": "#/components/schemas/Mode"}]}),
    "words are described": ((*ASKED, "description"), "another text"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_what_breaks_scripts_is_named_with_its_place(case):
    where, value, said = BREAKS[case]
    found = breaking_changes(DOCUMENT, changed(where, value))
    assert any(said in line for line in found), found


@pytest.mark.parametrize("case", HARMLESS)
def test_what_breaks_none_is_passed_over(case):
    assert breaking_changes(DOCUMENT, changed(*HARMLESS[case])) == []


def test_the_committed_document_is_compatible_with_itself_and_without_an_address_is_not():
    committed = json.loads((ROOT / "controlplane/api/openapi.json").read_text())
    assert breaking_changes(committed, committed) == []
    without = copy.deepcopy(committed)
    del without["paths"]["/api/v1/tokens"]
    assert breaking_changes(committed, without) == [
        "GET /api/v1/tokens: it is gone",
        "POST /api/v1/tokens: it is gone",
    ]


@pytest.fixture
def elsewhere(tmp_path, settings):
    """A folder with the document as it was, when there was one address more, and a changelog."""
    settings.ROOT = tmp_path
    committed = json.loads((ROOT / "controlplane/api/openapi.json").read_text())
    committed["paths"]["/api/v1/gadgets/{name}"] = {"get": {"responses": {"200": {}}}}
    folder = tmp_path / "controlplane/api"
    folder.mkdir(parents=True)
    (folder / "openapi.json").write_text(json.dumps(committed))
    (tmp_path / "CHANGELOG.md").write_text(
        "## 0.2.0 (unreleased)\n\n- Gadgets are gone.\n\n## 0.1.0\n\n- Migration: `gadgets`\n"
    )
    return tmp_path


def test_a_break_is_written_down_only_where_one_says_so_and_operators_are_told(elsewhere):
    written = elsewhere / "controlplane/api/openapi.json"
    with pytest.raises(CommandError, match=r"GET /api/v1/gadgets/\{name\}: it is gone"):
        call_command("write_openapi")
    with pytest.raises(CommandError, match="no migration note that names `gadgets`"):
        call_command("write_openapi", breaking=True)
    assert "gadgets" in written.read_text()
    changes = "## 0.2.0 (unreleased)\n\n- No gadgets. Migration: nobody\n  asks for `gadgets/NAME` any more.\n"
    (elsewhere / "CHANGELOG.md").write_text(changes)
    call_command("write_openapi", breaking=True)
    assert written.read_text() == (ROOT / "controlplane/api/openapi.json").read_text()
    call_command("write_openapi")  # nothing breaks any more


def test_it_is_compared_without_being_written(elsewhere):
    written = elsewhere / "controlplane/api/openapi.json"
    with pytest.raises(CommandError, match="Scripts would break"):
        call_command("write_openapi", check=True)
    written.write_text((ROOT / "controlplane/api/openapi.json").read_text())
    call_command("write_openapi", check=True)
    others = json.loads(written.read_text())
    del others["paths"]["/api/v1/pools"]
    written.write_text(json.dumps(others))
    with pytest.raises(CommandError, match="is not what the views say"):
        call_command("write_openapi", check=True)
    assert json.loads(written.read_text()) == others
