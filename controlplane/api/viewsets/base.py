"""Base viewsets: visibility, entity tags, conditional changes, and create, update and delete through services."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from django.db.models import Model, QuerySet
from django.http import Http404
from rest_framework import serializers, status, viewsets
from rest_framework.generics import get_object_or_404
from rest_framework.mixins import ListModelMixin, RetrieveModelMixin
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.serializer_helpers import ReturnDict

from controlplane.access.actor import visible
from controlplane.api.auth import actor, signed_in_user
from controlplane.api.exceptions import PreconditionRequiredError, VersionChangedError
from controlplane.api.fields import VersionedSerializer, check_unknown_fields
from controlplane.api.views import TransactionalView, differences, has_if_match, if_match_holds

Row = TypeVar("Row", bound=Model)
NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
NUMBER = r"[0-9]{1,18}"


class BaseViewSet(TransactionalView, viewsets.GenericViewSet[Row]):
    """A viewset of the rows that the actor may see. ``PATCH`` changes; there is no ``PUT`` of a whole object.

    An object that users edit carries its entity tag, in ``ETag`` and in the field ``etag``. A change names a version
    in ``If-Match``, which is compared under the row's lock; services lock the same row first.
    """

    http_method_names: tuple[str, ...] = ("get", "post", "patch", "delete", "head", "options")
    conditional_actions: ClassVar[tuple[str, ...]] = ()  # POST actions that need If-Match; PATCH, PUT and DELETE do
    descriptions: ClassVar[Mapping[str, str]] = {}  # of inherited actions, for the OpenAPI document

    def get_queryset(self) -> QuerySet[Row]:
        """The rows of projects in which the actor has a role; all rows while the OpenAPI document is generated."""
        rows: QuerySet[Row] = super().get_queryset()
        return rows if getattr(self, "swagger_fake_view", False) else visible(actor(self.request), rows)

    @property
    def has_versions(self) -> bool:
        """Whether users edit these objects: routers and tokens, for example, can only be removed."""
        return issubclass(self.get_serializer_class(), VersionedSerializer)

    def perform(self, request: Request) -> Response:
        """Call the action and tag its response; 412 or 428 depending on the version that the client names."""
        is_change = request.method not in SAFE_METHODS
        if is_change and self.has_versions and self.detail and self.action is not None:
            self._check_version(request)
        response = super().perform(request)
        shown = None if getattr(response, "data", None) is None else self.object_in(response)  # a stream has no data
        if shown and response.status_code == status.HTTP_201_CREATED and self.action == "create" and not self.detail:
            response["Location"] = f"{request.path}/{shown.get(self.lookup_field, shown.get('id'))}"
        if self.has_versions and (shown := shown or (self.current_state() if is_change else None)):
            response["ETag"] = shown["etag"]
        return response

    def current_state(self) -> Mapping[str, Any] | None:
        if not self.detail:
            return None
        try:
            row = super().get_object()
        except Http404:
            return None
        representation: Mapping[str, Any] = self.get_serializer(row).data
        return representation

    def object_in(self, response: Response) -> Mapping[str, Any] | None:
        """The object of this viewset that a response shows, without further fields such as a secret."""
        data = response.data
        if isinstance(data, ReturnDict):
            return data if isinstance(data.serializer, self.get_serializer_class()) else None
        serializer: Any = self.get_serializer()
        fields = serializer.fields
        if not isinstance(data, dict) or not set(fields) <= set(data):
            return None
        return {name: data[name] for name in fields}

    def _check_version(self, request: Request) -> None:
        """Lock the object and compare its version with If-Match. PreconditionRequiredError, VersionChangedError."""
        has_version = has_if_match(request)
        if not has_version and request.method == "POST" and self.action not in self.conditional_actions:
            return
        current = self.get_serializer(self._locked(request)).data
        if not has_version:
            raise PreconditionRequiredError
        if not if_match_holds(request, current["etag"]):
            raise VersionChangedError(
                etag=current["etag"],
                current=current,
                changes=_overwritten(current, request.data),
            )

    def _locked(self, request: Request) -> Row:
        """The row in the URL, locked as its service will lock it. Http404, PermissionDenied."""
        rows = self.filter_queryset(self.get_queryset())
        rows = rows.select_for_update(of=("self",), no_key=request.method != "DELETE")
        row: Row = get_object_or_404(
            rows, **{self.lookup_field: self.kwargs[self.lookup_url_kwarg or self.lookup_field]}
        )
        self.check_object_permissions(request, row)
        return row


class ReadViewSet(ListModelMixin, RetrieveModelMixin, BaseViewSet[Row]):
    """Lists objects and shows one."""


class CreateMixin:
    """Creates an object by ``create_row``. Where ``shown_once`` names a field, that returns (row, new secret)."""

    create_row: ClassVar[Callable[..., Any]]
    create_input: ClassVar[type[serializers.Serializer[Any]]]
    created_serializer: ClassVar[type[serializers.BaseSerializer[Any]] | None] = None

    def create(self: Any, request: Request) -> Response:
        """Create an object."""
        fields = validated_body(self.create_input, request)
        created = self.create_row(**fields, by=signed_in_user(request))
        if not self.shown_once:
            serializer = (self.created_serializer or self.get_serializer_class())(created)
            return Response(serializer.data, status.HTTP_201_CREATED)
        row, secret = created
        data = {**self.get_serializer(row).data, self.shown_once[0]: secret}
        return Response(data, status.HTTP_201_CREATED, headers={"Cache-Control": "no-store"})


class UpdateMixin:
    """Changes the object in the URL by ``update_row``."""

    update_row: ClassVar[Callable[..., Any]]
    change_input: ClassVar[type[serializers.Serializer[Any]]]

    def partial_update(self: Any, request: Request, **_: Any) -> Response:
        """Change the fields that the body holds."""
        changes = validated_body(self.change_input, request, partial=True)
        row = self.update_row(self.get_object(), **changes, by=signed_in_user(request))
        return Response(self.get_serializer(row).data)


class DestroyMixin:
    """Removes the object in the URL by ``remove_row``."""

    remove_row: ClassVar[Callable[..., object]]

    def destroy(self: Any, request: Request, **_: Any) -> Response:
        """Remove the object."""
        self.remove_row(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class CrudViewSet(CreateMixin, UpdateMixin, DestroyMixin, ReadViewSet[Row]):
    """Lists, shows, creates, changes and removes objects."""


def validated_body(
    serializer_class: type[serializers.Serializer[Any]],
    request: Request,
    *,
    partial: bool = False,
    allow_unknown: bool = False,
) -> dict[str, Any]:
    """The body as a service's arguments. A ValidationError names every invalid and every unknown field.

    ``allow_unknown`` is for bodies of our own programs, which may be newer.
    """
    serializer = serializer_class(data=request.data, partial=partial, context={"request": request})
    serializer.is_valid(raise_exception=True)
    if not allow_unknown:
        check_unknown_fields(request.data, serializer.fields)
    return dict(serializer.validated_data)


def validated_query(serializer_class: type[serializers.Serializer[Any]], request: Request) -> dict[str, Any]:
    """The parameters of a GET. A ValidationError names every invalid one."""
    serializer = serializer_class(data=request.query_params, context={"request": request})
    serializer.is_valid(raise_exception=True)
    return dict(serializer.validated_data)


def _overwritten(current: Mapping[str, Any], body: Any) -> list[dict[str, Any]]:
    """What a change would do to the present object. Only plain values: others may hold a secret."""
    fields = body if isinstance(body, dict) else {}
    shown = [name for name in fields if name in current and not isinstance(current[name], dict)]
    return differences({name: current[name] for name in shown}, {name: fields[name] for name in shown})
