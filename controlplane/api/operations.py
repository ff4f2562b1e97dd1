"""What the OpenAPI document says of every operation: versions, rehearsals, repeats and refusals.

Read from the views' own attributes (``viewsets/fields.py``), so that the document cannot say anything else.
"""

from __future__ import annotations

from typing import Any

from drf_spectacular.openapi import AutoSchema

PROBLEM_JSON = "application/problem+json"
# A status, the word that its problem's ``type`` ends with, and what it means.
REFUSALS: dict[str, tuple[str, str]] = {
    "400": ("malformed", "This is no JSON, or a header is not of its form."),
    "401": ("unauthenticated", "No token or session, or one that ended."),
    "403": ("forbidden", "The role or the token's scope does not suffice."),
    "404": ("not-found", "There is no such thing, or it is not for you to see."),
    "406": ("not-acceptable", "Only JSON can be answered."),
    "409": ("conflict", "It does not fit the present state; look again."),
    "411": ("length-required", "The body needs a Content-Length."),
    "412": ("changed-meanwhile", "Another version than the one in If-Match; `current` shows it. Nothing was changed."),
    "413": ("too-large", "The body is too large."),
    "415": ("unsupported-media-type", "Send JSON."),
    "422": ("invalid", "`errors` says what is wrong where."),
    "428": ("precondition-required", "If-Match is missing."),
    "429": ("too-many-requests", "Wait for Retry-After seconds."),
    "500": ("failed", "A mistake of ours; the log names `request_id`."),
    "503": ("database-away", "The database is away, or all seats for waiting are taken; nothing was changed."),
}
_ALWAYS = ("401", "403", "406", "429", "500", "503")
_HEADER: dict[str, Any] = {"in": "header", "schema": {"type": "string"}}
IF_MATCH: dict[str, Any] = {
    **_HEADER,
    "name": "If-Match",
    "description": "The `etag` of the object that you looked at, or `*`.",
}
IF_NONE_MATCH = {**_HEADER, "name": "If-None-Match", "description": "The `etag` that you have: 304 if it is the same."}
IDEMPOTENCY_KEY = {
    "in": "header",
    "name": "Idempotency-Key",
    "description": "For 24 hours the same request gets the same answer and does nothing more.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}
DRY_RUN = {
    "in": "query",
    "name": "dry_run",
    "description": "Do all of it, say what came of it, and undo it.",
    "schema": {"type": "boolean", "default": False},
}
ETAG = {
    "description": "The version of the object that the address, or the one above it, names.",
    "schema": {"type": "string"},
}
LOCATION = {"description": "Where it is found.", "schema": {"type": "string"}}


class OperationSchema(AutoSchema):
    """Spectacular's, and what holds for every exchange."""

    def get_operation(
        self, path: str, path_regex: str, path_prefix: str, method: str, registry: Any
    ) -> dict[str, Any] | None:
        """The operation with its headers, its rehearsal and its refusals."""
        operation: dict[str, Any] | None = super().get_operation(path, path_regex, path_prefix, method, registry)
        if operation is None:
            return None
        parameters = [*operation.get("parameters", []), *self._parameters(method)]
        if parameters:
            operation["parameters"] = sorted(parameters, key=lambda one: (one["in"] != "path", one["name"]))
        self._say_versions(operation, method)
        if method != "GET":
            _say_rehearsal(operation)
        for status in self._refusals(operation, path, method):
            operation["responses"].setdefault(status, {"$ref": f"#/components/responses/{component(status)}"})
        operation["responses"] = dict(sorted(operation["responses"].items()))
        return operation

    def _parameters(self, method: str) -> list[dict[str, Any]]:
        if method == "GET":
            return [IF_NONE_MATCH] if self._is_door() else []
        given = [DRY_RUN]
        if method == "POST" and self._signs_in():
            given.append(IDEMPOTENCY_KEY)
        if self._is_door() and self._door().detail:
            given.append(IF_MATCH | {"required": self._needs_version(method)})
        return given

    def _say_versions(self, operation: dict[str, Any], method: str) -> None:
        """``ETag`` and ``Location`` of what succeeds."""
        if not self._is_door():
            return
        for status, answer in operation["responses"].items():
            if status.startswith("2") and "text/event-stream" not in answer.get("content", {}):
                answer["headers"] = {"ETag": ETAG, **({"Location": LOCATION} if status == "201" else {})}
        if method == "GET":
            operation["responses"]["304"] = {
                "description": "It is the version that you have.",
                "headers": {"ETag": ETAG},
            }

    def _refusals(self, operation: dict[str, Any], path: str, method: str) -> list[str]:
        found = list(_ALWAYS)
        if "{" in path:
            found.append("404")
        if operation.get("parameters"):
            found.append("422")
        if method != "GET":
            found += ["400", "409", "422"]
        if "requestBody" in operation:
            found += ["411", "413", "415"]
        if self._is_door() and method != "GET" and self._door().detail:
            found += ["412", "428"] if self._needs_version(method) else ["412"]
        return found

    def _needs_version(self, method: str) -> bool:
        return method != "POST" or self._door().action in self._door().conditional_actions

    def _door(self) -> Any:
        """The view; a BaseViewSet, which this module cannot name without going round in a circle."""
        return self.view

    def _is_door(self) -> bool:
        return hasattr(self.view, "conditional_actions")

    def _signs_in(self) -> bool:
        return "router" not in {name for scheme in self.get_auth() for name in scheme}


def component(status: str) -> str:
    """The name under which a refusal stands among the document's components."""
    return "".join(part.title() for part in REFUSALS[status][0].split("-"))


def refusal_components() -> dict[str, Any]:
    """Every refusal, as the document's ``components.responses``."""
    return {component(status): _refusal(status) for status in REFUSALS}


def _refusal(status: str) -> dict[str, Any]:
    word, meaning = REFUSALS[status]
    example = {
        "type": f"urn:warmpath:problem:{word}",
        "title": word.replace("-", " ").capitalize(),
        "status": int(status),
        "detail": meaning,
        "request_id": "5f0c2d9a7b3e4c1d8a6f0b2e",
    }
    schema = {"$ref": "#/components/schemas/Problem"}
    answer: dict[str, Any] = {
        "description": meaning,
        "content": {PROBLEM_JSON: {"schema": schema, "example": example}},
    }
    if status in {"429", "503"}:
        answer["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return answer


def _say_rehearsal(operation: dict[str, Any]) -> None:
    """A dry run answers 200, whatever the change itself answers."""
    plan = {"$ref": "#/components/schemas/DryRun"}
    done = operation["responses"].setdefault("200", {"description": "With `dry_run`: what would be."})
    content = done.setdefault("content", {}).setdefault("application/json", {})
    content["schema"] = {"anyOf": [content["schema"], plan]} if "schema" in content else plan
