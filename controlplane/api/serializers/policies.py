"""Policies and their revisions as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.fields import ById, ByName
from controlplane.api.schema_fields import SchemaField
from controlplane.models import PolicyRevision, RoutingPolicy, TaskGroup
from controlplane.services.effects import Impact
from controlplane.services.rollouts.guard_limits import GuardLimits
from controlplane.services.rollouts.plans import Plan, Stage

from .base import by_username


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
