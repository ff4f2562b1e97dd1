"""A field for the settings of one of several kinds: each kind's own struct is its documentation."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from drf_spectacular.plumbing import ResolvedComponent
from rest_framework import serializers

from controlplane.schema_fields import json_schemas
from telemetry.alerts.kinds import KINDS


class RuleSettingsField(serializers.DictField):
    """Settings of a rule; the service checks them by the rule's kind."""


class RuleSettingsScheme(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]  # registers itself, untyped
    """Any of the kinds' structs, as components."""

    target_class = RuleSettingsField

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:  # noqa: ARG002 - spectacular's
        """What the document says of the field."""
        kinds = [kind.settings for kind in KINDS.values()]
        shown, components = json_schemas(kinds, "#/components/schemas/{name}")
        for name, body in components.items():
            found = ResolvedComponent(name, ResolvedComponent.SCHEMA, body, name)  # type: ignore[no-untyped-call]  # as above
            auto_schema.registry.register_on_missing(found)
        return {"anyOf": list(shown), "description": "Of the rule's kind; what is left out takes its default."}
