"""Projects as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.models import Project


class ProjectSerializer(serializers.ModelSerializer[Project]):
    """A project."""

    class Meta:
        model = Project
        fields = ("name", "description", "created_at")


class ProjectInput(serializers.Serializer[Any]):
    """A new project."""

    name = serializers.CharField(max_length=30)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)
