"""Serializers of projects, pools, replicas, replica sources, task groups, client keys and fleet settings."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import schema_fields
from controlplane.api.fields import (
    ByName,
    SchemaField,
    SettingsInput,
    SettingsModelSerializer,
    VersionedSerializer,
    by_username,
    check_allowed,
)
from controlplane.discovery import KINDS
from controlplane.models import (
    Adoption,
    ClientKey,
    DiscoveredReplica,
    FleetSettings,
    Pool,
    Project,
    Replica,
    ReplicaSource,
    ReplicaState,
    SourceStatus,
    TaskGroup,
)
from controlplane.services.fleet.kv_event_sources import ReportedKvEvents
from controlplane.services.fleet.pools import POOL_SETTINGS, default_project
from controlplane.services.fleet.served_models import unnamed_model_warning
from controlplane.services.fleet.task_groups import CACHE_KEY_EXPECTED
from routing.schema import CACHE_KEY_PATTERN


class ProjectSerializer(VersionedSerializer[Project]):
    class Meta:
        model = Project
        fields = ("name", "description", "needs_approval", "created_at")


class ProjectChange(serializers.Serializer[Any]):
    """Changes of a project. ``needs_approval``: a second user must approve each publication."""

    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)
    needs_approval = serializers.BooleanField(required=False)


class ProjectInput(ProjectChange):
    """A new project. The name cannot be changed later."""

    name = serializers.CharField(max_length=30)


class PoolSerializer(SettingsModelSerializer):
    """A pool. Null means the routers' own default; of ``what_if``, which routers do not receive, its defaults."""

    settings = POOL_SETTINGS
    project = ByName(read_only=True)
    kv_bytes_per_token = serializers.IntegerField(
        read_only=True, allow_null=True, help_text="KV cache of one token, by kv_cache; null: unknown."
    )

    class Meta:
        model = Pool
        fields = ("name", "project", "description", *POOL_SETTINGS, "kv_bytes_per_token", "created_at")


class CreatedPoolSerializer(PoolSerializer):
    """A new pool, with warnings about its effect on existing clients."""

    warnings = serializers.SerializerMethodField(help_text="What to tell clients; empty for most pools.")

    class Meta(PoolSerializer.Meta):
        fields = (*PoolSerializer.Meta.fields, "warnings")

    def get_warnings(self, pool: Pool) -> list[str]:
        return [warning] if (warning := unnamed_model_warning(pool)) else []


class PoolChange(SettingsInput):
    """Changes of a pool. A setting is sent whole: missing members take their defaults; null restores the default."""

    model, settings = Pool, POOL_SETTINGS
    models = serializers.ListField(child=serializers.CharField(max_length=256), max_length=256, required=False)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)


class PoolInput(PoolChange):
    """A new pool, in the project ``default`` unless another is named. Name and project cannot be changed later."""

    name = serializers.CharField(max_length=30)
    project = ByName(queryset=Project.objects.all(), required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """PermissionDenied for a pool in the default project where the actor may not create one there."""
        if "project" not in attrs and "request" in self.context:
            check_allowed(self.context["request"], default_project())
        return attrs


class ReplicaSerializer(SettingsModelSerializer):
    """A replica as it is configured; telemetry says whether it is up. Its API key is never shown."""

    settings = schema_fields.REPLICA
    pool = ByName(read_only=True)
    labels = serializers.DictField(child=serializers.CharField(), read_only=True)
    reported_kv_events = SchemaField(
        ReportedKvEvents | None,
        read_only=True,
        allow_null=True,
        help_text="What the engine says of its KV events, for kv_events; null: nothing known, or it publishes none.",
    )

    class Meta:
        model = Replica
        fields = (
            *("name", "pool", "url", "state", "weight", "labels", *schema_fields.REPLICA),
            *("api_key_set_at", "block_tokens", "capacity_blocks", "reported_kv_events", "created_at"),
        )


class ReplicaChange(SettingsInput):
    """Changes of a replica. The name is its identity on every hash ring and cannot be changed."""

    model, settings = Replica, schema_fields.REPLICA
    url = serializers.CharField(max_length=2048, required=False)
    weight = serializers.FloatField(required=False)
    labels = serializers.DictField(child=serializers.CharField(allow_blank=True), required=False)
    api_key = serializers.CharField(
        write_only=True,
        max_length=1024,
        trim_whitespace=False,
        required=False,
        allow_null=True,
        help_text="The key that the engine requires. Stored encrypted and never shown; null removes it.",
    )


class ReplicaInput(ReplicaChange):
    """A new replica."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=63)
    url = serializers.CharField(max_length=2048)


class ReplicaStateInput(serializers.Serializer[Any]):
    """The state that a replica should be in."""

    state = serializers.ChoiceField(choices=ReplicaState.choices)


class TaskGroupSerializer(SettingsModelSerializer):
    """A task group. No replicas means all replicas of the pool; a null setting is the pool's, or none."""

    settings = schema_fields.GROUP
    pool = ByName(read_only=True)
    replicas = ByName(many=True, read_only=True)

    class Meta:
        model = TaskGroup
        fields = (
            *("id", "pool", "name", "owner", "description", "replicas", *schema_fields.GROUP),
            *("expected_tier1", "hit_rate_objective", "created_at"),
        )


class TaskGroupChange(SettingsInput):
    """Changes of a task group. A setting is sent whole; null restores the pool's."""

    model, settings = TaskGroup, schema_fields.GROUP
    owner = serializers.CharField(max_length=200, allow_blank=True, required=False)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)
    replicas = ByName(queryset=Replica.objects.all(), many=True, required=False)
    expected_tier1 = serializers.CharField(max_length=16, allow_blank=True, required=False)
    hit_rate_objective = serializers.FloatField(required=False, allow_null=True)


