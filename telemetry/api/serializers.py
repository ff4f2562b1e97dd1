"""A condition on labels, over REST.

Rows as JSON, and JSON as arguments of services. A channel's secrets go in and never come out.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controlplane.api.fields import ByName
from controlplane.errors import DecryptionError
from controlplane.models import Pool
from telemetry.channels.base import Field
from telemetry.channels.registry import KINDS
from telemetry.lint import Kind as PromptKind
from telemetry.matchers import LABELS, OPS
from telemetry.metrics.windows import POINTS, Window, choose_step
from telemetry.models import Channel, DeliveryAttempt, Notification
from telemetry.services.notifications.channels import public_config

MATCHERS = "conditions that an alert's labels must all meet, such as severity=critical,warning or pool!=lab-*"
_PARTS = {
    "type": "object",
    "description": "The same in parts; the value is meant to the letter, or is the pattern.",
    "required": ["label", "value"],
    "properties": {
        "label": {"type": "string", "enum": list(LABELS)},
        "op": {"type": "string", "enum": list(OPS), "default": "="},
        "value": {"type": "string"},
    },
}


@extend_schema_field({"oneOf": [{"type": "string"}, _PARTS]})
class MatcherField(serializers.Field[Any, Any, Any, Any]):
    """As it is written, or its parts; what it may be is the services' to say."""

    def to_internal_value(self, data: Any) -> Any:
        """What was given, if it has the form of either."""
        if not isinstance(data, str | dict):
            raise serializers.ValidationError("Expected a condition such as pool=chat.")
        return data

    def to_representation(self, value: Any) -> Any:
        """As it is."""
        return value


DEFAULT_LENGTH_S = 3600.0
MOST_POINTS = 2000  # of one line


class FieldSerializer(serializers.Serializer[Any]):
    """One setting of a kind of channel."""

    name = serializers.CharField()
    label = serializers.CharField()  # type: ignore[assignment]  # DRF's own attribute is for form fields
    help = serializers.CharField()
    required = serializers.BooleanField()  # type: ignore[assignment]  # as above
    secret = serializers.BooleanField(help_text="encrypted, and never shown again")
    default = serializers.JSONField(allow_null=True)
    choices = serializers.SerializerMethodField()

    def get_choices(self, field: Field) -> list[str]:
        """The words that it may be; none where it is free."""
        return [value for value, _ in field.choices]


class ChannelKindSerializer(serializers.Serializer[Any]):
    """A kind of channel and what its ``config`` may hold."""

    name = serializers.CharField()
    label = serializers.CharField()  # type: ignore[assignment]  # as above
    about = serializers.CharField()
    settings = FieldSerializer(source="fields", many=True)


class ChannelSerializer(serializers.ModelSerializer[Channel]):
    """A channel; of its config only what is no secret."""

    config = serializers.SerializerMethodField()
    matchers = serializers.ListField(child=serializers.CharField(), read_only=True)
    owner = serializers.CharField(source="owner.username", read_only=True, allow_null=True, default=None)

    class Meta:
        model = Channel
        fields: tuple[str, ...] = (
            "id",
            "name",
            "kind",
            "config",
            "matchers",
            "owner",
            "enabled",
            "disabled_reason",
            "delivered_at",
            "failed_at",
            "error",
            "created_at",
        )

    def get_config(self, channel: Channel) -> dict[str, Any]:
        """``target`` (where it leads, as far as that may be shown), what is no secret, and ``secrets`` that are set."""
        try:
            return public_config(channel)
        except DecryptionError:
            return {"target": None, "secrets": []}


class CreatedChannelSerializer(ChannelSerializer):
    """A channel just made, with the secret that signs: it is in this answer and nowhere else."""

    secret = serializers.CharField(read_only=True, allow_null=True)

    class Meta(ChannelSerializer.Meta):
        fields = (*ChannelSerializer.Meta.fields, "secret")


class RotatedSecretSerializer(serializers.Serializer[Any]):
    """The fresh secret: it is in this answer and nowhere else."""

    secret = serializers.CharField()


class ChannelChange(serializers.Serializer[Any]):
    """What to change of a channel. Of ``config`` the fields given are changed, null takes one away."""

    name = serializers.CharField(max_length=100, required=False)
    config = serializers.DictField(required=False, write_only=True)
    matchers = serializers.ListField(child=MatcherField(), required=False, help_text=f"{MATCHERS}; none: every alert")
    enabled = serializers.BooleanField(required=False)


