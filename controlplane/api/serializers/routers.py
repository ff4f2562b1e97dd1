"""Serializers of routers and their heartbeats, events, the audit log and API tokens."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.api.fields import ByName, by_username
from controlplane.models import ApiToken, AuditEntry, ConfigSnapshot, Event, Router, Scope
from controlplane.models.audit import AUDIT_FIELDS
from controlplane.push.client import MAX_TIMESTAMP


class RouterSerializer(serializers.ModelSerializer[Router]):
    """A router: the configuration that it runs and the one that it should run."""

    desired_number = serializers.SerializerMethodField()
    in_sync = serializers.SerializerMethodField()

    class Meta:
        model = Router
        fields = (
            *("name", "first_seen_at", "admin_url", "data_url", "boot", "version", "last_seen_at", "lost_at"),
            *("running_number", "running_sha256", "desired_number", "in_sync", "signature_state", "signature_key"),
            *("signature_expires_at", "last_ack_at", "last_nack", "last_error", "warming"),
        )

    def get_desired_number(self, router: Router) -> int | None:  # noqa: ARG002 - the same for every router
        """The newest configuration's number."""
        desired: ConfigSnapshot | None = self.context.get("desired")
        return desired.number if desired else None

    def get_in_sync(self, router: Router) -> bool:
        """Whether the router last reported the newest configuration."""
        desired: ConfigSnapshot | None = self.context.get("desired")
        return desired is not None and router.runs(desired.number, desired.sha256)


class WarmingSerializer(serializers.Serializer[Any]):
    """Progress of warming up a replica before it takes traffic; tokens are estimated."""

    prefixes_done = serializers.IntegerField(min_value=0, max_value=2**53)
    prefixes = serializers.IntegerField(min_value=0, max_value=2**53)
    tokens_done = serializers.IntegerField(min_value=0, max_value=2**53)
    tokens = serializers.IntegerField(min_value=0, max_value=2**53)


class SignatureSerializer(serializers.Serializer[Any]):
    """The signature of the configuration that a router runs."""

    state = serializers.CharField(max_length=20, help_text="verified, expired, unsigned or unchecked.")
    key = serializers.RegexField(r"^[0-9a-f]{16}$", allow_null=True, required=False, help_text="Id of the public key.")
    expires_at = serializers.IntegerField(
        min_value=0, max_value=MAX_TIMESTAMP, allow_null=True, required=False, help_text="Unix time."
    )


class AnnounceInput(serializers.Serializer[Any]):
    """A router's heartbeat."""

    name = serializers.CharField(max_length=63)
    boot = serializers.CharField(max_length=64)
    version = serializers.CharField(max_length=64, allow_blank=True, required=False)
    admin_url = serializers.CharField(max_length=2048)
    data_url = serializers.CharField(max_length=2048, allow_blank=True, required=False)
    revision = serializers.IntegerField(min_value=1, max_value=2**53, allow_null=True, required=False)
    sha256 = serializers.RegexField(r"^[0-9a-f]{64}$", allow_null=True, required=False)
    sent_at = serializers.FloatField(required=False, help_text="Unix time by the router's clock.")
    events = serializers.ListField(
        child=serializers.JSONField(),
        required=False,
        max_length=500,
        help_text="Events of the router: boot, seq, at, kind, facts. Sent until acknowledged; each is stored once.",
    )
    warming = serializers.DictField(child=WarmingSerializer(), required=False)  # by replica
    signature = SignatureSerializer(required=False, allow_null=True)


class AnnouncedSerializer(serializers.Serializer[Any]):
    """The configuration that the router should run. It is pushed to the router's admin port."""

    desired_revision = serializers.IntegerField(allow_null=True)
    acknowledged_events = serializers.IntegerField(help_text="Acknowledged events, which need not be sent again.")


class ExplainInput(serializers.Serializer[Any]):
    """A request as a client would send it to a router."""

    path = serializers.CharField(max_length=200, help_text="Such as /v1/chat/completions.")
    body = serializers.DictField(help_text="The request's body. It is not stored.")
    headers = serializers.DictField(child=serializers.CharField(), required=False, help_text="Such as X-Task-Group.")
    key = serializers.CharField(max_length=63, required=False, help_text="The name of the client's API key.")


class EventSerializer(serializers.ModelSerializer[Event]):
    pool = ByName(read_only=True, allow_null=True)
    replica = ByName(read_only=True, allow_null=True)
    router = ByName(read_only=True, allow_null=True)
    actor = by_username("actor")

    class Meta:
        model = Event
        fields = ("id", "at", "kind", "pool", "replica", "router", "actor", "summary", "detail")


class EventsAfterQuery(serializers.Serializer[Any]):
    """The query of a long poll: the last known event, seconds to wait, and how many events at most."""

    after = serializers.IntegerField(min_value=0, max_value=2**63 - 1)
    wait = serializers.FloatField(min_value=0, max_value=60, default=0.0)
    limit = serializers.IntegerField(min_value=1, max_value=1000, default=100)


class AuditSerializer(serializers.ModelSerializer[AuditEntry]):
    """An audit entry. ``digest`` covers all other fields; ``previous`` is the digest of the entry before."""

    class Meta:
        model = AuditEntry
        fields = (*AUDIT_FIELDS, "digest")


class TokenSerializer(serializers.ModelSerializer[ApiToken]):
    """An API token, without its secret."""

    user = serializers.CharField(source="user.username", read_only=True)

    class Meta:
        model = ApiToken
        fields = ("id", "name", "key_id", "user", "scopes", "created_at", "expires_at", "last_used_at", "revoked_at")


class TokenInput(serializers.Serializer[Any]):
    """A new token of the user who creates it."""

    name = serializers.CharField(max_length=100)
    scopes = serializers.ListField(child=serializers.ChoiceField(choices=Scope.choices), min_length=1, max_length=3)
    expires_at = serializers.DateTimeField(allow_null=True, required=False)


class CreatedTokenSerializer(TokenSerializer):
    """A token with its text, which is shown only once."""

    token = serializers.CharField(read_only=True)

    class Meta(TokenSerializer.Meta):
        fields = (*TokenSerializer.Meta.fields, "token")  # type: ignore[assignment]  # one longer
