"""Pools as JSON.

Replicas as JSON.

Task groups as JSON.

Client keys as JSON.

The fleet's settings as JSON.

Projects as JSON.
"""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import schema_fields
from controlplane.api.fields import ByName, SchemaField, by_username
from controlplane.models import ClientKey, FleetSettings, Pool, Project, Replica, ReplicaState, TaskGroup
from controlplane.services.fleet.served_models import unnamed_model_warning

POOL_FIELDS = schema_fields.POOL


class PoolSerializer(serializers.ModelSerializer[Pool]):
    """A pool. A setting that is null is as routers have it by themselves."""

    project = ByName(read_only=True)
    aliases = SchemaField(POOL_FIELDS["aliases"], read_only=True)
    adapters = SchemaField(POOL_FIELDS["adapters"], read_only=True)
    health = SchemaField(POOL_FIELDS["health"], read_only=True, allow_null=True)
    breaker = SchemaField(POOL_FIELDS["breaker"], read_only=True, allow_null=True)
    caps = SchemaField(POOL_FIELDS["caps"], read_only=True, allow_null=True)
    concurrency = SchemaField(POOL_FIELDS["concurrency"], read_only=True, allow_null=True)
    tier1 = SchemaField(POOL_FIELDS["tier1"], read_only=True, allow_null=True)
    stream_usage = SchemaField(POOL_FIELDS["stream_usage"], read_only=True, allow_null=True)
    warm_up = SchemaField(POOL_FIELDS["warm_up"], read_only=True, allow_null=True)

    class Meta:
        model = Pool
        fields = ("name", "project", "description", *POOL_FIELDS, "created_at")


class CreatedPoolSerializer(PoolSerializer):
    """A new pool, and what it changes for clients that never heard of it."""

    warnings = serializers.SerializerMethodField(help_text="What to tell clients of; none for most pools.")

    class Meta(PoolSerializer.Meta):
        fields = (*PoolSerializer.Meta.fields, "warnings")

    def get_warnings(self, pool: Pool) -> list[str]:
        """Sentences."""
        return [warning] if (warning := unnamed_model_warning(pool)) else []


class PoolChange(serializers.Serializer[Any]):
    """What to change of a pool. A setting is given whole: what it leaves out takes its default; null takes it back."""

    models = serializers.ListField(child=serializers.CharField(max_length=256), max_length=256, required=False)
    aliases = SchemaField(POOL_FIELDS["aliases"], required=False)
    adapters = SchemaField(POOL_FIELDS["adapters"], required=False)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)
    health = SchemaField(POOL_FIELDS["health"], required=False, allow_null=True)
    breaker = SchemaField(POOL_FIELDS["breaker"], required=False, allow_null=True)
    caps = SchemaField(POOL_FIELDS["caps"], required=False, allow_null=True)
    concurrency = SchemaField(POOL_FIELDS["concurrency"], required=False, allow_null=True)
    tier1 = SchemaField(POOL_FIELDS["tier1"], required=False, allow_null=True)
    share_half_life = SchemaField(POOL_FIELDS["share_half_life"], required=False, allow_null=True)
    stream_usage = SchemaField(POOL_FIELDS["stream_usage"], required=False, allow_null=True)
    warm_up = SchemaField(POOL_FIELDS["warm_up"], required=False, allow_null=True)


class PoolInput(PoolChange):
    """A new pool; without a project it belongs to the one called ``default``. Name and project are for good."""

    name = serializers.CharField(max_length=30)
    project = ByName(queryset=Project.objects.all(), required=False)


REPLICA_FIELDS = schema_fields.REPLICA


class ReplicaSerializer(serializers.ModelSerializer[Replica]):
    """A replica as an operator wants it; whether it answers is telemetry's to say. Its key is never shown."""

    pool = ByName(read_only=True)
    labels = serializers.DictField(child=serializers.CharField(), read_only=True)
    adapters = SchemaField(REPLICA_FIELDS["adapters"], read_only=True, allow_null=True)

    class Meta:
        model = Replica
        fields = (
            "name",
            "pool",
            "url",
            "state",
            "weight",
            "labels",
            *REPLICA_FIELDS,
            "api_key_set_at",
            "block_tokens",
            "capacity_blocks",
            "created_at",
        )


class ReplicaChange(serializers.Serializer[Any]):
    """What to change of a replica. The name is its identity on every ring and stays."""

    url = serializers.CharField(max_length=2048, required=False)
    weight = serializers.FloatField(required=False)
    labels = serializers.DictField(child=serializers.CharField(allow_blank=True), required=False)
    adapters = SchemaField(REPLICA_FIELDS["adapters"], required=False, allow_null=True)
    data_parallel_size = SchemaField(REPLICA_FIELDS["data_parallel_size"], required=False)
    api_key = serializers.CharField(
        write_only=True,
        max_length=1024,
        trim_whitespace=False,
        required=False,
        allow_null=True,
        help_text="What the engine asks of clients. Kept encrypted and never shown; null takes it away.",
    )