class TaskGroupInput(TaskGroupChange):
    """A new task group."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=30)


class PurgeInput(serializers.Serializer[Any]):
    """Which stored responses of a task group to remove."""

    model = serializers.CharField(
        max_length=300, required=False, allow_null=True, help_text="Of this model only, or of one of its aliases."
    )
    namespace = serializers.CharField(
        max_length=128,
        required=False,
        allow_null=True,
        allow_blank=True,
        trim_whitespace=False,
        help_text='Of this namespace only; "" is that of requests that name none.',
    )
    key = serializers.RegexField(
        CACHE_KEY_PATTERN,
        required=False,
        allow_null=True,
        error_messages={"invalid": CACHE_KEY_EXPECTED},
        help_text="The one that responses name in X-Warmpath-Cache-Key.",
    )


class RouterPurgeSerializer(serializers.Serializer[Any]):
    """Entries that one router removed; null is unknown, or no store. ``problem`` says why entries may be left."""

    router = serializers.CharField()
    memory_entries = serializers.IntegerField(allow_null=True)
    store_entries = serializers.IntegerField(allow_null=True)
    remaining_entries = serializers.IntegerField(allow_null=True)
    problem = serializers.CharField(allow_null=True)


class PurgeSerializer(serializers.Serializer[Any]):
    """A complete purge: every router removed the entries."""

    routers = RouterPurgeSerializer(many=True)


CLIENT_KEY_SETTINGS = {name: kind for name, kind in schema_fields.CLIENT_KEY.items() if name != "tenant"}


class ClientKeySerializer(SettingsModelSerializer):
    """A client's API key, without its text. A null field sets no limit."""

    settings = CLIENT_KEY_SETTINGS
    project = ByName(read_only=True)
    created_by = by_username("created_by")

    class Meta:
        model = ClientKey
        fields = (
            *("id", "project", "name", "full_name", "hint", *schema_fields.CLIENT_KEY),
            *("expires_at", "created_at", "created_by", "revoked_at"),
        )


class ClientKeyChange(SettingsInput):
    """Changes of a client key. Its text stays the same."""

    model, settings = ClientKey, CLIENT_KEY_SETTINGS
    tenant = serializers.CharField(max_length=30, allow_blank=True, required=False)
    expires_at = serializers.DateTimeField(
        required=False, allow_null=True, help_text="Routers reject the key from then on, by their own clocks."
    )


class ClientKeyInput(ClientKeyChange):
    """A new client key. Its project cannot be changed later."""

    project = ByName(queryset=Project.objects.all())
    name = serializers.CharField(max_length=30)


class CreatedClientKeySerializer(ClientKeySerializer):
    """A client key with its text, which is shown only once."""

    key = serializers.CharField(read_only=True)

    class Meta(ClientKeySerializer.Meta):
        fields = (*ClientKeySerializer.Meta.fields, "key")


class FleetSettingsSerializer(SettingsModelSerializer):
    """Settings of all routers. Null ``limits`` are the routers' defaults."""

    settings = schema_fields.FLEET

    class Meta:
        model = FleetSettings
        fields = ("needs_key", "limits")


class FleetSettingsChange(SettingsInput):
    """Changes. Limits are sent whole: missing members take their defaults; null restores all defaults."""

    model, settings = FleetSettings, schema_fields.FLEET
    needs_key = serializers.BooleanField(required=False, help_text="Whether clients need an API key.")


KIND_CHOICES = [(kind.name, kind.label) for kind in KINDS.values()]


class SourceSerializer(VersionedSerializer[ReplicaSource]):
    """A replica source and the outcome of its last poll. Its secret is never shown."""

    pool = ByName(read_only=True)
    status = serializers.ChoiceField(choices=SourceStatus.choices, read_only=True)
    has_secret = serializers.SerializerMethodField()
    rejected = serializers.ListField(child=serializers.CharField(), read_only=True)
    settings = serializers.DictField(read_only=True)

    class Meta:
        model = ReplicaSource
        fields = (
            *("name", "pool", "kind", "settings", "has_secret", "adoption", "enabled", "interval_s", "deadline_s"),
            *("drain_after_s", "remove_after_s", "max_vanished_ratio", "max_targets", "created_at"),
            *("status", "last_poll_at", "succeeded_at", "failing_since", "next_poll_at", "error", "hold_reason"),
            *("rejected", "found", "new", "vanished"),
        )

    def get_has_secret(self, source: ReplicaSource) -> bool:
        return source.encrypted is not None


class SourceChange(serializers.Serializer[Any]):
    """Changes of a source; an empty secret removes the stored one. Name, kind and pool cannot be changed."""

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
    """An engine that a source reports; ``replica`` is null unless it was adopted."""

    source = ByName(read_only=True)  # type: ignore[assignment]  # a field called like an attribute of fields
    pool = serializers.CharField(source="source.pool.name", read_only=True)
    replica = ByName(read_only=True, allow_null=True)
    labels = serializers.DictField(child=serializers.CharField(), read_only=True)

    class Meta:
        model = DiscoveredReplica
        fields = (
            *("id", "source", "pool", "key", "name", "url", "condition", "labels", "state", "replica"),
            *("first_seen_at", "last_seen_at", "missing_since", "drained_at", "problem"),
        )


class AdoptInput(serializers.Serializer[Any]):
    """The name of the new replica; by default the source's name for it."""

    name = serializers.CharField(max_length=63, required=False)
