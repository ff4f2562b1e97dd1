"""Other objects that a body names.

Fields that hold a part of the routers' schema: their rules are the schema's, and so is their documentation.

What serializers share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from django.db.models import Manager, Model, QuerySet
from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from drf_spectacular.plumbing import ResolvedComponent
from rest_framework import serializers
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request

from controlplane.access.actor import project_id_of, visible
from controlplane.api.permissions import actor, role_needed
from controlplane.schema_fields import json_schemas


class ByName(serializers.SlugRelatedField[Any]):
    """An object by its name: one that the actor cannot see does not exist, one they may not touch is refused."""

    def __init__(self, **options: Any) -> None:
        super().__init__(slug_field="name", **options)

    def get_queryset(self) -> QuerySet[Any]:
        """The objects that may be named."""
        return narrowed(self, self.queryset)

    def to_internal_value(self, data: Any) -> Any:
        """The object; a ValidationError or PermissionDenied."""
        return allowed(self, super().to_internal_value(data))


class ById(serializers.PrimaryKeyRelatedField[Any]):
    """The same by its number."""

    def get_queryset(self) -> QuerySet[Any]:
        """The objects that may be named."""
        return narrowed(self, self.queryset)

    def to_internal_value(self, data: Any) -> Any:
        """The object; a ValidationError or PermissionDenied."""
        return allowed(self, super().to_internal_value(data))


def narrowed(field: serializers.Field[Any, Any, Any, Any], rows: QuerySet[Any] | Manager[Any] | None) -> QuerySet[Any]:
    """What the actor may know of; everything while the OpenAPI document is made."""
    if rows is None:
        raise TypeError("a field that is given needs a queryset")
    rows, request = rows.all(), field.context.get("request")
    return rows if request is None else visible(actor(request), rows)


def allowed(field: serializers.Field[Any, Any, Any, Any], row: Model) -> Model:
    """The row, if the role that this address needs is held in its project."""
    request: Request | None = field.context.get("request")
    if request is not None:
        check_allowed(request, row)
    return row


def check_allowed(request: Request, row: Model) -> None:
    """PermissionDenied unless the role that this address needs is held in the row's project."""
    needed = role_needed(request)
    if needed is None or not actor(request).may(needed, project_id_of(row)):
        raise PermissionDenied


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


def by_username(source: str) -> serializers.CharField:
    """A person, shown by the name they sign in with; null where the system acted by itself."""
    return serializers.CharField(source=f"{source}.username", default=None, read_only=True, allow_null=True)