class ChannelInput(serializers.Serializer[Any]):
    """A new channel. ``/channels/kinds`` says what the ``config`` of each kind may hold."""

    name = serializers.CharField(max_length=100)
    kind = serializers.ChoiceField(choices=[(kind.name, kind.label) for kind in KINDS.values()], required=False)
    config = serializers.DictField(write_only=True)
    matchers = serializers.ListField(child=MatcherField(), required=False, help_text=f"{MATCHERS}; none: every alert")
    enabled = serializers.BooleanField(required=False)


class AttemptSerializer(serializers.ModelSerializer[DeliveryAttempt]):
    """A try; ``duration_s`` null is unfinished, or its worker was lost. ``answer`` is the text's beginning."""

    class Meta:
        model = DeliveryAttempt
        fields = ("number", "started_at", "duration_s", "status", "error", "answer")


class DeliverySerializer(serializers.ModelSerializer[Notification]):
    """A message to one channel and every attempt at it."""

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
    low = serializers.FloatField(allow_null=True, help_text="of a quantile: where its bucket begins")
    high = serializers.FloatField(allow_null=True, help_text="and ends; null above the last finite edge")


class SeriesSerializer(serializers.Serializer[Any]):
    """One line."""

    label = serializers.CharField()  # type: ignore[assignment]  # DRF's own attribute is for form fields
    note = serializers.CharField()
    points = PointSerializer(many=True)


class SeriesAnswer(serializers.Serializer[Any]):
    """The lines of a chart."""

    metric = serializers.CharField()
    by = serializers.CharField()
    start = serializers.DateTimeField()
    end = serializers.DateTimeField()
    step_s = serializers.FloatField()
    series = SeriesSerializer(many=True)


class PromptFindingSerializer(serializers.Serializer[Any]):
    """One thing that makes prompts differ before much that is the same."""

    kind = serializers.ChoiceField(choices=[it.value for it in PromptKind])
    segment = serializers.CharField()
    at_tokens = serializers.IntegerField()
    where = serializers.CharField()
    share_ratio = serializers.FloatField(source="share")
    stable_tokens = serializers.IntegerField()
    tokens_per_day = serializers.FloatField(allow_null=True)
    advice = serializers.CharField()


class GroupPromptsSerializer(serializers.Serializer[Any]):
    """A task group's prompts; ``group`` is "" for requests of none."""

    pool = serializers.CharField()
    group = serializers.CharField(allow_blank=True)
    openings = serializers.IntegerField(source="prompts", help_text="Number of compared prompts.")
    requests_per_s = serializers.FloatField(allow_null=True)
    findings = PromptFindingSerializer(many=True)


class PromptsAnswer(serializers.Serializer[Any]):
    """Those that lose most first."""

    groups = GroupPromptsSerializer(many=True)


class PromptsQuery(serializers.Serializer[Any]):
    """Of which pool; without, of all."""

    pool = ByName(queryset=Pool.objects.all(), required=False)


class SeriesQuery(serializers.Serializer[Any]):
    """What ``/series`` is asked with. Without ``from`` the last hour, without ``step`` one that fits."""

    metric = serializers.CharField()
    by = serializers.CharField(required=False)
    pool = ByName(queryset=Pool.objects.all(), required=False)
    to = serializers.DateTimeField(required=False)
    step = serializers.FloatField(min_value=1, max_value=86_400, required=False)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        """``from`` is no name that a class body could use."""
        return {**super().get_fields(), "from": serializers.DateTimeField(required=False)}

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Make the window of it."""
        return {**attrs, "window": window_of(attrs)}


def window_of(asked: dict[str, Any]) -> Window:
    """The window of a query's ``from``, ``to`` and ``step``; ValidationError for one that makes no sense."""
    end = asked.get("to") or timezone.now()
    try:
        start = asked.get("from") or end - timedelta(seconds=DEFAULT_LENGTH_S)
    except OverflowError:
        raise serializers.ValidationError({"to": "expected a later time"}) from None
    length_s = (end - start).total_seconds()
    if length_s <= 0:
        raise serializers.ValidationError({"to": "expected a time after from"})
    step_s = asked.get("step") or choose_step(length_s, points=POINTS)
    if length_s / step_s > MOST_POINTS:
        raise serializers.ValidationError({"step": f"more than {MOST_POINTS} points; expected a longer step"})
    return Window(start, end, step_s)
