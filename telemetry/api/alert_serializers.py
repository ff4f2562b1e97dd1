"""A field for the settings of one of several kinds: each kind's own struct is its documentation.

Rules, alerts and silences as JSON, and JSON as arguments of services.
"""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiSerializerFieldExtension
from drf_spectacular.plumbing import ResolvedComponent
from rest_framework import serializers

from controlplane.api.fields import ByName
from controlplane.models import Pool, Project
from controlplane.schema_fields import json_schemas
from telemetry.alerts.kinds import KINDS
from telemetry.api.serializers import MATCHERS, MatcherField
from telemetry.models import Alert, AlertRule, AlertStep, RuleKind, Severity, Silence
from telemetry.services.alerts.previews import DAYS, MOST_DAYS
from telemetry.services.alerts.rules import effective_settings
from telemetry.services.alerts.silences import conditions


class RuleSettingsField(serializers.DictField):
    """Settings of a rule; the service checks them by the rule's kind."""


class RuleSettingsScheme(OpenApiSerializerFieldExtension):  # type: ignore[no-untyped-call]  # registers itself, untyped
    """Any of the kinds' structs, as components."""

    target_class = RuleSettingsField

    def map_serializer_field(self, auto_schema: Any, direction: Any) -> dict[str, Any]:  # noqa: ARG002 - spectacular's
        """What the document says of the field."""
        kinds = [kind.settings for kind in KINDS.values()]
        shown, components = json_schemas(kinds, "#/components/schemas/{name}")
        for name, body in components.items():
            found = ResolvedComponent(name, ResolvedComponent.SCHEMA, body, name)  # type: ignore[no-untyped-call]  # as above
            auto_schema.registry.register_on_missing(found)
        return {"anyOf": list(shown), "description": "Of the rule's kind; what is left out takes its default."}


REPEATED = "Seconds after which an alert that nobody acknowledged is told again; 0: never."


class AlertRuleSerializer(serializers.ModelSerializer[AlertRule]):
    """A rule; ``settings`` holds what it sets itself, ``effective_settings`` what is in force."""

    pool = ByName(read_only=True)
    group = ByName(read_only=True, allow_null=True)
    settings = RuleSettingsField()
    effective_settings = serializers.SerializerMethodField()
    verdict = serializers.DictField(read_only=True)

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
            "repeat_s",
            "enabled",
            "created_at",
            "updated_at",
            "evaluated_at",
            "verdict",
        )

    def get_effective_settings(self, rule: AlertRule) -> dict[str, Any]:
        """With the defaults of what is not set."""
        return effective_settings(rule)


class AlertRuleChange(serializers.Serializer[Any]):
    """What to change of a rule; ``settings`` replaces all of them, ``group`` null looks at the whole pool."""

    name = serializers.CharField(max_length=100, required=False)
    group = serializers.CharField(max_length=63, required=False, allow_null=True)
    severity = serializers.ChoiceField(choices=Severity.choices, required=False)
    settings = RuleSettingsField(required=False)
    repeat_s = serializers.IntegerField(min_value=0, required=False, help_text=REPEATED)
    enabled = serializers.BooleanField(required=False)


class AlertRuleInput(AlertRuleChange):
    """A new rule. Its pool and its kind are for good."""

    pool = ByName(queryset=Pool.objects.all())
    name = serializers.CharField(max_length=100)
    kind = serializers.ChoiceField(choices=RuleKind.choices, required=False)


class PreviewInput(serializers.Serializer[Any]):
    """A rule as it might be, and how far to look back."""

    pool = ByName(queryset=Pool.objects.all())
    group = serializers.CharField(max_length=63, required=False, allow_null=True)
    kind = serializers.ChoiceField(choices=RuleKind.choices)
    settings = RuleSettingsField(required=False, default=dict)
    days = serializers.FloatField(required=False, default=DAYS, max_value=MOST_DAYS, min_value=0.01)


class EpisodeSerializer(serializers.Serializer[Any]):
    """One time that the rule would have fired."""

    subject = serializers.CharField(help_text="A replica; empty for the pool or the task group.")
    started_at = serializers.DateTimeField()
    fired_at = serializers.DateTimeField()
    ended_at = serializers.DateTimeField(allow_null=True, help_text="Null: it still would.")
    worst = serializers.FloatField(source="worst.value", allow_null=True)
    limit = serializers.FloatField(source="worst.limit", allow_null=True)
    unit = serializers.CharField(source="worst.unit")
    muted = serializers.BooleanField(source="is_cold", help_text="As a restarted replica's own.")


