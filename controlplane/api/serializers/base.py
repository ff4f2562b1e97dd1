"""What serializers share."""

from __future__ import annotations

from rest_framework import serializers


def by_username(source: str) -> serializers.CharField:
    """A person, shown by the name they sign in with; null where the system acted by itself."""
    return serializers.CharField(source=f"{source}.username", default=None, read_only=True, allow_null=True)
