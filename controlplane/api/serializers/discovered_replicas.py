"""What sources found, as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.fields import ByName
from controlplane.models import DiscoveredReplica


class DiscoveredReplicaSerializer(serializers.ModelSerializer[DiscoveredReplica]):
    """An engine that a source found; ``replica`` is null unless it is one."""

    source = ByName(read_only=True)  # type: ignore[assignment]  # a field called like an attribute of fields
    pool = serializers.CharField(source="source.pool.name", read_only=True)
    replica = ByName(read_only=True, allow_null=True)
    labels = serializers.DictField(child=serializers.CharField(), read_only=True)

    class Meta:
        model = DiscoveredReplica
        fields = (
            "id",
            "source",
            "pool",
            "key",
            "name",
            "url",
            "condition",
            "labels",
            "state",
            "replica",
            "first_seen_at",
            "last_seen_at",
            "missing_since",
            "drained_at",
            "problem",
        )


class AdoptInput(serializers.Serializer[Any]):
    """How to call the replica; left out, as its source calls it."""

    name = serializers.CharField(max_length=63, required=False)
