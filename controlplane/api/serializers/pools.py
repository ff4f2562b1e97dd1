"""Pools as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.fields import ByName
from controlplane.models import Pool, Project


class PoolSerializer(serializers.ModelSerializer[Pool]):
    """A pool."""

    project = ByName(read_only=True)

    class Meta:
        model = Pool
        fields = ("name", "project", "models", "description", "created_at")


class PoolChange(serializers.Serializer[Any]):
    """What to change of a pool."""

    models = serializers.ListField(child=serializers.CharField(max_length=256), max_length=256, required=False)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)


class PoolInput(PoolChange):
    """A new pool; without a project it belongs to the one called ``default``. Name and project are for good."""

    name = serializers.CharField(max_length=30)
    project = ByName(queryset=Project.objects.all(), required=False)
