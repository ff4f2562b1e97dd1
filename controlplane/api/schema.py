"""The OpenAPI document."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.views import SpectacularJSONAPIView

from .authentication import RouterAuthentication, TokenAuthentication
from .exceptions import CONTENT_TYPE
from .exchange import Exchange
from .permissions import HasRole

PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "request_id"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "request_id": {"type": ["string", "null"]},
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


def add_problems(result: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Say of every operation that it may answer with a problem document."""
    result.setdefault("components", {}).setdefault("schemas", {})["Problem"] = PROBLEM
    answer = {"description": "Refused, or failed: see its status.", "content": {CONTENT_TYPE: {"schema": _reference()}}}
    for operations in result["paths"].values():
        for operation in operations.values():
            operation["responses"].setdefault("default", answer)
    return result


class SchemaView(Exchange, SpectacularJSONAPIView):
    """``/api/v1/openapi.json``."""

    permission_classes = (HasRole,)
    custom_settings = {  # noqa: RUF012 - spectacular's attribute
        "POSTPROCESSING_HOOKS": ["drf_spectacular.hooks.postprocess_schema_enums", f"{__name__}.add_problems"]
    }


def _reference() -> dict[str, str]:
    return {"$ref": "#/components/schemas/Problem"}
