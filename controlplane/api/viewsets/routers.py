"""Viewsets of routers and their heartbeats, events, the audit log, API tokens and the OpenAPI document."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.http import StreamingHttpResponse
from django_filters.utils import translate_validation
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from drf_spectacular.views import SpectacularJSONAPIView
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.encoders import JSONEncoder

from controlplane.api.auth import HasRole, IsRouter, RouterAuthentication
from controlplane.api.exceptions import TooManyWaitersError
from controlplane.api.filters import AuditFilter, EventFilter
from controlplane.api.pagination import newest_first
from controlplane.api.serializers import routers as router_serializers
from controlplane.api.views import TransactionalView
from controlplane.api.viewsets.base import NAME, NUMBER, CreateMixin, DestroyMixin, ReadViewSet, validated_body
from controlplane.egress.addresses import fleet_rules
from controlplane.models import ApiToken, AuditEntry, Event, Router
from controlplane.push.client import Signature, explain_placement
from controlplane.request_origin import client_address
from controlplane.services import events, routers
from controlplane.services.access.tokens import create_token, revoke_token
from controlplane.services.snapshots import newest_snapshot


class RouterViewSet(DestroyMixin, ReadViewSet[Router]):
    """Routers, with the configuration that each runs and should run. They register themselves by their heartbeats."""

    queryset = Router.objects.all()
    serializer_class = router_serializers.RouterSerializer
    remove_row = staticmethod(routers.remove_router)
    lookup_field, lookup_value_regex = "name", NAME
    descriptions: ClassVar = {"destroy": "Remove a router that no longer exists; 409 while it sends heartbeats."}

    def get_serializer_context(self) -> dict[str, Any]:
        """DRF's, with the newest configuration, queried once."""
        return {**super().get_serializer_context(), "desired": newest_snapshot()}

    @extend_schema(request=router_serializers.ExplainInput, responses=OpenApiTypes.OBJECT)
    @action(detail=True, methods=["post"])
    def explain(self, request: Request, name: str) -> Response:  # noqa: ARG002 - get_object reads it
        """Where the router would place a request now, among which candidates, and why. No replica is contacted."""
        return Response(explain_placement(self.get_object(), validated_body(router_serializers.ExplainInput, request)))


class AnnounceView(TransactionalView):
    """Receives the heartbeats of routers, which authenticate by their shared token.

    Routers in the fleet's networks may use plain HTTP, over which they get configurations with the same token.
    """

    authentication_classes = (RouterAuthentication,)
    permission_classes = (IsRouter,)

    def lacks_https(self, request: Request) -> bool:
        """Whether the request came over plain HTTP from outside of the fleet's networks."""
        return super().lacks_https(request) and fleet_rules().denial_reason(client_address(request)) is not None

    @extend_schema(request=router_serializers.AnnounceInput, responses=router_serializers.AnnouncedSerializer)
    def post(self, request: Request) -> Response:
        """Record a heartbeat; the response names the configuration to run, which is then pushed to the admin port.

        Unknown fields are ignored, because routers may be upgraded before the control plane.
        """
        fields = validated_body(router_serializers.AnnounceInput, request, allow_unknown=True)
        signature = fields.pop("signature", None)
        routers.announce(**fields, signature=Signature(**signature) if signature else None)
        desired = newest_snapshot()
        number = desired.number if desired else None
        return Response({"desired_revision": number, "acknowledged_events": len(fields.get("events", ()))})


AFTER = OpenApiParameter(
    "after", OpenApiTypes.STR, description="A time (included); or an event's id, to list what follows it, oldest first."
)
WAIT = OpenApiParameter(
    "wait", OpenApiTypes.FLOAT, description="With an id in `after`: seconds to wait until there is an event, 0 to 60."
)
MAX_WAITERS = 64  # clients of one process that wait for events
_slots = threading.BoundedSemaphore(MAX_WAITERS)
_newest_position = events.PositionCache()


