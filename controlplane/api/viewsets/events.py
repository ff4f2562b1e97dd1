"""Doors to events."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import StreamingHttpResponse
from django_filters.utils import translate_validation
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import mixins, serializers
from rest_framework.decorators import action
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api.event_stream import EventStreamRenderer, event_stream, rows_for, wait_for_events
from controlplane.api.filters import EventFilter
from controlplane.api.pagination import EventPages
from controlplane.api.permissions import route_of
from controlplane.api.serializers import events as s
from controlplane.models import Event
from controlplane.services import feed

from .doors import NUMBER, Door

AFTER = OpenApiParameter(
    "after", OpenApiTypes.STR, description="A time (included); or an event's id, to follow from there, oldest first."
)
WAIT = OpenApiParameter(
    "wait", OpenApiTypes.FLOAT, description="With an id in `after`: seconds to wait until there is an event, 0 to 60."
)
LAST = OpenApiParameter("Last-Event-ID", OpenApiTypes.INT, OpenApiParameter.HEADER, description="Go on after this one.")


class EventViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Event]):
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
        place, rows = feed.place_of(asked["after"]), self._narrowed(self.get_queryset())
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
        place = feed.newest_place() if last is None else feed.place_of(int(last))
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
