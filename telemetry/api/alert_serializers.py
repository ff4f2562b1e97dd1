"""Serializers of alert rules, alerts and silences."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from drf_spectacular.plumbing import ResolvedComponent
from rest_framework import serializers

from controlplane.api.fields import ByName, VersionedSerializer
from controlplane.models import Pool, Project
from controlplane.schema_fields import json_schemas
from telemetry.alerts.kinds import KINDS
from telemetry.api.serializers import MATCHERS, MatcherField
from telemetry.models import Alert, AlertHistoryEntry, AlertRule, RuleKind, Severity, Silence, SuppressionReason
from telemetry.services.alerts.alerts import conditions
from telemetry.services.alerts.previews import DAYS, MAX_DAYS
from telemetry.services.alerts.rules import effective_settings


class RuleSettingsField(serializers.DictField):
    """Settings of a rule; the service validates them by the rule's kind."""


class RuleSettingsScheme(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]  # registers itself, untyped
    """OpenAPI schema of rule settings: any of the kinds' structs."""

    target_class = RuleSettingsField

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:  # noqa: ARG002 - spectacular's
        kinds = [kind.settings for kind in KINDS.values()]
        schemas, components = json_schemas(kinds, "#/components/schemas/{name}")
        for name, body in components.items():
            component = ResolvedComponent(name, ResolvedComponent.SCHEMA, body, name)  # type: ignore[no-untyped-call]  # as above
            auto_schema.registry.register_on_missing(component)
        return {"anyOf": list(schemas), "description": "Settings of the rule's kind; omitted ones have their defaults."}


VERDICT = "Result and reason of the last evaluation; figures may be a minute older unless the rule has an open alert."
RUNBOOK = "URL of your own instructions, in the messages of the rule's alerts."
REPEATED = "Interval in seconds of repeated notifications of an unacknowledged alert; 0: never."


class AlertRuleSerializer(VersionedSerializer[AlertRule]):
    """A rule; ``settings`` are set explicitly, ``effective_settings`` include defaults."""

    pool = ByName(read_only=True)
    group = ByName(read_only=True, allow_null=True)
    settings = RuleSettingsField()
    effective_settings = serializers.SerializerMethodField()
    evaluated_at = serializers.DateTimeField(source="last_evaluated_at", read_only=True, allow_null=True)
    verdict = serializers.DictField(read_only=True, help_text=VERDICT)

    class Meta:
        model = AlertRule
        fields = (
            "id",
            "pool",
            "group",
            "name",
            "kind",
            "severity",
            "settings",
            "effective_settings",
            *("repeat_s", "runbook_url", "enabled"),
            "created_at",
            "updated_at",
            "evaluated_at",
            "verdict",
        )

    def get_effective_settings(self, rule: AlertRule) -> dict[str, Any]:
        """Settings, with the default of each setting that the rule does not set."""
        return effective_settings(rule)


class AlertRuleChange(serializers.Serializer[Any]):
    """Changes of a rule; ``settings`` replaces all settings, ``group`` null selects the whole pool."""

    name = serializers.CharField(max_length=100, required=False)
    group = serializers.CharField(max_length=63, required=False, allow_null=True)
    severity = serializers.ChoiceField(choices=Severity.choices, required=False)
    settings = RuleSettingsField(required=False)
    repeat_s = serializers.IntegerField(min_value=0, required=False, help_text=REPEATED)
    runbook_url = serializers.CharField(max_length=500, required=False, allow_blank=True, help_text=RUNBOOK)
    enabled = serializers.BooleanField(required=False)