class PreviewPoint(serializers.Serializer[Any]):
    """What the rule saw; null where it could not tell."""

    at = serializers.DateTimeField()
    value = serializers.FloatField(allow_null=True)
    limit = serializers.FloatField(allow_null=True)
    unit = serializers.CharField()


class PreviewAnswer(serializers.Serializer[Any]):
    """What would have been. ``answers`` counts the moments that were looked at, by what they said."""

    sentence = serializers.CharField()
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    fired = serializers.IntegerField()
    answers = serializers.DictField(child=serializers.IntegerField())
    episodes = EpisodeSerializer(many=True)
    points = PreviewPoint(many=True)


class AlertStepSerializer(serializers.ModelSerializer[AlertStep]):
    """One move of an alert's life; ``by`` is null where the evaluator made it."""

    by = serializers.SlugRelatedField[Any](slug_field="username", read_only=True, allow_null=True)

    class Meta:
        model = AlertStep
        fields = ("at", "move", "by", "note")


class MuteSerializer(serializers.Serializer[Any]):
    """Why an alert is not told."""

    why = serializers.ChoiceField(choices=["silence", "inhibited", "restart"])
    words = serializers.CharField()
    by = serializers.IntegerField(allow_null=True, help_text="The silence's or the other alert's id.")
    until = serializers.DateTimeField(allow_null=True)


class AlertSerializer(serializers.ModelSerializer[Alert]):
    """An episode of a rule. ``value``, ``limit`` and ``baseline`` are in ``unit``."""

    pool = ByName(read_only=True)
    rule = ByName(read_only=True)
    kind = serializers.CharField(source="rule.kind", read_only=True)
    labels = serializers.DictField(child=serializers.CharField(), read_only=True)
    detail = serializers.DictField(read_only=True)
    causes = serializers.ListField(child=serializers.DictField(), read_only=True)
    muted = MuteSerializer(read_only=True, allow_null=True)
    reachable_ratio = serializers.FloatField(
        read_only=True, allow_null=True, help_text="Of a drop: the pool's reachable share; detail.reachable has more."
    )
    told_at = serializers.DateTimeField(
        source="notified_at", read_only=True, allow_null=True, help_text="Last notification that it fires."
    )
    tellings = serializers.IntegerField(
        source="notification_count", read_only=True, help_text="Notifications that it fires, repeats included."
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
            "muted",
            "told_at",
            "tellings",
        )


class AlertWithSteps(AlertSerializer):
    """The same with its life."""

    steps = AlertStepSerializer(many=True, read_only=True)

    class Meta(AlertSerializer.Meta):
        fields = (*AlertSerializer.Meta.fields, "steps")  # type: ignore[assignment]  # longer than the list's


class Acknowledgement(serializers.Serializer[Any]):
    """Why, or what is being done; shown to everybody."""

    note = serializers.CharField(max_length=500, required=False, allow_blank=True, default="")


class SilenceSerializer(serializers.ModelSerializer[Silence]):
    """A silence; ``project`` null reaches all projects."""

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
    """What to change of a silence that is not over; whom it is for stays."""

    ends_at = serializers.DateTimeField(required=False)
    comment = serializers.CharField(max_length=500, required=False)


class SilenceInput(SilenceChange):
    """A new silence, of one project's alerts, or of all for those with a role in all."""

    project = ByName(queryset=Project.objects.all(), allow_null=True, required=False)
    matchers = serializers.ListField(child=MatcherField(), help_text=MATCHERS)
    starts_at = serializers.DateTimeField(required=False, help_text="Now unless told.")
    ends_at = serializers.DateTimeField()
    comment = serializers.CharField(max_length=500, help_text="Why.")


class SilencePreviewInput(serializers.Serializer[Any]):
    """Whom a silence would be for."""

    project = ByName(queryset=Project.objects.all(), allow_null=True, required=False)
    matchers = serializers.ListField(child=MatcherField(), help_text=MATCHERS)


class SilencePreview(serializers.Serializer[Any]):
    """The alerts that a silence would be for, of those that fire or are suspected now."""

    alerts = AlertSerializer(many=True)
