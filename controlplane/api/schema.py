"""The OpenAPI document: entity tags, dry runs and errors of every operation.

drf-spectacular derives the rest from the views. What is added here is read from the views' own attributes, so the
document cannot disagree with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema

from controlplane.api.auth import RouterAuthentication, TokenAuthentication
from controlplane.api.exceptions import CONTENT_TYPE, NOT_FOUND, PROBLEM_TYPES, URN

# --- authentication ---------------------------------------------------------------------------------------


class TokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # registers itself, untyped
    target_class: Any = TokenAuthentication
    name = "token"
    bearer_format: Mapping[str, str] = {"bearerFormat": "wp_<id>.<secret>"}

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:  # noqa: ARG002 - spectacular's signature
        return {"type": "http", "scheme": "bearer", **self.bearer_format}


class RouterScheme(TokenScheme):  # type: ignore[no-untyped-call]  # as above
    target_class = RouterAuthentication
    name = "router"
    bearer_format: Mapping[str, str] = {}


# --- operations -------------------------------------------------------------------------------------------

# What the problem types mean, by status.
_MEANINGS: Mapping[int, str] = {
    400: "The body is not JSON, or a header is malformed.",
    401: "No token or session, or an expired one.",
    403: "The role or the token's scope does not suffice.",
    404: NOT_FOUND,
    406: "The only media type is JSON.",
    409: "The request does not fit the present state; GET the object again.",
    411: "The body needs a Content-Length.",
    412: "If-Match names another version than the present one, which `current` shows. Nothing was changed.",
    413: "The body is too large.",
    415: "Send JSON.",
    422: "`errors` says what is invalid and where.",
    428: "If-Match is missing.",
    429: "Wait for Retry-After seconds.",
    500: "An internal error; the log names `request_id`.",
    503: "The database is unavailable, or too many clients wait for events; nothing was changed.",
}
_COMMON_ERRORS = (401, 403, 406, 429, 500, 503)
_TEXT = {"type": "string"}
_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_DIFFERENCES = {"type": "array", "items": {"$ref": "#/components/schemas/Difference"}}
_ETAG = {"description": "The version of the object in the URL, or of the one above it.", "schema": _TEXT}
_LOCATION = {"description": "The URL of the new object.", "schema": _TEXT}
_IF_MATCH = {
    "in": "header",
    "name": "If-Match",
    "description": "The `etag` of the object as you read it, or `*`.",
    "schema": _TEXT,
}
_IDEMPOTENCY_KEY = {
    "in": "header",
    "name": "Idempotency-Key",
    "description": "For 24 hours the same request gets the same response and does nothing more.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}
_DRY_RUN = {
    "in": "query",
    "name": "dry_run",
    "description": "Validate and describe the change without committing it.",
    "schema": {"type": "boolean", "default": False},
}


class OperationSchema(AutoSchema):
    """drf-spectacular's, with conditional requests, dry runs, idempotency keys and error responses."""

    view: Any

    def get_description(self) -> str:  # type: ignore[override]  # as drf-spectacular does
        descriptions: Mapping[str, str] = getattr(self.view, "descriptions", {})
        return descriptions.get(getattr(self.view, "action", "")) or super().get_description()

    def get_request_serializer(self) -> Any:
        attribute = {"create": "create_input", "partial_update": "change_input"}.get(getattr(self.view, "action", ""))
        return getattr(self.view, attribute or "", None) or super().get_request_serializer()

    def get_response_serializers(self) -> Any:
        is_create = getattr(self.view, "action", "") == "create"
        return (is_create and getattr(self.view, "created_serializer", None)) or super().get_response_serializers()

    def get_operation(
        self, path: str, path_regex: str, path_prefix: str, method: str, registry: Any
    ) -> dict[str, Any] | None:
        operation: dict[str, Any] | None = super().get_operation(path, path_regex, path_prefix, method, registry)
        if operation is None:
            return None
        if parameters := [*operation.get("parameters", []), *self._own_parameters(method)]:
            operation["parameters"] = sorted(parameters, key=lambda item: (item["in"] != "path", item["name"]))
        responses = operation["responses"]
        for status, response in responses.items():
            if status == "201":
                response["headers"] = {"Location": _LOCATION}
            if status.startswith("2") and self._has_etag(method):
                response.setdefault("headers", {})["ETag"] = _ETAG
        if method != "GET":
            _add_dry_run(responses)
        for status in self._error_statuses(operation, path, method):
            responses.setdefault(str(status), {"$ref": f"#/components/responses/{_component(status)}"})
        operation["responses"] = dict(sorted(responses.items()))
        return operation

    def _has_etag(self, method: str) -> bool:
        """Whether successful responses have an entity tag."""
        return getattr(self.view, "has_versions", False) and (
            method != "GET" or self.view.action in {"retrieve", "config"}
        )

    def _takes_if_match(self, method: str) -> bool:
        return self._has_etag(method) and self.view.detail and method != "GET"

    def _needs_if_match(self, method: str) -> bool:
        if not self._takes_if_match(method):
            return False
        return method != "POST" or self.view.action in self.view.conditional_actions

    def _own_parameters(self, method: str) -> Iterator[dict[str, Any]]:
        if method != "GET":
            yield _DRY_RUN
        if method == "POST" and not any("router" in scheme for scheme in self.get_auth()):
            yield _IDEMPOTENCY_KEY
        if self._takes_if_match(method):
            yield _IF_MATCH | {"required": self._needs_if_match(method)}

    def _error_statuses(self, operation: dict[str, Any], path: str, method: str) -> list[int]:
        is_change = method != "GET"
        return [
            *_COMMON_ERRORS,
            *([404] if "{" in path else []),
            *([422] if operation.get("parameters") else []),
            *([400, 409, 422] if is_change else []),
            *([411, 413, 415] if "requestBody" in operation else []),
            *([412] if self._takes_if_match(method) else []),
            *([428] if self._needs_if_match(method) else []),
        ]


