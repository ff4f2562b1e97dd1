"""Task groups as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.fields import ByName
from controlplane.models import Pool, Replica, TaskGroup


class TaskGroupSerializer(serializers.ModelSerializer[TaskGroup]):
    """A task group; no replicas means all of its pool's."""

    pool = ByName(read_only=True)
    replicas = ByName(many=True, read_only=True)

    class Meta:
        model = TaskGroup
        fields = ("id", "pool", "name", "owner", "description", "replicas", "created_at")


class TaskGroupChange(serializers.Serializer[Any]):
    """What to change of a task group."""

    owner = serializers.CharField(max_length=200, allow_blank=True, required=False)
    description = serializers.CharField(max_length=1000, allow_blank=True, required=False)
    replicas = ByName(queryset=Replica.objects.all(), many=True, required=False)


class TaskGroupInput(TaskGroupChange):
    """A new task group."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=30)
