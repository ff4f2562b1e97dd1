"""Events as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.fields import ByName
from controlplane.models import Event

from .base import by_username


class EventSerializer(serializers.ModelSerializer[Event]):
    """Something that happened."""

    pool = ByName(read_only=True, allow_null=True)
    replica = ByName(read_only=True, allow_null=True)
    router = ByName(read_only=True, allow_null=True)
    actor = by_username("actor")

    class Meta:
        model = Event
        fields = ("id", "at", "kind", "pool", "replica", "router", "actor", "summary", "detail")


class FeedQuery(serializers.Serializer[Any]):
    """What follows an event: which, how long to wait for it (seconds), and how many at most."""

    after = serializers.IntegerField(min_value=0, max_value=2**63 - 1)
    wait = serializers.FloatField(min_value=0, max_value=60, default=0.0)
    limit = serializers.IntegerField(min_value=1, max_value=1000, default=100)