class EventViewSet(ReadViewSet[Event]):
    """Events, newest first; or, after an event's id, the following ones, oldest first."""

    queryset = Event.objects.select_related("pool", "replica", "router", "actor")
    serializer_class = router_serializers.EventSerializer
    filterset_class = EventFilter
    pagination_class = newest_first("-at", "-id")
    lookup_value_regex = NUMBER

    @extend_schema(parameters=[AFTER, WAIT])
    def list(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """A page of events; or a long poll for the events after the id ``after``."""
        if not request.query_params.get("after", "").isdigit() and "wait" not in request.query_params:
            return super().list(request, *args, **kwargs)
        query = router_serializers.EventsAfterQuery(data=request.query_params)
        query.is_valid(raise_exception=True)
        after, limit, wait_s = (query.validated_data[name] for name in ("after", "limit", "wait"))
        rows = self._filtered(self.get_queryset())
        new_events = wait_for_events(events.position_of(after), rows, limit=limit, wait_s=wait_s)
        last = new_events[-1].pk if new_events else after
        return Response({"results": self.get_serializer(new_events, many=True).data, "last": last})

    def _filtered(self, rows: QuerySet[Event]) -> QuerySet[Event]:
        """Filtered as the list is, without ``after``, which is an id here."""
        params = self.request.query_params.copy()
        params.pop("after", None)
        filtered = EventFilter(params, queryset=rows, request=self.request)
        if not filtered.is_valid():
            raise translate_validation(filtered.errors)
        matching: QuerySet[Event] = filtered.qs
        return matching


def wait_for_events(position: events.Position, rows: QuerySet[Event], *, limit: int, wait_s: float) -> list[Event]:
    """The events after a position, as soon as there are any, or [] after ``wait_s`` seconds. TooManyWaitersError.

    While it waits, the request has no database connection.
    """
    new_events = events.events_after(position, rows, limit)
    if new_events or wait_s <= 0:
        return new_events
    deadline_s = time.monotonic() + wait_s
    newest_seen: events.Position | None = None
    if not _slots.acquire(blocking=False):
        raise TooManyWaitersError
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            newest = _newest_position.read()
            has_new = newest != newest_seen and newest > position
            if has_new and (new_events := events.events_after(position, rows, limit)):
                return new_events
            newest_seen = newest
            events.release_connection()
            time.sleep(min(events.POLL_INTERVAL_S, left_s))
        return []
    finally:
        _slots.release()


class AuditViewSet(ReadViewSet[AuditEntry]):
    """The audit log, newest first; for admins of all projects."""

    queryset = AuditEntry.objects.all()
    serializer_class = router_serializers.AuditSerializer
    filterset_class = AuditFilter
    pagination_class = newest_first("-number")
    lookup_value_regex = NUMBER

    @extend_schema(responses={(200, "application/x-ndjson"): OpenApiTypes.STR}, filters=True)
    @action(detail=False, pagination_class=None)
    def export(self, request: Request) -> StreamingHttpResponse:  # noqa: ARG002 - the filters read it
        """All entries that match the filters, the oldest first, a line of JSON each, with all fields of the digests."""
        entries = self.filter_queryset(self.get_queryset()).order_by("number").iterator(chunk_size=1000)
        lines = (json.dumps(self.get_serializer(entry).data, cls=JSONEncoder) + "\n" for entry in entries)
        response = StreamingHttpResponse(lines, content_type="application/x-ndjson")
        response["Content-Disposition"] = 'attachment; filename="audit.ndjson"'
        return response


class TokenViewSet(CreateMixin, DestroyMixin, ReadViewSet[ApiToken]):
    """API tokens of scripts; for administrators."""

    queryset = ApiToken.objects.select_related("user")
    serializer_class = router_serializers.TokenSerializer
    created_serializer = router_serializers.CreatedTokenSerializer
    create_input = router_serializers.TokenInput
    create_row = staticmethod(lambda by, **fields: create_token(by, **fields, by=by))
    remove_row = staticmethod(revoke_token)
    lookup_value_regex = NUMBER
    shown_once = ("token",)
    descriptions: ClassVar = {
        "create": "Create a token that acts for you; its text is in this response only.",
        "destroy": "Revoke a token now; 409 if it is revoked already.",
    }


class SchemaView(TransactionalView, SpectacularJSONAPIView):
    """``/api/v1/openapi.json``."""

    permission_classes = (HasRole,)
