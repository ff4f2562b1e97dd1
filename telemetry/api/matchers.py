"""A condition on labels, over REST."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from telemetry.matchers import LABELS, OPS

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
