"""The fleet's settings as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane import router_fields
from controlplane.api.schema_fields import SchemaField
from controlplane.models import FleetSettings

LIMITS = router_fields.FLEET["limits"]


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
