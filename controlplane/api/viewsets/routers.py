"""Doors to routers, and the one that they use.

Doors to events.

Doors to the audit log.

Doors to tokens.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import StreamingHttpResponse
from django_filters.utils import translate_validation
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.authentication import RouterAuthentication
from controlplane.api.event_stream import EventStreamRenderer, event_stream, rows_for, wait_for_events
from controlplane.api.filters import AuditFilter, EventFilter
from controlplane.api.middleware import Exchange
from controlplane.api.pagination import AuditPages, EventPages
from controlplane.api.permissions import IsRouter, route_of, signed_in_user
from controlplane.api.serializers import routers as s
from controlplane.api.viewsets.base import NAME, NUMBER, BaseViewSet, heard, parsed
from controlplane.models import ApiToken, AuditEntry, Event, Router
from controlplane.push.client import Signature, explain_placement
from controlplane.services import events, routers
from controlplane.services.access.tokens import create_token, revoke_token
from controlplane.services.snapshots import newest_snapshot


class RouterViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[Router]):
    """Routers, each with what it runs and what it should run. They announce themselves; one is only ever removed."""

    queryset = Router.objects.all()
    serializer_class = s.RouterSerializer
    lookup_field = "name"
    lookup_value_regex = NAME
    observed = s.OBSERVED

    def destroy(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Forget a router that is gone for good; 409 while it is heard of."""
        routers.remove_router(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def get_serializer_context(self) -> dict[str, Any]:
        """The newest snapshot, asked for once."""
        return {**super().get_serializer_context(), "desired": newest_snapshot()}

    @extend_schema(request=s.ExplainInput, responses=OpenApiTypes.OBJECT)
    @action(detail=True, methods=["post"])
    def explain(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Where it would place a request now, among which candidates, and why. Nothing is sent to a replica."""
        return Response(explain_placement(self.get_object(), parsed(s.ExplainInput, request)))


class AnnounceView(Exchange):
    """Where routers report themselves, by the token that they share with the control plane."""

    authentication_classes = (RouterAuthentication,)
    permission_classes = (IsRouter,)

    @extend_schema(request=s.AnnounceInput, responses=s.AnnouncedSerializer)
    def post(self, request: Request) -> Response:
        """Note a heartbeat; the answer is the number to run, which is then pushed to the admin port.

        What a newer router says besides is passed over: routers may be upgraded first.
        """
        told = heard(s.AnnounceInput, request)
        said = told.pop("signature", None)
        routers.announce(**told, signature=Signature(**said) if said else None)
        desired = newest_snapshot()
        taken = len(told.get("events", ()))
        return Response({"desired_revision": desired.number if desired else None, "events_taken": taken})


AFTER = OpenApiParameter(
    "after", OpenApiTypes.STR, description="A time (included); or an event's id, to follow from there, oldest first."
)
WAIT = OpenApiParameter(
    "wait", OpenApiTypes.FLOAT, description="With an id in `after`: seconds to wait until there is an event, 0 to 60."
)
LAST = OpenApiParameter("Last-Event-ID", OpenApiTypes.INT, OpenApiParameter.HEADER, description="Go on after this one.")


class EventViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[Event]):
    """What happened, newest first; or, after an event's id, what came then, oldest first."""

    queryset = Event.objects.select_related("pool", "replica", "router", "actor")
    serializer_class = s.EventSerializer
    filterset_class = EventFilter
    pagination_class = EventPages
    lookup_value_regex = NUMBER

    @extend_schema(parameters=[AFTER, WAIT])
    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """A page of events; or what follows the event ``after``, as soon as there is anything."""
        if not request.query_params.get("after", "").isdigit() and "wait" not in request.query_params:
            return super().list(request, *args, **kwargs)
        query = s.FeedQuery(data=request.query_params)
        query.is_valid(raise_exception=True)
        asked = query.validated_data
        place, rows = events.position_of(asked["after"]), self._narrowed(self.get_queryset())
        found = wait_for_events(place, rows, limit=asked["limit"], wait_s=asked["wait"])
        last = found[-1].pk if found else asked["after"]
        return Response({"results": self.get_serializer(found, many=True).data, "last": last})

    @extend_schema(
        parameters=[LAST],
        responses={(200, "text/event-stream"): OpenApiResponse(OpenApiTypes.STR, "`id`, `event` (its kind), `data`")},
    )
    @action(detail=False, renderer_classes=[EventStreamRenderer, JSONRenderer], pagination_class=None)
    def stream(self, request: Request) -> StreamingHttpResponse:
        """Events as they happen, as server-sent events; from now on, or after ``Last-Event-ID`` or ``?after=``."""
        last = request.headers.get("Last-Event-ID") or request.query_params.get("after")
        if last is not None and not (last.isascii() and last.isdigit() and len(last) < 19):
            raise serializers.ValidationError({"after": ["Expected the id of an event."]})
        place = events.newest_position() if last is None else events.position_of(int(last))
        route = route_of(request)
        self._narrowed(self.get_queryset())  # refuse filters of no use at once

        def rows() -> QuerySet[Event] | None:
            seen = rows_for(request, EventViewSet.queryset.all(), route)
            return None if seen is None else self._narrowed(seen)

        return event_stream(request, place, rows)

    def _narrowed(self, rows: QuerySet[Event]) -> QuerySet[Event]:
        """By the filters of the list, without ``after``, which names a place here."""
        asked = self.request.query_params.copy()
        asked.pop("after", None)
        narrowed = EventFilter(asked, queryset=rows, request=self.request)
        if not narrowed.is_valid():
            raise translate_validation(narrowed.errors)
        found: QuerySet[Event] = narrowed.qs
        return found


class AuditViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[AuditEntry]):
    """The audit log, newest first; for admins of everything."""

    queryset = AuditEntry.objects.all()
    serializer_class = s.AuditSerializer
    filterset_class = AuditFilter
    pagination_class = AuditPages
    lookup_value_regex = NUMBER


class TokenViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, BaseViewSet[ApiToken]):
    """Tokens for scripts; for administrators."""

    queryset = ApiToken.objects.select_related("user")
    serializer_class = s.TokenSerializer
    lookup_value_regex = NUMBER
    observed = ("last_used_at",)
    shown_once = ("token",)

    @extend_schema(request=s.TokenInput, responses={201: s.CreatedTokenSerializer})
    def create(self, request: Request) -> Response:
        """Create a token that acts for you; its text is in this answer and nowhere else."""
        user = signed_in_user(request)
        token, text = create_token(user, **parsed(s.TokenInput, request), by=user)
        answer = {**s.TokenSerializer(token).data, "token": text}
        return Response(answer, status.HTTP_201_CREATED, headers={"Cache-Control": "no-store"})

    def destroy(self, request: Request, pk: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Revoke a token now; 409 if it was revoked before."""
        revoke_token(self.get_object(), by=signed_in_user(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
