"""The OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.views import SpectacularJSONAPIView

from controlplane.api.authentication import RouterAuthentication, TokenAuthentication
from controlplane.api.deprecations import mark
from controlplane.api.middleware import Exchange
from controlplane.api.operations import PROBLEM_JSON, refusal_components
from controlplane.api.permissions import HasRole

PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "request_id"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "request_id": {"type": ["string", "null"]},
        "etag": {"type": "string", "description": "Of 412: the present version."},
        "current": {"description": "Of 412: the object as it is now."},
        "meanwhile": {
            "type": ["array", "null"],
            "items": {"$ref": "#/components/schemas/Difference"},
            "description": "Of 412: what others changed since the version in If-Match; null where that is not known.",
        },
        "changes": {
            "type": "array",
            "description": "Of 412: what yours would change of it.",
            "items": {"$ref": "#/components/schemas/Difference"},
        },
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["pointer", "detail"],
                "properties": {"pointer": {"type": "string"}, "detail": {"type": "string"}},
            },
        },
    },
}


class TokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # registers itself, untyped
    """Scripts' tokens."""

    target_class = TokenAuthentication
    name = "token"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:  # noqa: ARG002 - spectacular's signature
        """A bearer token."""
        return {"type": "http", "scheme": "bearer", "bearerFormat": "wp_<id>.<secret>"}


class RouterScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # registers itself, untyped
    """The routers' token."""

    target_class = RouterAuthentication
    name = "router"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:  # noqa: ARG002 - spectacular's signature
        """A bearer token."""
        return {"type": "http", "scheme": "bearer"}


DRY_RUN = {
    "type": "object",
    "required": ["dry_run", "status", "result", "changes", "effect"],
    "properties": {
        "dry_run": {"type": "boolean", "const": True},
        "status": {"type": "integer", "description": "What would have been answered with."},
        "result": {"description": "What would have been answered."},
        "changes": {"type": "array", "items": {"$ref": "#/components/schemas/Difference"}},
        "effect": {
            "type": "object",
            "required": ["configuration", "events"],
            "properties": {
                "configuration": {
                    "type": ["object", "null"],
                    "description": "Null where routers would notice nothing.",
                    "properties": {
                        "before": {"type": ["integer", "null"]},
                        "after": {"type": "integer"},
                        "changes": {"type": "array", "items": {"$ref": "#/components/schemas/Difference"}},
                    },
                },
                "events": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"kind": {"type": "string"}, "summary": {"type": "string"}},
                    },
                },
            },
        },
    },
}
DIFFERENCE = {
    "type": "object",
    "required": ["pointer", "before", "after"],
    "properties": {"pointer": {"type": "string"}, "before": {}, "after": {}},
}
ETAG = {"type": "string", "readOnly": True, "description": "Which version this is: for If-Match."}


# Bodies of routers, which may be newer and say more.
HEARD = frozenset({"AnnounceInputRequest", "SignatureRequest"})


def complete(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """What holds for the whole document: problems, plans of rehearsals, and the ``etag`` of every object."""
    components = result.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas.update(Problem=PROBLEM, DryRun=DRY_RUN, Difference=DIFFERENCE)
    components["responses"] = refusal_components()
    refused = {
        "description": "Refused, or failed: see its status.",
        "content": {PROBLEM_JSON: {"schema": _reference()}},
    }
    for path, operations in result["paths"].items():
        for method, operation in operations.items():
            operation["responses"].setdefault("default", refused)
            shows = "201" if method == "post" else "200" if method == "get" and path.endswith("}") else ""
            for name in _named(operation["responses"].get(shows, {})):
                schemas[name]["properties"]["etag"] = ETAG
    for name, schema in schemas.items():
        for field, value in schema.get("properties", {}).items():
            if {} in value.get("oneOf", ()):  # anything, null too, which oneOf would forbid
                schema["properties"][field] = {}
        if name.endswith("Request") and name not in HEARD:  # a body; what nobody knows is refused
            schema["additionalProperties"] = False
    mark(result)
    return result


def _named(answer: dict[str, Any]) -> Iterator[str]:
    """The components that an answer with an entity tag shows."""
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    for one in (schema, *schema.get("anyOf", ())) if "ETag" in answer.get("headers", {}) else ():
        if "$ref" in one:
            yield one["$ref"].rpartition("/")[2]


class SchemaView(Exchange, SpectacularJSONAPIView):
    """``/api/v1/openapi.json``."""

    permission_classes = (HasRole,)


def document() -> dict[str, Any]:
    """The whole document, as it is committed."""
    generator: Any = SchemaGenerator()  # type: ignore[no-untyped-call]  # spectacular's is untyped
    made: dict[str, Any] = generator.get_schema(request=None, public=True)
    return made


def _reference() -> dict[str, str]:
    return {"$ref": "#/components/schemas/Problem"}
