"""Rollouts as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controlplane.api.schema_fields import SchemaField
from controlplane.models import Rollout, RolloutStep
from controlplane.services.rollouts.guard_limits import GuardLimits
from controlplane.services.rollouts.plans import Plan, Stage
from controlplane.services.rollouts.progress import Progress, routers_of

from .base import by_username


class ReadingSerializer(serializers.Serializer[Any]):
    """What the guard read, beside what it tolerates; null where it is not known."""

    name = serializers.CharField()
    unit = serializers.CharField()
    baseline = serializers.FloatField(allow_null=True)
    trial = serializers.FloatField(allow_null=True)
    limit = serializers.FloatField(allow_null=True)
    verdict = serializers.CharField()
    detail = serializers.CharField()


class RolloutSerializer(serializers.ModelSerializer[Rollout]):
    """A revision on its way into force. Without stages it is in force already, and on its way to the routers."""

    policy = serializers.CharField(source="revision.policy.name", read_only=True)
    revision = serializers.IntegerField(source="revision.number", read_only=True)
    snapshot = serializers.IntegerField(source="snapshot.number", default=None, read_only=True)
    plan = serializers.ChoiceField(choices=[(str(plan), str(plan)) for plan in Plan], read_only=True)
    stages = SchemaField(tuple[Stage, ...], read_only=True)
    guard = SchemaField(GuardLimits, read_only=True, allow_null=True)
    readings = serializers.ListField(child=ReadingSerializer(), read_only=True)
    started_by = by_username("started_by")
    approved_by = by_username("approved_by")

    class Meta:
        model = Rollout
        fields = (
            "id",
            "policy",
            "revision",
            "snapshot",
            "plan",
            "state",
            "held_by",
            "why",
            "stage",
            "stages",
            "stage_since",
            "stage_converged_at",
            "guard",
            "readings",
            "readings_at",
            "started_by",
            "approved_by",
            "started_at",
            "finished_at",
        )


class StepSerializer(serializers.ModelSerializer[RolloutStep]):
    """One move: from which state to which, at which stage, by whom, why, and by what it was decided."""

    by = by_username("by")
    evidence = serializers.JSONField(read_only=True, allow_null=True)

    class Meta:
        model = RolloutStep
        fields = ("at", "move", "before", "after", "stage", "by", "reason", "evidence")


class RouterProgressSerializer(serializers.Serializer[Any]):
    """One router against the configuration of the present stage."""

    name = serializers.CharField()
    progress = serializers.ChoiceField(choices=[(str(word), str(word)) for word in Progress])
    on_trial = serializers.BooleanField()
    running = serializers.IntegerField(allow_null=True)
    reason = serializers.CharField()


class RolloutDetailSerializer(RolloutSerializer):
    """The same with its steps, the oldest first, and with every router."""

    steps = StepSerializer(many=True, read_only=True)
    routers = serializers.SerializerMethodField()

    class Meta(RolloutSerializer.Meta):
        fields = (*RolloutSerializer.Meta.fields, "steps", "routers")  # type: ignore[assignment]  # longer

    @extend_schema_field(RouterProgressSerializer(many=True))
    def get_routers(self, rollout: Rollout) -> list[dict[str, Any]]:
        """Every router."""
        return [asdict(router) for router in routers_of(rollout)]


class MoveInput(serializers.Serializer[Any]):
    """Why; it stands in the rollout's steps."""

    reason = serializers.CharField(max_length=500, allow_blank=True, required=False)