class ReplicaInput(ReplicaChange):
    """A new replica."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=63)
    url = serializers.CharField(max_length=2048)


class ReplicaStateInput(serializers.Serializer[Any]):
    """What is wanted of a replica."""

    state = serializers.ChoiceField(choices=ReplicaState.choices)


TASK_GROUP_FIELDS = schema_fields.GROUP


class TaskGroupSerializer(serializers.ModelSerializer[TaskGroup]):
    """A task group; no replicas means all of its pool's. A setting that is null is its pool's, or none."""

    pool = ByName(read_only=True)
    replicas = ByName(many=True, read_only=True)
    match = SchemaField(TASK_GROUP_FIELDS["match"], read_only=True, allow_null=True)
    tier1 = SchemaField(TASK_GROUP_FIELDS["tier1"], read_only=True, allow_null=True)
    auto_replicas = SchemaField(TASK_GROUP_FIELDS["auto_replicas"], read_only=True, allow_null=True)
    concurrency = SchemaField(TASK_GROUP_FIELDS["concurrency"], read_only=True, allow_null=True)
    caps = SchemaField(TASK_GROUP_FIELDS["caps"], read_only=True, allow_null=True)

    class Meta:
        model = TaskGroup
        fields = (
            "id",
            "pool",
            "name",
            "owner",
            "description",
            "replicas",
            *TASK_GROUP_FIELDS,
            "expected_tier1",
            "hit_rate_objective",
            "created_at",
        )


class TaskGroupChange(serializers.Serializer[Any]):
    """What to change of a task group. A setting is given whole; null takes it back."""

    owner = serializers.CharField(max_length=200, allow_blank=True, required=False)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)
    replicas = ByName(queryset=Replica.objects.all(), many=True, required=False)
    match = SchemaField(TASK_GROUP_FIELDS["match"], required=False, allow_null=True)
    tier1 = SchemaField(TASK_GROUP_FIELDS["tier1"], required=False, allow_null=True)
    auto_replicas = SchemaField(TASK_GROUP_FIELDS["auto_replicas"], required=False, allow_null=True)
    priority = SchemaField(TASK_GROUP_FIELDS["priority"], required=False)
    concurrency = SchemaField(TASK_GROUP_FIELDS["concurrency"], required=False, allow_null=True)
    caps = SchemaField(TASK_GROUP_FIELDS["caps"], required=False, allow_null=True)
    expected_tier1 = serializers.CharField(max_length=16, allow_blank=True, required=False)
    hit_rate_objective = serializers.FloatField(required=False, allow_null=True)


class TaskGroupInput(TaskGroupChange):
    """A new task group."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=30)


CLIENT_KEY_FIELDS = schema_fields.CLIENT_KEY


class ClientKeySerializer(serializers.ModelSerializer[ClientKey]):
    """A client's key, without its text. What is null is not limited."""

    project = ByName(read_only=True)
    models = SchemaField(CLIENT_KEY_FIELDS["models"], read_only=True, allow_null=True)
    groups = SchemaField(CLIENT_KEY_FIELDS["groups"], read_only=True, allow_null=True)
    created_by = by_username("created_by")

    class Meta:
        model = ClientKey
        fields = (
            "id",
            "project",
            "name",
            "full_name",
            "hint",
            *CLIENT_KEY_FIELDS,
            "expires_at",
            "created_at",
            "created_by",
            "revoked_at",
        )


class ClientKeyChange(serializers.Serializer[Any]):
    """What to change of a key. Its text stays."""

    models = SchemaField(CLIENT_KEY_FIELDS["models"], required=False, allow_null=True)
    groups = SchemaField(CLIENT_KEY_FIELDS["groups"], required=False, allow_null=True)
    tenant = serializers.CharField(max_length=30, allow_blank=True, required=False)
    requests_per_s = SchemaField(CLIENT_KEY_FIELDS["requests_per_s"], required=False, allow_null=True)
    burst = SchemaField(CLIENT_KEY_FIELDS["burst"], required=False, allow_null=True)
    tokens_per_min = SchemaField(CLIENT_KEY_FIELDS["tokens_per_min"], required=False, allow_null=True)
    expires_at = serializers.DateTimeField(
        required=False, allow_null=True, help_text="Routers refuse it from then on, by their own clocks; null: never."
    )


class ClientKeyInput(ClientKeyChange):
    """A new key, of one project for good."""

    project = ByName(queryset=Project.objects.all())
    name = serializers.CharField(max_length=30)


class CreatedClientKeySerializer(ClientKeySerializer):
    """A key with its text, shown this once."""

    key = serializers.CharField(read_only=True)

    class Meta(ClientKeySerializer.Meta):
        fields = (*ClientKeySerializer.Meta.fields, "key")


LIMITS = schema_fields.FLEET["limits"]


class FleetSettingsSerializer(serializers.ModelSerializer[FleetSettings]):
    """What holds for all routers; ``limits`` null: the routers' own."""

    limits = SchemaField(LIMITS, read_only=True, allow_null=True)

    class Meta:
        model = FleetSettings
        fields = ("needs_key", "limits")


class FleetSettingsChange(serializers.Serializer[Any]):
    """What to change. Limits are given whole: what is left out takes its default; null takes all of them back."""

    needs_key = serializers.BooleanField(required=False, help_text="Whether only clients with a key are let in.")
    limits = SchemaField(LIMITS, required=False, allow_null=True)


class ProjectSerializer(serializers.ModelSerializer[Project]):
    """A project."""

    class Meta:
        model = Project
        fields = ("name", "description", "needs_approval", "created_at")


class ProjectChange(serializers.Serializer[Any]):
    """What to change of a project. ``needs_approval``: what is published waits for a second person."""

    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)
    needs_approval = serializers.BooleanField(required=False)


class ProjectInput(ProjectChange):
    """A new project. Its name is for good."""

    name = serializers.CharField(max_length=30)
