"""Other objects that a body names."""

from __future__ import annotations

from typing import Any

from django.db.models import Manager, Model, QuerySet
from rest_framework import serializers
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request

from controlplane.access.scope import project_id_of, visible

from .permissions import asker, role_needed


class ByName(serializers.SlugRelatedField[Any]):
    """An object by its name: one that the asker cannot see does not exist, one they may not touch is refused."""

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
    """What the asker may know of; everything while the OpenAPI document is made."""
    if rows is None:
        raise TypeError("a field that is given needs a queryset")
    rows, request = rows.all(), field.context.get("request")
    return rows if request is None else visible(asker(request), rows)


def allowed(field: serializers.Field[Any, Any, Any, Any], row: Model) -> Model:
    """The row, if the role that this address needs is held in its project."""
    request: Request | None = field.context.get("request")
    if request is not None:
        check_allowed(request, row)
    return row


def check_allowed(request: Request, row: Model) -> None:
    """PermissionDenied unless the role that this address needs is held in the row's project."""
    needed = role_needed(request)
    if needed is None or not asker(request).may(needed, project_id_of(row)):
        raise PermissionDenied
