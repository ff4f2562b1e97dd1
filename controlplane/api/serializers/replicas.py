"""Replicas as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import router_fields
from controlplane.api.fields import ByName
from controlplane.api.schema_fields import SchemaField
from controlplane.models import Pool, Replica, ReplicaState

KINDS = router_fields.REPLICA


class ReplicaSerializer(serializers.ModelSerializer[Replica]):
    """A replica as an operator wants it; whether it answers is telemetry's to say. Its key is never shown."""

    pool = ByName(read_only=True)
    labels = serializers.DictField(child=serializers.CharField(), read_only=True)
    adapters = SchemaField(KINDS["adapters"], read_only=True, allow_null=True)

    class Meta:
        model = Replica
        fields = (
            "name",
            "pool",
            "url",
            "state",
            "weight",
            "labels",
            *KINDS,
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
    adapters = SchemaField(KINDS["adapters"], required=False, allow_null=True)
    data_parallel_size = SchemaField(KINDS["data_parallel_size"], required=False)
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
