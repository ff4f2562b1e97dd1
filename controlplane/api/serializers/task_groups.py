"""Task groups as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import router_fields
from controlplane.api.fields import ByName
from controlplane.api.schema_fields import SchemaField
from controlplane.models import Pool, Replica, TaskGroup

KINDS = router_fields.GROUP


class TaskGroupSerializer(serializers.ModelSerializer[TaskGroup]):
    """A task group; no replicas means all of its pool's. A setting that is null is its pool's, or none."""

    pool = ByName(read_only=True)
    replicas = ByName(many=True, read_only=True)
    match = SchemaField(KINDS["match"], read_only=True, allow_null=True)
    tier1 = SchemaField(KINDS["tier1"], read_only=True, allow_null=True)
    auto_replicas = SchemaField(KINDS["auto_replicas"], read_only=True, allow_null=True)
    concurrency = SchemaField(KINDS["concurrency"], read_only=True, allow_null=True)
    caps = SchemaField(KINDS["caps"], read_only=True, allow_null=True)

    class Meta:
        model = TaskGroup
        fields = (
            "id",
            "pool",
            "name",
            "owner",
            "description",
            "replicas",
            *KINDS,
            "expected_tier1",
            "hit_rate_objective",
            "created_at",
        )


class TaskGroupChange(serializers.Serializer[Any]):
    """What to change of a task group. A setting is given whole; null takes it back."""

    owner = serializers.CharField(max_length=200, allow_blank=True, required=False)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)
    replicas = ByName(queryset=Replica.objects.all(), many=True, required=False)
    match = SchemaField(KINDS["match"], required=False, allow_null=True)
    tier1 = SchemaField(KINDS["tier1"], required=False, allow_null=True)
    auto_replicas = SchemaField(KINDS["auto_replicas"], required=False, allow_null=True)
    priority = SchemaField(KINDS["priority"], required=False)
    concurrency = SchemaField(KINDS["concurrency"], required=False, allow_null=True)
    caps = SchemaField(KINDS["caps"], required=False, allow_null=True)
    expected_tier1 = serializers.CharField(max_length=16, allow_blank=True, required=False)
    hit_rate_objective = serializers.FloatField(required=False, allow_null=True)


class TaskGroupInput(TaskGroupChange):
    """A new task group."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=30)
