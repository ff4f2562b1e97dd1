"""Serializer fields: other objects named in a body, parts of the routers' schema, usernames and entity tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

import msgspec
from django.db.models import Manager, Model, QuerySet
from drf_spectacular.extensions import OpenApiSerializerExtension, OpenApiSerializerFieldExtension
from drf_spectacular.plumbing import ResolvedComponent
from rest_framework import serializers
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request

from controlplane.access.actor import project_id_of, visible
from controlplane.api.auth import actor, denial_text, needed_role_of
from controlplane.schema_fields import json_schemas

Row = TypeVar("Row", bound=Model)


class VersionedSerializer(serializers.ModelSerializer[Row]):
    """Shows a row that users edit, with its entity tag."""

    etag = serializers.CharField(read_only=True, help_text="For If-Match.")

    def get_field_names(self, declared_fields: Any, info: Any) -> Any:
        """Those of ``Meta``, and ``etag``."""
        return [*super().get_field_names(declared_fields, info), "etag"]


class _VisibleRowsMixin:
    """A related object. An invisible one does not exist; one that the actor may not change is forbidden."""

    queryset: QuerySet[Any] | Manager[Any]
    context: Mapping[str, Any]

    def get_queryset(self) -> QuerySet[Any]:
        """The rows that the actor may see; all rows while the OpenAPI document is generated."""
        request = self.context.get("request")
        return self.queryset.all() if request is None else visible(actor(request), self.queryset.all())

    def to_internal_value(self, data: Any) -> Any:
        """The row. ValidationError, PermissionDenied."""
        row = super().to_internal_value(data)  # type: ignore[misc]  # of the relation that this is mixed into
        if request := self.context.get("request"):
            check_allowed(request, row)
        return row


class ByName(_VisibleRowsMixin, serializers.SlugRelatedField[Any]):  # type: ignore[misc]  # narrower attributes
    """An object by its name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(slug_field="name", **options)


class ById(_VisibleRowsMixin, serializers.PrimaryKeyRelatedField[Any]):  # type: ignore[misc]  # as above
    """An object by its id."""


def check_allowed(request: Request, row: Model) -> None:
    """PermissionDenied unless the actor holds the role of this route and method in the row's project."""
    needed = needed_role_of(request)
    if needed is None or not actor(request).may(needed, project_id_of(row)):
        raise PermissionDenied(denial_text(request, needed))


def check_unknown_fields(data: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """ValidationError that names every field of ``data`` that is not in ``fields``."""
    if unknown := sorted(set(data) - set(fields)):
        raise serializers.ValidationError({name: ["There is no such field."] for name in unknown})


class SchemaField(serializers.JSONField):
    """JSON of a struct or dataclass. Services validate it, so that pages and REST report the same errors."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.kind, self.options = kind, options
        super().__init__(**options)

    def __deepcopy__(self, memo: Mapping[Any, Any]) -> Self:
        """DRF's copy of a field, without copying the type, which never changes."""
        return type(self)(self.kind, **self.options)

    def to_representation(self, value: Any) -> Any:
        return msgspec.to_builtins(value)


class SchemaFieldScheme(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]  # registers itself, untyped
    """The JSON schema that msgspec generates for the type, with its structs as components."""

    target_class = SchemaField

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:  # noqa: ARG002 - spectacular's
        return _schema_of(auto_schema, self.target.kind)


class StructSerializer(serializers.BaseSerializer[Any]):
    """A response that is a struct or dataclass: ``kind`` says its fields, and no serializer repeats them."""

    kind: ClassVar[Any]

    def to_representation(self, instance: Any) -> Any:
        return msgspec.to_builtins(instance)


def serializer_of(kind: type) -> type[StructSerializer]:
    """The serializer of a struct or dataclass, for responses."""
    return type(kind.__name__, (StructSerializer,), {"kind": kind})


class StructSerializerScheme(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]  # registers itself, untyped
    """The JSON schema that msgspec generates for the type."""

    target_class = StructSerializer
    match_subclasses = True

    def get_name(self, auto_schema: Any, direction: Any) -> str:  # noqa: ARG002 - spectacular's
        name: str = self.target.kind.__name__
        return name

    def map_serializer(self, auto_schema: Any, direction: Any) -> dict[str, Any]:  # noqa: ARG002 - spectacular's
        _, components = json_schemas([self.target.kind], COMPONENT)
        for component in components.values():  # responses have all members, also those with a default
            if "properties" in component:
                component["required"] = list(component["properties"])
        body: dict[str, Any] = components.pop(self.target.kind.__name__)
        _register(auto_schema, components)
        return body


COMPONENT = "#/components/schemas/{name}"


def _schema_of(auto_schema: Any, kind: Any) -> dict[str, Any]:
    """The JSON schema of a type; the structs in it become components."""
    (schema,), components = json_schemas([kind], COMPONENT)
    _register(auto_schema, components)
    return schema


def _register(auto_schema: Any, components: Mapping[str, Any]) -> None:
    for name, body in components.items():
        component = ResolvedComponent(name, ResolvedComponent.SCHEMA, body, name)  # type: ignore[no-untyped-call]  # spectacular's
        auto_schema.registry.register_on_missing(component)


class SettingsModelSerializer(VersionedSerializer[Any]):
    """Shows the columns in ``settings`` as parts of the routers' schema: the types by column."""

    settings: ClassVar[Mapping[str, Any]] = {}

    def build_standard_field(self, field_name: str, model_field: Any) -> tuple[Any, dict[str, Any]]:
        if field_name in self.settings:
            options = {"kind": self.settings[field_name], "read_only": True, "allow_null": model_field.null}
            return SchemaField, options
        return super().build_standard_field(field_name, model_field)


class SettingsInput(serializers.Serializer[Any]):
    """Accepts ``settings``, parts of the routers' schema by column of ``model``, each optional. A nullable column
    accepts null, which restores the routers' default.
    """

    settings: ClassVar[Mapping[str, Any]] = {}
    model: ClassVar[type[Model]]

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields = super().get_fields()
        for name, kind in self.settings.items():
            if name not in fields:
                column: Any = self.model._meta.get_field(name)  # noqa: SLF001 - Django's documented name
                fields[name] = SchemaField(kind, required=False, allow_null=column.null)
        return fields


def by_username(source: str) -> serializers.CharField:
    """A user, shown by name; null where the system acted by itself."""
    return serializers.CharField(source=f"{source}.username", default=None, read_only=True, allow_null=True)
