"""What every viewset shares: parsing by one serializer, answering by another."""

from __future__ import annotations

from typing import Any, TypeVar

from django.db.models import Model, QuerySet
from rest_framework import serializers, viewsets
from rest_framework.request import Request

from controlplane.access.scope import visible
from controlplane.api.permissions import asker

Row = TypeVar("Row", bound=Model)
NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
NUMBER = r"[0-9]{1,18}"


class Door(viewsets.GenericViewSet[Row]):
    """A viewset that shows what the asker may know of; ``PATCH`` changes, there is no ``PUT`` of a whole object."""

    http_method_names: tuple[str, ...] = ("get", "post", "patch", "delete", "head", "options")

    def get_queryset(self) -> QuerySet[Row]:
        """The rows of projects in which the asker has a role; all of them while the OpenAPI document is made."""
        rows: QuerySet[Row] = super().get_queryset()
        return rows if getattr(self, "swagger_fake_view", False) else visible(asker(self.request), rows)


def parsed(kind: type[serializers.Serializer[Any]], request: Request, *, partial: bool = False) -> dict[str, Any]:
    """The body as a service's arguments; a ValidationError names every field that is wrong."""
    serializer = kind(data=request.data, partial=partial, context={"request": request})
    serializer.is_valid(raise_exception=True)
    return dict(serializer.validated_data)
