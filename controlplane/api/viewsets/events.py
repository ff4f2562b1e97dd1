"""Doors to events."""

from __future__ import annotations

from rest_framework import mixins

from controlplane.api.filters import EventFilter
from controlplane.api.pagination import EventPages
from controlplane.api.serializers import events as s
from controlplane.models import Event

from .doors import NUMBER, Door


class EventViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, Door[Event]):
    """What happened, newest first."""

    queryset = Event.objects.select_related("pool", "replica", "router", "actor")
    serializer_class = s.EventSerializer
    filterset_class = EventFilter
    pagination_class = EventPages
    lookup_value_regex = NUMBER
