"""Fields that hold a part of the routers' schema: their rules are the schema's, and so is their documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from drf_spectacular.plumbing import ResolvedComponent
from rest_framework import serializers

from controlplane.schema_fields import json_schemas


class SchemaField(serializers.JSONField):
    """JSON of a type of ``routing.schema``. The services check it, so that pages and REST refuse in the same words."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.kind, self.options = kind, options
        super().__init__(**options)

    def __deepcopy__(self, memo: Mapping[Any, Any]) -> Self:
        """As DRF copies a field, without the type: that is not to be copied, and never changes."""
        return type(self)(self.kind, **self.options)


class SchemaFieldScheme(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]  # registers itself, untyped
    """The JSON schema that msgspec makes of the type, its structs as components."""

    target_class = SchemaField

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:  # noqa: ARG002 - spectacular's
        """What the document says of the field."""
        (shown,), components = json_schemas([self.target.kind], "#/components/schemas/{name}")
        for name, body in components.items():
            kind = ResolvedComponent.SCHEMA
            found = ResolvedComponent(name, kind, body, name)  # type: ignore[no-untyped-call]  # spectacular's
            auto_schema.registry.register_on_missing(found)
        return shown
