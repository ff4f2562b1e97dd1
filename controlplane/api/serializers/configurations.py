"""Configurations as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.models import ConfigSnapshot

from .base import by_username
from .policies import EffectSerializer


class ConfigurationSerializer(serializers.ModelSerializer[ConfigSnapshot]):
    """What every router was told to run, by its number."""

    created_by = by_username("created_by")

    class Meta:
        model = ConfigSnapshot
        fields = ("number", "sha256", "reason", "created_by", "created_at")


class WholeConfigurationSerializer(serializers.ModelSerializer[ConfigSnapshot]):
    """The same with all that it says; every secret is ``***``."""

    created_by = by_username("created_by")
    document = serializers.JSONField()

    class Meta:
        model = ConfigSnapshot
        fields = (*ConfigurationSerializer.Meta.fields, "document")


class ConfigurationsCompared(serializers.Serializer[Any]):
    """What one configuration does instead of another."""

    before = serializers.IntegerField()
    after = serializers.IntegerField()
    effects = EffectSerializer(many=True)


class ConfigurationsAsked(serializers.Serializer[Any]):
    """Two configurations, by their numbers."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """``from`` is a word of Python's own."""
        rows = ConfigSnapshot.objects.all()
        return {name: serializers.SlugRelatedField(slug_field="number", queryset=rows) for name in ("from", "to")}
