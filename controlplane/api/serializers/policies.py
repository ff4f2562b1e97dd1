"""Serializers of policies, revisions, rollouts and configurations."""

from __future__ import annotations

from typing import Any

import msgspec
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controlplane.api.fields import ById, ByName, SchemaField, VersionedSerializer, by_username
from controlplane.models import ConfigSnapshot, PolicyRevision, Rollout, RolloutHistoryEntry, RoutingPolicy, TaskGroup
from controlplane.services.impact import DraftWarning, Effect
from controlplane.services.policies.publish_checks import Finding
from controlplane.services.policies.rollout_plans import GuardLimits, Plan, Stage
from controlplane.services.policies.rollouts import RouterProgress, router_progress
from controlplane.services.policies.settings import SettingChange

PLAN_CHOICES = [(str(plan), str(plan)) for plan in Plan]


class RevisionSerializer(serializers.ModelSerializer[PolicyRevision]):
    """One version of a policy. ``fault`` says what named it as faulty: "alert", with its id in ``fault_alert``,
    "analysis", or "" for nothing.
    """

    policy = ByName(read_only=True)
    author = by_username("author")

    class Meta:
        model = PolicyRevision
        fields = (
            *("id", "policy", "number", "state", "settings", "digest", "author", "reason", "created_at"),
            *("published_at", "fault", "fault_alert"),
        )


class PolicySerializer(VersionedSerializer[RoutingPolicy]):
    """A policy with its active revision, its canary and its draft, each null where there is none."""

    pool = ByName(read_only=True)
    group = serializers.CharField(source="group.name", default=None, read_only=True, allow_null=True)
    live = serializers.SerializerMethodField()
    canary = serializers.SerializerMethodField()
    draft = serializers.SerializerMethodField()

    class Meta:
        model = RoutingPolicy
        fields = ("id", "name", "pool", "group", "live", "canary", "draft")

    def get_live(self, policy: RoutingPolicy) -> dict[str, Any] | None:
        """The active revision."""
        return self._revision(policy, "live")

    def get_canary(self, policy: RoutingPolicy) -> dict[str, Any] | None:
        """The revision that is published and not active yet."""
        return self._revision(policy, "canary")

    def get_draft(self, policy: RoutingPolicy) -> dict[str, Any] | None:
        """The revision being edited."""
        return self._revision(policy, "draft")

    def _revision(self, policy: RoutingPolicy, state: str) -> dict[str, Any] | None:
        for revision in policy.revisions.all():  # the viewset fetched these alone
            if revision.state == state:
                return dict(RevisionSerializer(revision).data)
        return None


class PolicyInput(serializers.Serializer[Any]):
    """A policy for a task group."""

    group = ById(queryset=TaskGroup.objects.select_related("pool"))


class DraftInput(serializers.Serializer[Any]):
    """The draft's settings. ``based_on`` is the number of the active revision that you read."""

    settings = serializers.DictField()
    reason = serializers.CharField(max_length=500, allow_blank=True, required=False)
    based_on = serializers.IntegerField(min_value=1, required=False)


class PublishInput(serializers.Serializer[Any]):
    """The reason, the digest of the draft that you read, and the plan of the rollout.

    Without a plan and stages the revision is active at once. Each of your own ``stages`` includes the one before it;
    the revision becomes active after the last one. Where there are stages, ``guard`` defaults to on, with the default
    of every limit that is left out; null switches it off. ``override_reason`` publishes a draft that lacks the
    prediction its pool requires; it is audited. ``confirm_faulted`` publishes settings that an alert or an analysis
    named.
    """

    reason = serializers.CharField(max_length=500, allow_blank=True, required=False)
    digest = serializers.CharField(max_length=64, required=False)
    plan = serializers.ChoiceField(choices=PLAN_CHOICES, required=False)
    stages = SchemaField(tuple[Stage, ...], required=False)
    guard = SchemaField(GuardLimits, required=False, allow_null=True)
    override_reason = serializers.CharField(max_length=500, allow_blank=True, required=False)
    confirm_faulted = serializers.BooleanField(required=False)


class RevertInput(serializers.Serializer[Any]):
    """The revision to return to, and why. ``live`` is the number of the active revision that you read;
    ``confirm_faulted`` publishes settings that an alert or an analysis named.
    """

    revision = serializers.IntegerField(min_value=1, max_value=2**31 - 1)
    reason = serializers.CharField(max_length=400, allow_blank=True, required=False)
    live = serializers.IntegerField(min_value=1, required=False)
    confirm_faulted = serializers.BooleanField(required=False)


class ConfigurationsCompared(serializers.Serializer[Any]):
    """The effects of replacing one configuration by another."""

    before = serializers.IntegerField()
    after = serializers.IntegerField()
    effects = SchemaField(tuple[Effect, ...])


