"""Replicas as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.fields import ByName
from controlplane.models import Pool, Replica, ReplicaState


class ReplicaSerializer(serializers.ModelSerializer[Replica]):
    """A replica as an operator wants it; whether it answers is telemetry's to say."""

    pool = ByName(read_only=True)

    class Meta:
        model = Replica
        fields = ("name", "pool", "url", "state", "weight", "block_tokens", "capacity_blocks", "created_at")


class ReplicaChange(serializers.Serializer[Any]):
    """What to change of a replica. The name is its identity on every ring and stays."""

    url = serializers.CharField(max_length=2048, required=False)
    weight = serializers.FloatField(required=False)


class ReplicaInput(serializers.Serializer[Any]):
    """A new replica."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=63)
    url = serializers.CharField(max_length=2048)
    weight = serializers.FloatField(required=False)


class ReplicaStateInput(serializers.Serializer[Any]):
    """What is wanted of a replica."""

    state = serializers.ChoiceField(choices=ReplicaState.choices)
