"""Policies and their revisions as JSON.

Rollouts as JSON.

Configurations as JSON.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controlplane.api.fields import ById, ByName, SchemaField, by_username
from controlplane.models import ConfigSnapshot, PolicyRevision, Rollout, RolloutStep, RoutingPolicy, TaskGroup
from controlplane.services.impact.effect import Impact
from controlplane.services.policies.rollout_plans import GuardLimits, Plan, Stage
from controlplane.services.policies.rollouts import Progress, router_progress


class RevisionSerializer(serializers.ModelSerializer[PolicyRevision]):
    """One version of a policy."""

    policy = ByName(read_only=True)
    author = by_username("author")

    class Meta:
        model = PolicyRevision
        fields = (
            "id",
            "policy",
            "number",
            "state",
            "settings",
            "digest",
            "author",
            "reason",
            "created_at",
            "published_at",
        )


class PolicySerializer(serializers.ModelSerializer[RoutingPolicy]):
    """A policy with its live revision, the one on trial and its draft, each null where there is none."""

    pool = ByName(read_only=True)
    group = serializers.CharField(source="group.name", default=None, read_only=True, allow_null=True)
    live = serializers.SerializerMethodField()
    trial = serializers.SerializerMethodField()
    draft = serializers.SerializerMethodField()

    class Meta:
        model = RoutingPolicy
        fields = ("id", "name", "pool", "group", "live", "trial", "draft")

    def get_live(self, policy: RoutingPolicy) -> dict[str, Any] | None:
        """The revision in force."""
        return self._revision(policy, "live")

    def get_trial(self, policy: RoutingPolicy) -> dict[str, Any] | None:
        """The revision that is published and not in force yet."""
        return self._revision(policy, "trial")

    def get_draft(self, policy: RoutingPolicy) -> dict[str, Any] | None:
        """The revision being edited."""
        return self._revision(policy, "draft")

    def _revision(self, policy: RoutingPolicy, state: str) -> dict[str, Any] | None:
        for revision in policy.revisions.all():  # the viewset fetched these alone
            if revision.state == state:
                return dict(RevisionSerializer(revision).data)
        return None


class PolicyInput(serializers.Serializer[Any]):
    """A policy of its own for a task group."""

    group = ById(queryset=TaskGroup.objects.select_related("pool"))


class DraftInput(serializers.Serializer[Any]):
    """What the draft should say. ``based_on`` is the number of the live revision that you looked at."""

    settings = serializers.DictField()
    reason = serializers.CharField(max_length=500, allow_blank=True, required=False)
    based_on = serializers.IntegerField(min_value=1, required=False)


class PublishInput(serializers.Serializer[Any]):
    """Why, the digest of the draft that you looked at, and how it is to come into force.

    Without a plan and stages all at once. ``stages`` are laid out by you; each includes the one before it, and what
    puts the revision in force, everything, follows the last. ``guard`` is on where there are stages, with the default
    of every limit that is left out; null for none.
    """

    reason = serializers.CharField(max_length=500, allow_blank=True, required=False)
    digest = serializers.CharField(max_length=64, required=False)
    plan = serializers.ChoiceField(choices=[(str(plan), str(plan)) for plan in Plan], required=False)
    stages = SchemaField(tuple[Stage, ...], required=False)
    guard = SchemaField(GuardLimits, required=False, allow_null=True)


class RevertInput(serializers.Serializer[Any]):
    """Which revision to go back to, and why; ``live`` is the number of the live one that you looked at."""

    revision = serializers.IntegerField(min_value=1, max_value=2**31 - 1)
    reason = serializers.CharField(max_length=400, allow_blank=True, required=False)
    live = serializers.IntegerField(min_value=1, required=False)


class SettingChangeSerializer(serializers.Serializer[Any]):
    """One difference between two versions."""

    field = serializers.CharField()
    before = serializers.JSONField(allow_null=True)
    after = serializers.JSONField(allow_null=True)
    meaning = serializers.CharField()


class EffectSerializer(serializers.Serializer[Any]):
    """One consequence of a change: for whom, what it does, and how much moves; null where that is not known."""

    kind = serializers.CharField()
    impact = serializers.ChoiceField(choices=[(str(impact), str(impact)) for impact in Impact])
    resets = serializers.BooleanField()
    who = serializers.ListField(child=serializers.CharField())
    text = serializers.CharField()
    before = serializers.JSONField(allow_null=True)
    after = serializers.JSONField(allow_null=True)
    moved_ratio = serializers.FloatField(allow_null=True, min_value=0, max_value=1)


class DraftWarningSerializer(serializers.Serializer[Any]):
    """Something to look at before publishing: what is likely wrong, what works all the same, what to do."""

    id = serializers.CharField()
    field = serializers.CharField(allow_blank=True)
    text = serializers.CharField()
    still_safe = serializers.CharField()
    to_do = serializers.CharField()


class DiffSerializer(serializers.Serializer[Any]):
    """What going live would change. ``before`` is null where nothing is live yet."""

    before = serializers.IntegerField(allow_null=True)
    after = serializers.IntegerField()
    digest = serializers.CharField()
    changes = SettingChangeSerializer(many=True)
    effects = EffectSerializer(many=True)
    warnings = DraftWarningSerializer(many=True)


class RevisionsAsked(serializers.Serializer[Any]):
    """Two revisions of one policy, by their ids; ``from`` is what would be replaced."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """``from`` is a word of Python's own."""
        revisions = PolicyRevision.objects.select_related("policy__pool", "policy__group")
        return {"from": ById(queryset=revisions), "to": ById(queryset=revisions)}


class ComparisonSerializer(serializers.Serializer[Any]):
    """What one revision says and does instead of another, in the fleet as it is now."""

    before = serializers.IntegerField()
    after = serializers.IntegerField()
    changes = SettingChangeSerializer(many=True)
    effects = EffectSerializer(many=True)


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
        return [asdict(router) for router in router_progress(rollout)]


class MoveInput(serializers.Serializer[Any]):
    """Why; it stands in the rollout's steps."""

    reason = serializers.CharField(max_length=500, allow_blank=True, required=False)


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