class ComparisonSerializer(ConfigurationsCompared):
    """The differences of two revisions, and their effects in the present fleet."""

    changes = SchemaField(tuple[SettingChange, ...])


class DiffSerializer(ComparisonSerializer):
    """What publishing the draft would change. ``before`` is null where no revision is active yet; ``finding`` is null
    where no prediction speaks against it.
    """

    before = serializers.IntegerField(allow_null=True)
    digest = serializers.CharField()
    warnings = SchemaField(tuple[DraftWarning, ...])
    finding = SchemaField(Finding | None, allow_null=True)


class RevisionsQuery(serializers.Serializer[Any]):
    """Two revisions of one policy, by id; ``to`` would replace ``from``."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """``from`` is a Python keyword, so the fields cannot be declared as attributes."""
        revisions = PolicyRevision.objects.select_related("policy__pool", "policy__group")
        return {name: ById(queryset=revisions) for name in ("from", "to")}


class ConfigurationsQuery(serializers.Serializer[Any]):
    """Two configurations, by number."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        rows = ConfigSnapshot.objects.all()
        return {name: serializers.SlugRelatedField(slug_field="number", queryset=rows) for name in ("from", "to")}


class ReadingSerializer(serializers.Serializer[Any]):
    """A metric of the canary analysis, with its limit; null where it is unknown."""

    name = serializers.CharField()
    unit = serializers.CharField()
    baseline = serializers.FloatField(allow_null=True)
    canary = serializers.FloatField(allow_null=True)
    limit = serializers.FloatField(allow_null=True)
    verdict = serializers.CharField()
    detail = serializers.CharField()
    canary_requests = serializers.IntegerField(allow_null=True, default=None)
    baseline_requests = serializers.IntegerField(allow_null=True, default=None)


class RolloutSerializer(VersionedSerializer[Rollout]):
    """A rollout of a revision. Without stages the revision is active already and being pushed to the routers."""

    policy = serializers.CharField(source="revision.policy.name", read_only=True)
    revision = serializers.IntegerField(source="revision.number", read_only=True)
    snapshot = serializers.IntegerField(source="snapshot.number", default=None, read_only=True)
    plan = serializers.ChoiceField(choices=PLAN_CHOICES, read_only=True)
    stages = SchemaField(tuple[Stage, ...], read_only=True)
    guard = SchemaField(GuardLimits, read_only=True, allow_null=True)
    readings = serializers.ListField(child=ReadingSerializer(), read_only=True)
    started_by = by_username("started_by")
    approved_by = by_username("approved_by")

    class Meta:
        model = Rollout
        fields = (
            *("id", "policy", "revision", "snapshot", "plan", "state", "held_by", "why", "stage", "stages"),
            *("stage_since", "stage_converged_at", "guard", "readings", "readings_at"),
            *("started_by", "approved_by", "started_at", "finished_at"),
        )


class RolloutHistorySerializer(serializers.ModelSerializer[RolloutHistoryEntry]):
    """One transition: from which state to which, at which stage, by whom, why, and on what evidence."""

    by = by_username("by")
    evidence = serializers.JSONField(read_only=True, allow_null=True)

    class Meta:
        model = RolloutHistoryEntry
        fields = ("at", "transition", "before", "after", "stage", "by", "reason", "evidence")


class RolloutDetailSerializer(RolloutSerializer):
    """A rollout with its steps, oldest first, and with every router."""

    history = RolloutHistorySerializer(many=True, read_only=True)
    routers = serializers.SerializerMethodField()

    class Meta(RolloutSerializer.Meta):
        fields = (*RolloutSerializer.Meta.fields, "history", "routers")  # type: ignore[assignment]  # longer

    @extend_schema_field(SchemaField(tuple[RouterProgress, ...]))
    def get_routers(self, rollout: Rollout) -> Any:
        return msgspec.to_builtins(router_progress(rollout))


class TransitionInput(serializers.Serializer[Any]):
    """The reason, which the rollout's step records."""

    reason = serializers.CharField(max_length=500, allow_blank=True, required=False)


class ConfigurationSerializer(serializers.ModelSerializer[ConfigSnapshot]):
    """A configuration of all routers, without its content."""

    created_by = by_username("created_by")

    class Meta:
        model = ConfigSnapshot
        fields = ("number", "sha256", "reason", "created_by", "created_at")


class WholeConfigurationSerializer(ConfigurationSerializer):
    """A configuration with its content; every secret is ``***``."""

    document = serializers.JSONField()

    class Meta(ConfigurationSerializer.Meta):
        fields = (*ConfigurationSerializer.Meta.fields, "document")  # type: ignore[assignment]  # one longer