def _add_dry_run(responses: dict[str, Any]) -> None:
    """A dry run responds with 200, whatever the status of the change."""
    plan = {"$ref": "#/components/schemas/DryRun"}
    response = responses.setdefault("200", {"description": "With `dry_run`: what would happen."})
    content = response.setdefault("content", {}).setdefault("application/json", {})
    content["schema"] = {"anyOf": [content["schema"], plan]} if "schema" in content else plan


def _component(status: int) -> str:
    """The name of an error response among the document's components."""
    return "".join(part.title() for part in PROBLEM_TYPES[status].split("-"))


def _error_response(status: int) -> dict[str, Any]:
    example = {
        "type": URN + PROBLEM_TYPES[status],
        "title": PROBLEM_TYPES[status].replace("-", " ").capitalize(),
        "status": status,
        "detail": _MEANINGS[status],
        "request_id": "5f0c2d9a7b3e4c1d8a6f0b2e",
    }
    response: dict[str, Any] = {
        "description": _MEANINGS[status],
        "content": {CONTENT_TYPE: {"schema": _PROBLEM, "example": example}},
    }
    if status in {429, 503}:
        response["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return response


# --- the document -----------------------------------------------------------------------------------------


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties}


_SCHEMAS: Mapping[str, Any] = {
    "Problem": _object(
        "type title status detail request_id",
        type=_TEXT,
        title=_TEXT,
        status={"type": "integer"},
        detail=_TEXT,
        request_id={"type": ["string", "null"]},
        etag={**_TEXT, "description": "Of 412: the present version."},
        current={"description": "Of 412: the object as it is now."},
        changes={**_DIFFERENCES, "description": "Of 412: what your request would change."},
        errors={"type": "array", "items": _object("pointer detail", pointer=_TEXT, detail=_TEXT)},
    ),
    "Difference": _object("pointer before after", pointer=_TEXT, before={}, after={}),
    "DryRun": _object(
        "dry_run status result changes effect",
        dry_run={"type": "boolean", "const": True},
        status={"type": "integer", "description": "The status of the change itself."},
        result={"description": "The response of the change itself."},
        changes=_DIFFERENCES,
        effect=_object(
            "configuration events",
            configuration={
                "type": ["object", "null"],
                "description": "Null where routers would see no change.",
                "properties": {
                    "before": {"type": ["integer", "null"]},
                    "after": {"type": "integer"},
                    "changes": _DIFFERENCES,
                },
            },
            events={"type": "array", "items": {"type": "object", "properties": {"kind": _TEXT, "summary": _TEXT}}},
        ),
    ),
}
# Bodies of routers, which may be newer and send more fields.
_OPEN_BODIES = frozenset({"AnnounceInputRequest", "SignatureRequest"})


def complete(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """drf-spectacular's post-processing hook: adds error responses and dry runs."""
    components = result.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas.update(_SCHEMAS)
    components["responses"] = {_component(status): _error_response(status) for status in _MEANINGS}
    default = {"description": "Rejected or failed: see its status.", "content": {CONTENT_TYPE: {"schema": _PROBLEM}}}
    for operations in result["paths"].values():
        for operation in operations.values():
            operation["responses"].setdefault("default", default)
    for name, schema in schemas.items():
        for field, value in schema.get("properties", {}).items():
            if {} in value.get("oneOf", ()):  # any value, null too, which oneOf would forbid
                schema["properties"][field] = {}
        if name.endswith("Request") and name not in _OPEN_BODIES:  # unknown fields are rejected
            schema["additionalProperties"] = False
    return result