class AlertRuleInput(AlertRuleChange):
    """A new rule. Pool and kind cannot be changed later."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=100)
    kind = serializers.ChoiceField(choices=RuleKind.choices, required=False)


class PreviewInput(serializers.Serializer[Any]):
    """A rule to preview, and the length of the history."""

    pool = ByName(queryset=Pool.objects.all())
    group = serializers.CharField(max_length=63, required=False, allow_null=True)
    kind = serializers.ChoiceField(choices=RuleKind.choices)
    settings = RuleSettingsField(required=False, default=dict)
    days = serializers.FloatField(required=False, default=DAYS, max_value=MAX_DAYS, min_value=0.01)


class EpisodeSerializer(serializers.Serializer[Any]):
    """One episode in which the rule would have fired."""

    subject = serializers.CharField(help_text="A replica; empty for the pool or the task group.")
    started_at = serializers.DateTimeField()
    fired_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True, help_text="Null: it would still fire.")
    worst = serializers.FloatField(source="worst.value", allow_null=True)
    limit = serializers.FloatField(source="worst.limit", allow_null=True)
    unit = serializers.CharField(source="worst.unit")
    is_suppressed = serializers.BooleanField(
        help_text="Shortly after a restart or outage: not notified if that caused it."
    )


class PreviewPoint(serializers.Serializer[Any]):
    """Evaluation result of the rule; null: no data."""

    at = serializers.DateTimeField()
    value = serializers.FloatField(allow_null=True)
    limit = serializers.FloatField(allow_null=True)
    unit = serializers.CharField()


class PreviewResponse(serializers.Serializer[Any]):
    """Preview of a rule. ``results``: number of evaluations by result."""

    summary = serializers.CharField()
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    fired = serializers.IntegerField()
    results = serializers.DictField(child=serializers.IntegerField())
    episodes = EpisodeSerializer(many=True)
    points = PreviewPoint(many=True)


class AlertHistorySerializer(serializers.ModelSerializer[AlertHistoryEntry]):
    """One state change of an alert; ``by`` is null for changes by the evaluator."""

    by = serializers.SlugRelatedField[Any](slug_field="username", read_only=True, allow_null=True)

    class Meta:
        model = AlertHistoryEntry
        fields = ("at", "transition", "by", "note")


class SuppressionSerializer(serializers.Serializer[Any]):
    """Why notifications of an alert are suppressed."""

    reason = serializers.ChoiceField(choices=SuppressionReason.choices)
    text = serializers.CharField()
    by = serializers.IntegerField(allow_null=True, help_text="Id of the silence or of the inhibiting alert.")
    until = serializers.DateTimeField(allow_null=True)


class AlertSerializer(serializers.ModelSerializer[Alert]):
    """An episode of a rule. ``value``, ``limit`` and ``baseline`` are in ``unit``."""

    pool = ByName(read_only=True)
    rule = ByName(read_only=True)
    kind = serializers.CharField(source="rule.kind", read_only=True)
    labels = serializers.DictField(child=serializers.CharField(), read_only=True)
    detail = serializers.DictField(read_only=True)
    causes = serializers.ListField(child=serializers.DictField(), read_only=True)
    suppression = SuppressionSerializer(read_only=True, allow_null=True)
    reachable_ratio = serializers.FloatField(
        read_only=True,
        allow_null=True,
        help_text="For a drop: the pool's reachable hit rate; details in detail.reachable.",
    )
    notified_at = serializers.DateTimeField(
        read_only=True, allow_null=True, help_text="Last notification that it fires."
    )
    notification_count = serializers.IntegerField(
        read_only=True, help_text="Notifications that it fires, repeats included."
    )

    class Meta:
        model = Alert
        fields = (
            "id",
            "rule",
            "kind",
            "pool",
            "subject",
            "severity",
            "labels",
            "state",
            "started_at",
            "fired_at",
            "resolved_at",
            "last_breach_at",
            "value",
            "limit",
            "baseline",
            "unit",
            "value_ratio",
            "baseline_ratio",
            "reachable_ratio",
            "summary",
            "detail",
            "causes",
            "acknowledged_at",
            "acknowledged_by",
            "acknowledged_note",
            "suppression",
            "notified_at",
            "notification_count",
        )


class AlertWithHistory(AlertSerializer):
    """An alert with its timeline."""

    history = AlertHistorySerializer(many=True, read_only=True)

    class Meta(AlertSerializer.Meta):
        fields = (*AlertSerializer.Meta.fields, "history")  # type: ignore[assignment]  # longer than the list's


class Acknowledgement(serializers.Serializer[Any]):
    """A note, visible to all users."""

    note = serializers.CharField(max_length=500, required=False, allow_blank=True, default="")


class SilenceSerializer(VersionedSerializer[Silence]):
    """A silence; ``project`` null: all projects."""

    project = ByName(read_only=True, allow_null=True)
    matchers = serializers.SerializerMethodField()
    created_by = serializers.SlugRelatedField[Any](slug_field="username", read_only=True, allow_null=True)

    class Meta:
        model = Silence
        fields = ("id", "project", "matchers", "starts_at", "ends_at", "comment", "created_by", "created_at")

    def get_matchers(self, silence: Silence) -> list[str]:
        """Conditions on labels, all of which must hold."""
        return conditions(silence)


class SilenceChange(serializers.Serializer[Any]):
    """Changes of an active silence; its conditions cannot change."""

    ends_at = serializers.DateTimeField(required=False)
    comment = serializers.CharField(max_length=500, required=False)


class SilenceInput(SilenceChange):
    """A new silence for one project, or for all if the actor has the role in all."""

    project = ByName(queryset=Project.objects.all(), allow_null=True, required=False)
    matchers = serializers.ListField(child=MatcherField(), help_text=MATCHERS)
    starts_at = serializers.DateTimeField(required=False, help_text="Default: now.")
    ends_at = serializers.DateTimeField()
    comment = serializers.CharField(max_length=500, help_text="Why.")


class SilencePreviewInput(serializers.Serializer[Any]):
    """Conditions to preview."""

    project = ByName(queryset=Project.objects.all(), allow_null=True, required=False)
    matchers = serializers.ListField(child=MatcherField(), help_text=MATCHERS)


class SilencePreview(serializers.Serializer[Any]):
    """Pending and firing alerts that a silence would match."""

    alerts = AlertSerializer(many=True)
