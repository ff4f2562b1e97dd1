"""Replica sources as JSON. A secret goes in and never comes out.

What sources found, as JSON.
"""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.fields import ByName
from controlplane.discovery import KINDS
from controlplane.models import Adoption, DiscoveredReplica, Pool, ReplicaSource, SourceStatus

KIND_CHOICES = [(kind.name, kind.label) for kind in KINDS.values()]
# What looking found: shown, and nobody's to decide.
OBSERVED = (
    "status",
    "looked_at",
    "succeeded_at",
    "failing_since",
    "next_look_at",
    "error",
    "held",
    "refused",
    "found",
    "new",
    "vanished",
)


class SourceSerializer(serializers.ModelSerializer[ReplicaSource]):
    """A source, and how its last look went."""

    pool = ByName(read_only=True)
    status = serializers.ChoiceField(choices=SourceStatus.choices, read_only=True)
    has_secret = serializers.SerializerMethodField()
    refused = serializers.ListField(child=serializers.CharField(), read_only=True)
    settings = serializers.DictField(read_only=True)

    class Meta:
        model = ReplicaSource
        fields = (
            "name",
            "pool",
            "kind",
            "settings",
            "has_secret",
            "adoption",
            "enabled",
            "interval_s",
            "deadline_s",
            "drain_after_s",
            "remove_after_s",
            "max_vanished_ratio",
            "max_targets",
            "created_at",
            *OBSERVED,
        )

    def get_has_secret(self, source: ReplicaSource) -> bool:
        """Whether a secret is kept for it."""
        return source.encrypted is not None


class SourceChange(serializers.Serializer[Any]):
    """What to change of a source; an empty secret forgets it. Name, kind and pool stay."""

    settings = serializers.DictField(required=False)
    secret = serializers.CharField(
        max_length=16_384, allow_blank=True, write_only=True, required=False, trim_whitespace=False
    )
    adoption = serializers.ChoiceField(choices=Adoption.choices, required=False)
    enabled = serializers.BooleanField(required=False)
    interval_s = serializers.FloatField(required=False, min_value=5, max_value=86_400)
    deadline_s = serializers.FloatField(required=False, min_value=1, max_value=60)
    drain_after_s = serializers.FloatField(required=False, min_value=0, max_value=604_800)
    remove_after_s = serializers.FloatField(required=False, min_value=0, max_value=2_592_000)
    max_vanished_ratio = serializers.FloatField(required=False, min_value=0.01, max_value=1)
    max_targets = serializers.IntegerField(required=False, min_value=1, max_value=1000)


class SourceInput(SourceChange):
    """A new source."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=30)
    kind = serializers.ChoiceField(choices=KIND_CHOICES)
    settings = serializers.DictField()


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
