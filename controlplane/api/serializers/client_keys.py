"""Client keys as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import router_fields
from controlplane.api.fields import ByName
from controlplane.api.schema_fields import SchemaField
from controlplane.models import ClientKey, Project

from .base import by_username

KINDS = router_fields.CLIENT_KEY


class ClientKeySerializer(serializers.ModelSerializer[ClientKey]):
    """A client's key, without its text. What is null is not limited."""

    project = ByName(read_only=True)
    models = SchemaField(KINDS["models"], read_only=True, allow_null=True)
    groups = SchemaField(KINDS["groups"], read_only=True, allow_null=True)
    created_by = by_username("created_by")

    class Meta:
        model = ClientKey
        fields = (
            "id",
            "project",
            "name",
            "full_name",
            "hint",
            *KINDS,
            "expires_at",
            "created_at",
            "created_by",
            "revoked_at",
        )


class ClientKeyChange(serializers.Serializer[Any]):
    """What to change of a key. Its text stays."""

    models = SchemaField(KINDS["models"], required=False, allow_null=True)
    groups = SchemaField(KINDS["groups"], required=False, allow_null=True)
    tenant = serializers.CharField(max_length=30, allow_blank=True, required=False)
    requests_per_s = SchemaField(KINDS["requests_per_s"], required=False, allow_null=True)
    burst = SchemaField(KINDS["burst"], required=False, allow_null=True)
    tokens_per_min = SchemaField(KINDS["tokens_per_min"], required=False, allow_null=True)
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
