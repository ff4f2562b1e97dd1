"""What every viewset shares: parsing by one serializer, answering by another, and versions of objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from django.db.models import Model, QuerySet
from django.http import Http404
from rest_framework import serializers, status, viewsets
from rest_framework.generics import get_object_or_404
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.serializer_helpers import ReturnDict

from controlplane.access.actor import visible
from controlplane.api import preconditions
from controlplane.api.exceptions import ChangedMeanwhile, PreconditionRequired
from controlplane.api.middleware import Exchange
from controlplane.api.permissions import actor
from controlplane.api.preconditions import differences, earlier_version
from controlplane.services.audit_log import recent_changes

Row = TypeVar("Row", bound=Model)
NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
NUMBER = r"[0-9]{1,18}"


class BaseViewSet(Exchange, viewsets.GenericViewSet[Row]):
    """A viewset that shows what the actor may know of; ``PATCH`` changes, there is no ``PUT`` of a whole object.

    Every object it shows carries its entity tag, in ``ETag`` and in the field ``etag``. A change names the version it
    is of in ``If-Match``, which is compared under the row's lock; services lock the same row first.
    """

    http_method_names: tuple[str, ...] = ("get", "post", "patch", "delete", "head", "options")
    conditional_actions: ClassVar[tuple[str, ...]] = ()  # POST actions that need If-Match; PATCH, PUT and DELETE do
    tagged_in_lists: ClassVar[bool] = True  # False where a list shows less of an object than its own address does
    observed: ClassVar[tuple[str, ...]] = ()  # shown fields that nobody decides: no change of them is in one's way

    def get_queryset(self) -> QuerySet[Row]:
        """The rows of projects in which the actor has a role; all of them while the OpenAPI document is made."""
        rows: QuerySet[Row] = super().get_queryset()
        return rows if getattr(self, "swagger_fake_view", False) else visible(actor(self.request), rows)

    def perform(self, request: Request) -> Response:
        """Let the method do its work, and say of which version the answer is."""
        if request.method in SAFE_METHODS:
            return self._unless_known(request, self._tagged(super().perform(request)))
        if self.detail and self.action is not None:
            self._check_version(request)
        answer = self._tagged(super().perform(request))
        if answer.status_code == status.HTTP_201_CREATED:
            self._locate(request, answer)
        elif not answer.has_header("ETag") and (now := self.present()):
            answer["ETag"] = now["etag"]
        return answer

    def present(self) -> Mapping[str, Any] | None:
        """The object that the address names, as it is shown now; None where it names none or that is gone."""
        if not self.detail:
            return None
        try:
            row = super().get_object()
        except Http404:
            return None
        return self._with_tag(self.get_serializer(row).data)

    def shown(self, answer: Response) -> Mapping[str, Any] | None:
        """The object of this door that an answer shows; it may hold more, such as a secret."""
        data = answer.data
        if isinstance(data, ReturnDict):
            return data if isinstance(data.serializer, self.get_serializer_class()) else None
        serializer: Any = self.get_serializer()
        fields = serializer.fields
        if not isinstance(data, dict) or not set(fields) <= set(data):
            return None
        return {name: data[name] for name in (*fields, "etag") if name in data}

    def _check_version(self, request: Request) -> None:
        """Lock the object, and refuse a change of another version than the present one."""
        needed = request.method != "POST" or self.action in self.conditional_actions
        if not needed and not preconditions.is_asked_for(request):
            return
        now = self._with_tag(self.get_serializer(self._locked(request)).data)
        if not preconditions.is_asked_for(request):
            raise PreconditionRequired
        if not preconditions.still_matches(request, now["etag"]):
            changes = _overwritten(now, request.data)
            raise ChangedMeanwhile(etag=now["etag"], current=now, changes=changes, meanwhile=self._meanwhile(now))

    def _meanwhile(self, now: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """What others did since the version that the client has; None where that is not known."""

        def is_it(state: Mapping[str, Any]) -> bool:
            return preconditions.still_matches(self.request, preconditions.tag_of(state, self.observed))

        had = earlier_version(now, recent_changes(), is_it)
        if had is None:
            return None
        shown = {name: value for name, value in now.items() if name not in {*self.observed, "etag"}}
        return differences({name: had[name] for name in shown}, shown)

    def _locked(self, request: Request) -> Row:
        """The row that the address names, locked as its service will lock it; 404, 403 before anything else."""
        rows = self.filter_queryset(self.get_queryset()).select_for_update(of=("self",), no_key=_keeps(request))
        named = self.kwargs[self.lookup_url_kwarg or self.lookup_field]
        row: Row = get_object_or_404(rows, **{self.lookup_field: named})
        self.check_object_permissions(request, row)
        return row

    def _tagged(self, answer: Response) -> Response:
        """The answer with the tag of what it shows."""
        data = getattr(answer, "data", None)  # a stream has none
        if data is None:
            return answer
        if shown := self.shown(answer):
            answer["ETag"] = data["etag"] = preconditions.tag_of(shown, self.observed)
        elif isinstance(data, dict) and self.request.method in SAFE_METHODS:
            for row in data.get("results", ()) if self.action == "list" and self.tagged_in_lists else ():
                self._with_tag(row)
            answer["ETag"] = f'"{preconditions.digest_of(data)}"'
        return answer

    def _with_tag(self, shown: dict[str, Any]) -> dict[str, Any]:
        shown["etag"] = preconditions.tag_of(shown, self.observed)
        return shown

    def _unless_known(self, request: Request, answer: Response) -> Response:
        if answer.has_header("ETag") and preconditions.is_known(request, answer["ETag"]):
            return Response(status=status.HTTP_304_NOT_MODIFIED, headers={"ETag": answer["ETag"]})
        return answer

    def _locate(self, request: Request, answer: Response) -> None:
        """Say where what was created is to be found."""
        name = answer.data.get(self.lookup_field, answer.data.get("id"))
        if self.shown(answer) is not None and self.action == "create":
            answer["Location"] = f"{request.path}/{name}"


def heard(kind: type[serializers.Serializer[Any]], request: Request) -> dict[str, Any]:
    """What is known of a body of another program of ours, which may be newer and say more."""
    serializer = kind(data=request.data, context={"request": request})
    serializer.is_valid(raise_exception=True)
    return dict(serializer.validated_data)


def parsed(kind: type[serializers.Serializer[Any]], request: Request, *, partial: bool = False) -> dict[str, Any]:
    """The body as a service's arguments; a ValidationError names every field that is wrong, or that nobody knows."""
    serializer = kind(data=request.data, partial=partial, context={"request": request})
    serializer.is_valid(raise_exception=True)
    unknown = sorted(set(request.data) - set(serializer.fields))
    if unknown:
        raise serializers.ValidationError({name: ["There is no such field."] for name in unknown})
    return dict(serializer.validated_data)


def _overwritten(now: Mapping[str, Any], wanted: Any) -> list[dict[str, Any]]:
    """What a change would do to what it is now. Of plain values alone: others may hold a secret on their way in."""
    given = wanted if isinstance(wanted, dict) else {}
    named = [name for name in given if name in now and not isinstance(now[name], dict)]
    return differences({name: now[name] for name in named}, {name: given[name] for name in named})


def _keeps(request: Request) -> bool:
    return request.method != "DELETE"
