"""Rollouts as JSON."""

from __future__ import annotations

from rest_framework import serializers

from controlplane.models import Rollout

from .base import by_username


class RolloutSerializer(serializers.ModelSerializer[Rollout]):
    """A revision on its way to the routers."""

    policy = serializers.CharField(source="revision.policy.name", read_only=True)
    revision = serializers.IntegerField(source="revision.number", read_only=True)
    snapshot = serializers.IntegerField(source="snapshot.number", read_only=True)
    started_by = by_username("started_by")

    class Meta:
        model = Rollout
        fields = ("id", "policy", "revision", "snapshot", "state", "started_by", "started_at", "finished_at")
