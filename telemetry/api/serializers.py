"""Serializers of channels, deliveries, series and prompt lint. Secrets of channels are write-only."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controlplane.api.fields import ByName, VersionedSerializer
from controlplane.errors import DecryptionError
from controlplane.models import Pool
from telemetry.channels import KINDS
from telemetry.channels.base import Field
from telemetry.lint.differences import Kind as PromptKind
from telemetry.matchers import LABELS, OPS
from telemetry.metrics.windows import POINTS, Window, choose_step
from telemetry.models import Channel, DeliveryAttempt, Notification, Topic
from telemetry.services.notifications.channels import public_config

MATCHERS = "conditions that an alert's labels must all meet, such as severity=critical,warning or pool!=lab-*"
TOPICS = f"what the channel gets besides alerts: {', '.join(Topic.values)}"
_MATCHER_SCHEMA = {
    "type": "object",
    "description": "The condition as an object; the value is compared literally or as the pattern.",
    "required": ["label", "value"],
    "properties": {
        "label": {"type": "string", "enum": list(LABELS)},
        "op": {"type": "string", "enum": list(OPS), "default": "="},
        "value": {"type": "string"},
    },
}


@extend_schema_field({"oneOf": [{"type": "string"}, _MATCHER_SCHEMA]})
class MatcherField(serializers.Field[Any, Any, Any, Any]):
    """A condition on labels, as text or as an object; the services validate it."""

    def to_internal_value(self, data: Any) -> Any:
        """Accept a string or an object; ValidationError for anything else."""
        if not isinstance(data, str | dict):
            raise serializers.ValidationError("Expected a condition such as pool=chat.")
        return data

    def to_representation(self, value: Any) -> Any:
        return value


DEFAULT_LENGTH_S = 3600.0
MAX_POINTS = 2000  # of one line


class FieldSerializer(serializers.Serializer[Any]):
    """One setting of a kind of channel."""

    name = serializers.CharField()
    label = serializers.CharField()  # type: ignore[assignment]  # DRF's own attribute is for form fields
    help = serializers.CharField()
    required = serializers.BooleanField()  # type: ignore[assignment]  # as above
    secret = serializers.BooleanField(help_text="stored encrypted and never returned")
    default = serializers.JSONField(allow_null=True)
    choices = serializers.SerializerMethodField()

    def get_choices(self, field: Field) -> list[str]:
        """Allowed values; [] for free text."""
        return [value for value, _ in field.choices]


class ChannelKindSerializer(serializers.Serializer[Any]):
    """A kind of channel and the settings of its ``config``."""

    name = serializers.CharField()
    label = serializers.CharField()  # type: ignore[assignment]  # as above
    about = serializers.CharField()
    settings = FieldSerializer(source="fields", many=True)


class ChannelSerializer(VersionedSerializer[Channel]):
    """A channel, without secrets."""

    config = serializers.SerializerMethodField()
    matchers = serializers.ListField(child=serializers.CharField(), read_only=True)
    topics = serializers.ListField(child=serializers.CharField(), read_only=True)
    owner = serializers.CharField(source="owner.username", read_only=True, allow_null=True, default=None)

    class Meta:
        model = Channel
        fields: tuple[str, ...] = (
            "id",
            "name",
            "kind",
            "config",
            "matchers",
            "topics",
            "owner",
            "enabled",
            "disabled_reason",
            "delivered_at",
            "failed_at",
            "error",
            "created_at",
        )

    def get_config(self, channel: Channel) -> dict[str, Any]:
        """``target`` without secret parts, settings that are not secret, and names of the ``secrets`` that are set."""
        try:
            return public_config(channel)
        except DecryptionError:
            return {"target": None, "secrets": []}


class CreatedChannelSerializer(ChannelSerializer):
    """A created channel with its signing secret, which only this response has."""

    secret = serializers.CharField(read_only=True, allow_null=True)

    class Meta(ChannelSerializer.Meta):
        fields = (*ChannelSerializer.Meta.fields, "secret")


class RotatedSecretSerializer(serializers.Serializer[Any]):
    """The new secret, which only this response has."""

    secret = serializers.CharField()


class ChannelChange(serializers.Serializer[Any]):
    """Changes of a channel. Only the given fields of ``config`` change; null removes one."""

    name = serializers.CharField(max_length=100, required=False)
    config = serializers.DictField(required=False, write_only=True)
    matchers = serializers.ListField(child=MatcherField(), required=False, help_text=f"{MATCHERS}; none: every alert")
    topics = serializers.ListField(child=serializers.CharField(), required=False, help_text=TOPICS)
    enabled = serializers.BooleanField(required=False)


class ChannelInput(ChannelChange):
    """A new channel. ``/channels/kinds`` lists the ``config`` settings of each kind."""

    name = serializers.CharField(max_length=100)
    kind = serializers.ChoiceField(choices=[(kind.name, kind.label) for kind in KINDS.values()], required=False)
    config = serializers.DictField(write_only=True)


class AttemptSerializer(serializers.ModelSerializer[DeliveryAttempt]):
    """A delivery attempt. ``duration_s`` null: unfinished, or its worker died. ``response``: its beginning."""

    class Meta:
        model = DeliveryAttempt
        fields = ("number", "started_at", "duration_s", "status", "error", "response")


class DeliverySerializer(serializers.ModelSerializer[Notification]):
    """A message to one channel and its delivery attempts."""

    channel = ByName(read_only=True)
    alerts = serializers.ListField(source="alert_ids", child=serializers.IntegerField(), read_only=True)
    summary = serializers.CharField(source="payload.data.summary", read_only=True, default="")
    attempts = AttemptSerializer(source="log", many=True, read_only=True)

    class Meta:
        model = Notification
        fields = (
            "id",
            "alert",
            "alerts",
            "channel",
            "kind",
            "summary",
            "state",
            "created_at",
            "next_at",
            "finished_at",
            "attempts",
        )


class PointSerializer(serializers.Serializer[Any]):
    """One step of a line."""

    at = serializers.DateTimeField(help_text="start of the step")
    value = serializers.FloatField(allow_null=True)
    state = serializers.CharField(help_text="ok, no_traffic, stale, not_reported or unknown; ok alone has a value")
    low = serializers.FloatField(allow_null=True, help_text="lower bound of a quantile's bucket")
    high = serializers.FloatField(allow_null=True, help_text="upper bound; null: infinite")


class SeriesSerializer(serializers.Serializer[Any]):
    """One line."""

    label = serializers.CharField()  # type: ignore[assignment]  # DRF's own attribute is for form fields
    note = serializers.CharField()
    points = PointSerializer(many=True)


class SeriesResponse(serializers.Serializer[Any]):
    """The lines of a chart."""

    metric = serializers.CharField()
    by = serializers.CharField()
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    step_s = serializers.FloatField()
    series = SeriesSerializer(many=True)


class PromptFindingSerializer(serializers.Serializer[Any]):
    """One cause of differences between prompts before shared text."""

    kind = serializers.ChoiceField(choices=[kind.value for kind in PromptKind])
    segment = serializers.CharField()
    at_tokens = serializers.IntegerField()
    where = serializers.CharField()
    share_ratio = serializers.FloatField(source="share")
    stable_tokens = serializers.IntegerField()
    effect = serializers.CharField(help_text="What about these tokens cannot be shared.")
    tokens_per_day = serializers.FloatField(allow_null=True)
    advice = serializers.CharField()


class GroupPromptsSerializer(serializers.Serializer[Any]):
    """Findings of a task group; ``group`` "": requests without one."""

    pool = serializers.CharField()
    group = serializers.CharField(allow_blank=True)
    prompts = serializers.IntegerField(help_text="Number of compared prompts.")
    requests_per_s = serializers.FloatField(allow_null=True)
    findings = PromptFindingSerializer(many=True)


class PromptsResponse(serializers.Serializer[Any]):
    """Task groups, largest loss first."""

    groups = GroupPromptsSerializer(many=True)


class PromptsQuery(serializers.Serializer[Any]):
    """Parameters of ``/prompts``. Default ``pool``: all."""

    pool = ByName(queryset=Pool.objects.all(), required=False)


class WindowQuery(serializers.Serializer[Any]):
    """Parameters of one window. Default ``from``: one hour ago."""

    to = serializers.DateTimeField(required=False)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """Add ``from``, which is a keyword in a class body."""
        return {**super().get_fields(), "from": serializers.DateTimeField(required=False)}

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Add the window."""
        return {**attrs, "window": window_of(attrs)}


class SeriesQuery(WindowQuery):
    """Parameters of ``/series``. Default ``from``: one hour ago; default ``step``: fits the window."""

    metric = serializers.CharField()
    by = serializers.CharField(required=False)
    pool = ByName(queryset=Pool.objects.all(), required=False)
    step = serializers.FloatField(min_value=1, max_value=86_400, required=False)


def window_of(params: dict[str, Any]) -> Window:
    """The window of ``from``, ``to`` and ``step``; ValidationError for an invalid one."""
    end = params.get("to") or timezone.now()
    try:
        start = params.get("from") or end - timedelta(seconds=DEFAULT_LENGTH_S)
    except OverflowError:
        raise serializers.ValidationError({"to": "expected a later time"}) from None
    length_s = (end - start).total_seconds()
    if length_s <= 0:
        raise serializers.ValidationError({"to": "expected a time after from"})
    step_s = params.get("step") or choose_step(length_s, points=POINTS)
    if length_s / step_s > MAX_POINTS:
        raise serializers.ValidationError({"step": f"more than {MAX_POINTS} points; expected a longer step"})
    return Window(start, end, step_s)
