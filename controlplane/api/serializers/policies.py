"""Serializers of policies, revisions, rollouts and configurations."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controlplane.api.fields import ById, ByName, SchemaField, VersionedSerializer, by_username
from controlplane.models import ConfigSnapshot, PolicyRevision, Rollout, RolloutHistoryEntry, RoutingPolicy, TaskGroup
from controlplane.services.impact import Impact
from controlplane.services.policies.publish_checks import FindingCode
from controlplane.services.policies.rollout_plans import GuardLimits, Plan, Stage
from controlplane.services.policies.rollouts import Progress, router_progress

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


class SettingChangeSerializer(serializers.Serializer[Any]):
    """One difference between two revisions."""

    field = serializers.CharField()
    before = serializers.JSONField(allow_null=True)
    after = serializers.JSONField(allow_null=True)
    meaning = serializers.CharField()


class EffectSerializer(serializers.Serializer[Any]):
    """One effect of a change. ``affected`` names whose requests; ``moved_ratio`` is null where it is unknown."""

    kind = serializers.CharField()
    impact = serializers.ChoiceField(choices=[(str(impact), str(impact)) for impact in Impact])
    affected = serializers.ListField(child=serializers.CharField())
    text = serializers.CharField()
    before = serializers.JSONField(allow_null=True)
    after = serializers.JSONField(allow_null=True)
    moved_ratio = serializers.FloatField(allow_null=True, min_value=0, max_value=1)


class DraftWarningSerializer(serializers.Serializer[Any]):
    """A likely mistake in a draft, what it does not affect, and what to do."""

    id = serializers.CharField()
    field = serializers.CharField(allow_blank=True)
    text = serializers.CharField()
    unaffected = serializers.CharField()
    to_do = serializers.CharField()


class ConfigurationsCompared(serializers.Serializer[Any]):
    """The effects of replacing one configuration by another."""

    before = serializers.IntegerField()
    after = serializers.IntegerField()
    effects = EffectSerializer(many=True)


class ComparisonSerializer(ConfigurationsCompared):
    """The differences of two revisions, and their effects in the present fleet."""

    changes = SettingChangeSerializer(many=True)


class PredictedFigureSerializer(serializers.Serializer[Any]):
    """A figure of the active policy and the draft, both replayed; null: unknown. ``difference`` has a 95 % interval."""

    name = serializers.CharField()
    title = serializers.CharField()
    active = serializers.FloatField(allow_null=True)
    predicted = serializers.FloatField(allow_null=True)
    difference = serializers.DictField(child=serializers.FloatField(), allow_null=True)
    limit = serializers.FloatField(allow_null=True)
    is_exceeded = serializers.BooleanField()


class FindingSerializer(serializers.Serializer[Any]):
    """What speaks against publishing; with ``blocks`` publishing needs an ``override_reason``."""

    code = serializers.ChoiceField(choices=[(code.value, code.name) for code in FindingCode])
    detail = serializers.CharField()
    to_do = serializers.CharField()
    links = serializers.DictField()
    figures = PredictedFigureSerializer(many=True)
    blocks = serializers.BooleanField()


class DiffSerializer(ComparisonSerializer):
    """What publishing the draft would change. ``before`` is null where no revision is active yet; ``finding`` is null
    where no prediction speaks against it.
    """

    before = serializers.IntegerField(allow_null=True)
    digest = serializers.CharField()
    warnings = DraftWarningSerializer(many=True)
    finding = FindingSerializer(allow_null=True)


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


class RouterProgressSerializer(serializers.Serializer[Any]):
    """One router's progress towards the configuration of the current stage."""

    name = serializers.CharField()
    progress = serializers.ChoiceField(choices=[(str(progress), str(progress)) for progress in Progress])
    gets_canary_requests = serializers.BooleanField()
    running = serializers.IntegerField(allow_null=True)
    reason = serializers.CharField()


class RolloutDetailSerializer(RolloutSerializer):
    """A rollout with its steps, oldest first, and with every router."""

    history = RolloutHistorySerializer(many=True, read_only=True)
    routers = serializers.SerializerMethodField()

    class Meta(RolloutSerializer.Meta):
        fields = (*RolloutSerializer.Meta.fields, "history", "routers")  # type: ignore[assignment]  # longer

    @extend_schema_field(RouterProgressSerializer(many=True))
    def get_routers(self, rollout: Rollout) -> Any:
        return RouterProgressSerializer(router_progress(rollout), many=True).data


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
