"""Tokens as JSON."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.models import ApiToken, Scope


class TokenSerializer(serializers.ModelSerializer[ApiToken]):
    """A token, without its secret."""

    user = serializers.CharField(source="user.username", read_only=True)

    class Meta:
        model = ApiToken
        fields = ("id", "name", "key_id", "user", "scopes", "created_at", "expires_at", "last_used_at", "revoked_at")


class TokenInput(serializers.Serializer[Any]):
    """A new token, acting for whoever asks."""

    name = serializers.CharField(max_length=100)
    scopes = serializers.ListField(child=serializers.ChoiceField(choices=Scope.choices), min_length=1, max_length=3)
    expires_at = serializers.DateTimeField(allow_null=True, required=False)


class CreatedTokenSerializer(TokenSerializer):
    """A token with its text, shown this once."""

    token = serializers.CharField(read_only=True)

    class Meta(TokenSerializer.Meta):
        fields = (*TokenSerializer.Meta.fields, "token")  # type: ignore[assignment]  # one longer
