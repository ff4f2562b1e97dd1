"""Events as JSON."""

from __future__ import annotations

from rest_framework import serializers

from controlplane.api.fields import ByName
from controlplane.models import Event

from .base import by_username


class EventSerializer(serializers.ModelSerializer[Event]):
    """Something that happened."""

    pool = ByName(read_only=True)
    replica = ByName(read_only=True)
    router = ByName(read_only=True)
    actor = by_username("actor")

    class Meta:
        model = Event
        fields = ("id", "at", "kind", "pool", "replica", "router", "actor", "summary", "detail")
