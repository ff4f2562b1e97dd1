"""Pools as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import router_fields
from controlplane.api.fields import ByName
from controlplane.api.schema_fields import SchemaField
from controlplane.models import Pool, Project
from controlplane.services.fleet.served_models import unnamed_warning

KINDS = router_fields.POOL


class PoolSerializer(serializers.ModelSerializer[Pool]):
    """A pool. A setting that is null is as routers have it by themselves."""

    project = ByName(read_only=True)
    aliases = SchemaField(KINDS["aliases"], read_only=True)
    adapters = SchemaField(KINDS["adapters"], read_only=True)
    health = SchemaField(KINDS["health"], read_only=True, allow_null=True)
    breaker = SchemaField(KINDS["breaker"], read_only=True, allow_null=True)
    caps = SchemaField(KINDS["caps"], read_only=True, allow_null=True)
    concurrency = SchemaField(KINDS["concurrency"], read_only=True, allow_null=True)
    tier1 = SchemaField(KINDS["tier1"], read_only=True, allow_null=True)
    stream_usage = SchemaField(KINDS["stream_usage"], read_only=True, allow_null=True)
    warm_up = SchemaField(KINDS["warm_up"], read_only=True, allow_null=True)

    class Meta:
        model = Pool
        fields = ("name", "project", "description", *KINDS, "created_at")


class CreatedPoolSerializer(PoolSerializer):
    """A new pool, and what it changes for clients that never heard of it."""

    warnings = serializers.SerializerMethodField(help_text="What to tell clients of; none for most pools.")

    class Meta(PoolSerializer.Meta):
        fields = (*PoolSerializer.Meta.fields, "warnings")

    def get_warnings(self, pool: Pool) -> list[str]:
        """Sentences."""
        return [warning] if (warning := unnamed_warning(pool)) else []


class PoolChange(serializers.Serializer[Any]):
    """What to change of a pool. A setting is given whole: what it leaves out takes its default; null takes it back."""

    models = serializers.ListField(child=serializers.CharField(max_length=256), max_length=256, required=False)
    aliases = SchemaField(KINDS["aliases"], required=False)
    adapters = SchemaField(KINDS["adapters"], required=False)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)
    health = SchemaField(KINDS["health"], required=False, allow_null=True)
    breaker = SchemaField(KINDS["breaker"], required=False, allow_null=True)
    caps = SchemaField(KINDS["caps"], required=False, allow_null=True)
    concurrency = SchemaField(KINDS["concurrency"], required=False, allow_null=True)
    tier1 = SchemaField(KINDS["tier1"], required=False, allow_null=True)
    share_half_life = SchemaField(KINDS["share_half_life"], required=False, allow_null=True)
    stream_usage = SchemaField(KINDS["stream_usage"], required=False, allow_null=True)
    warm_up = SchemaField(KINDS["warm_up"], required=False, allow_null=True)


class PoolInput(PoolChange):
    """A new pool; without a project it belongs to the one called ``default``. Name and project are for good."""

    name = serializers.CharField(max_length=30)
    project = ByName(queryset=Project.objects.all(), required=False)
