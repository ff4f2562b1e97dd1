"""Projects as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.models import Project


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
