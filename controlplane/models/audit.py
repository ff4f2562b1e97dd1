"""Audit entries, daily checks of the audit log, and events."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import BigIntegerField, Func, TextField
from django.db.models.functions import Cast
from django.utils import timezone

from controlplane.models.fleet import Pool, Replica
from controlplane.models.router import Router

# The fields that an entry's digest covers.
AUDIT_FIELDS = (
    "number",
    "at",
    "kind",
    "actor",
    "token",
    "address",
    "request_id",
    "project",
    "pool",
    "summary",
    "reason",
    "before",
    "after",
    "previous",
)


class AuditEntry(models.Model):
    """One change. A trigger (migration 0002) rejects updates, and deletes of what is younger than 90 days. Each row
    contains the digest of the one before it, so that a row that was deleted or changed without the trigger is detected.

    It has no foreign keys, because it outlives all other rows.
    """

    number = models.BigIntegerField(primary_key=True)  # 1, 2, 3 ... without a gap
    at = models.DateTimeField()
    kind = models.CharField(max_length=32)  # an EventKind
    actor = models.CharField(max_length=150, blank=True)  # a username; "" for the system itself
    token = models.CharField(max_length=16, blank=True)  # the key_id of the API token that was used
    address = models.CharField(max_length=45, blank=True)  # where the request came from
    request_id = models.CharField(max_length=64, blank=True)
    project = models.CharField(max_length=30, blank=True)
    pool = models.CharField(max_length=30, blank=True)
    summary = models.CharField(max_length=500)
    reason = models.CharField(max_length=500, blank=True)  # as entered by the user
    before = models.JSONField(null=True)
    after = models.JSONField(null=True)
    previous = models.CharField(max_length=64)  # the digest of the entry before; zeros before the first
    digest = models.CharField(max_length=64)  # SHA-256, hex, of everything above

    class Meta:
        ordering = ("-number",)
        indexes = (
            models.Index(fields=["actor", "-number"], name="audit_actor"),
            models.Index(fields=["kind", "-number"], name="audit_kind"),
        )

    def __str__(self) -> str:
        return f"{self.number}: {self.summary}"


class AuditCheck(models.Model):
    """One check of the audit log's chain. The stored digest detects a chain that was rewritten as a whole."""

    at = models.DateTimeField()
    entries = models.BigIntegerField()  # number of valid entries
    digest = models.CharField(max_length=64)  # of the last of them
    fault = models.CharField(max_length=500, blank=True)  # the first bad entry; "": none

    class Meta:
        ordering = ("-at", "-pk")
        indexes = (models.Index(fields=["-at"], name="audit_check_at"),)

    def __str__(self) -> str:
        return self.fault or f"{self.entries} entries, intact"


class EventKind(models.TextChoices):
    POOL_CREATED = "pool_created", "Pool created"
    POOL_CHANGED = "pool_changed", "Pool changed"
    POOL_REMOVED = "pool_removed", "Pool removed"
    REPLICA_ADDED = "replica_added", "Replica added"
    REPLICA_REMOVED = "replica_removed", "Replica removed"
    REPLICA_CHANGED = "replica_changed", "Replica changed"
    REPLICA_STATE_CHANGED = "replica_state_changed", "Replica state changed"
    SOURCE_ADDED = "source_added", "Replica source added"
    SOURCE_CHANGED = "source_changed", "Replica source changed"
    SOURCE_REMOVED = "source_removed", "Replica source removed"
    SOURCE_FAILING = "source_failing", "Replica source failing"
    SOURCE_RECOVERED = "source_recovered", "Replica source recovered"
    SOURCE_HOLDING = "source_holding", "Replica source on hold"
    REPLICAS_FOUND = "replicas_found", "Replicas discovered"
    REPLICAS_MISSING = "replicas_missing", "Replicas missing"
    REPLICA_ADOPTED = "replica_adopted", "Replica adopted"
    REPLICA_DISMISSED = "replica_dismissed", "Replica dismissed"  # only of earlier releases
    GROUP_CREATED = "group_created", "Task group created"
    GROUP_CHANGED = "group_changed", "Task group changed"
    GROUP_REMOVED = "group_removed", "Task group removed"
    RESPONSE_CACHE_PURGED = "response_cache_purged", "Response cache purged"
    POLICY_CREATED = "policy_created", "Policy created"
    DRAFT_SAVED = "draft_saved", "Draft saved"
    DRAFT_DISCARDED = "draft_discarded", "Draft discarded"
    POLICY_PUBLISHED = "policy_published", "Policy published"
    POLICY_REMOVED = "policy_removed", "Policy removed"
    ROLLOUT_PROPOSED = "rollout_proposed", "Rollout awaits approval"
    PREDICTION_OVERRIDDEN = "prediction_overridden", "Published against the prediction"
    ROLLOUT_APPROVED = "rollout_approved", "Rollout approved"
    ROLLOUT_STARTED = "rollout_started", "Canary started"
    ROLLOUT_ACKNOWLEDGED = "rollout_acknowledged", "Rollout acknowledged by a router"
    ROLLOUT_PROMOTED = "rollout_promoted", "Canary promoted"
    ROLLOUT_PAUSED = "rollout_paused", "Rollout paused"
    ROLLOUT_RESUMED = "rollout_resumed", "Rollout resumed"
    ROLLOUT_HELD = "rollout_held", "Rollout on hold"
    ROLLOUT_HOLD_ENDED = "rollout_hold_ended", "Rollout no longer on hold"
    ROLLOUT_COMPLETED = "rollout_completed", "Rollout completed"
    ROLLOUT_ABORTED = "rollout_aborted", "Rollout aborted"
    ROLLOUT_ROLLED_BACK = "rollout_rolled_back", "Rolled back automatically"
    ROLLOUT_SUPERSEDED = "rollout_superseded", "Rollout superseded"
    CONFIG_APPLIED = "config_applied", "Configuration applied"
    CONFIG_REJECTED = "config_rejected", "Configuration rejected"
    PROJECT_CREATED = "project_created", "Project created"
    PROJECT_CHANGED = "project_changed", "Project changed"
    PROJECT_REMOVED = "project_removed", "Project removed"
    USER_ADDED = "user_added", "User added"
    USER_CHANGED = "user_changed", "User changed"
    ROLE_CHANGED = "role_changed", "Role changed"
    AUDIT_BROKEN = "audit_broken", "Audit log broken"
    AUDIT_EXPIRED = "audit_expired", "Audit entries expired"
    SECRETS_ROTATED = "secrets_rotated", "Secrets rotated"
    SIGN_IN_LOCKED = "sign_in_locked", "Sign-in locked"
    SIGN_IN_UNLOCKED = "sign_in_unlocked", "Sign-in unlocked"
    SECOND_FACTOR_CHANGED = "second_factor_changed", "Second factor changed"
    TOKEN_CREATED = "token_created", "Token created"
    TOKEN_REVOKED = "token_revoked", "Token revoked"
    LINK_SHARED = "link_shared", "Read-only link created"
    LINK_REVOKED = "link_revoked", "Read-only link revoked"
    CLIENT_KEY_CREATED = "client_key_created", "Client key created"
    CLIENT_KEY_CHANGED = "client_key_changed", "Client key changed"
    CLIENT_KEY_REVOKED = "client_key_revoked", "Client key revoked"
    FLEET_CHANGED = "fleet_changed", "Fleet settings changed"
    RULE_CREATED = "rule_created", "Alert rule created"
    RULE_CHANGED = "rule_changed", "Alert rule changed"
    RULE_REMOVED = "rule_removed", "Alert rule removed"
    CHANNEL_CREATED = "channel_created", "Channel created"
    CHANNEL_CHANGED = "channel_changed", "Channel changed"
    CHANNEL_REMOVED = "channel_removed", "Channel removed"
    METRICS_SERVER_CREATED = "metrics_server_created", "Prometheus server added"
    METRICS_SERVER_CHANGED = "metrics_server_changed", "Prometheus server changed"
    METRICS_SERVER_REMOVED = "metrics_server_removed", "Prometheus server removed"
    CHANNEL_DISABLED = "channel_disabled", "Channel disabled"
    ROUTER_JOINED = "router_joined", "Router joined"
    ROUTER_LOST = "router_lost", "Router lost"
    ROUTER_REMOVED = "router_removed", "Router removed"
    ROUTER_STARTED = "router_started", "Router started"
    ROUTER_REPORTED = "router_reported", "Router reported"  # an event kind of a newer release
    CONFIG_LOADED = "config_loaded", "Configuration loaded"
    REPLICA_EJECTED = "replica_ejected", "Replica ejected"
    REPLICA_READMITTED = "replica_readmitted", "Replica readmitted"
    REPLICA_UNREACHABLE = "replica_unreachable", "Replica unreachable"
    REPLICA_REACHABLE = "replica_reachable", "Replica reachable"
    REPLICA_DOWN = "replica_down", "Replica down"
    REPLICA_UP = "replica_up", "Replica up"
    REPLICA_RESTARTED = "replica_restarted", "Replica restarted"
    TRAFFIC_MIX_CHANGED = "traffic_mix_changed", "Traffic mix changed"
    ALERT_FIRING = "alert_firing", "Alert firing"
    ALERT_RESOLVED = "alert_resolved", "Alert resolved"
    ALERT_ACKNOWLEDGED = "alert_acknowledged", "Alert acknowledged"
    ALERT_UNACKNOWLEDGED = "alert_unacknowledged", "Alert no longer acknowledged"
    SILENCE_CREATED = "silence_created", "Silence created"
    SILENCE_CHANGED = "silence_changed", "Silence changed"
    SILENCE_ENDED = "silence_ended", "Silence ended"


def event_kinds() -> list[tuple[str, str]]:
    """The choices of ``Event.kind``; a function, so that a new kind needs no migration."""
    return EventKind.choices


def transaction_number() -> Cast:
    """The current transaction's number; PostgreSQL assigns them in ascending order."""
    return Cast(Cast(Func(function="pg_current_xact_id"), TextField()), BigIntegerField())


class Event(models.Model):
    """Something that happened. Its text is complete, because the objects it names may be removed later."""

    at = models.DateTimeField(default=timezone.now)
    kind = models.CharField(max_length=32, choices=event_kinds)
    pool = models.ForeignKey(Pool, models.SET_NULL, null=True, blank=True, related_name="events")
    replica = models.ForeignKey(Replica, models.SET_NULL, null=True, blank=True, related_name="events")
    router = models.ForeignKey(Router, models.SET_NULL, null=True, blank=True, related_name="events")
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="events"
    )  # None: the system
    summary = models.CharField(max_length=500)  # one sentence that names the object
    # The transaction that recorded it. Ids are assigned before the commit, so readers may see them out of order;
    # ordered by finished transactions, the list is complete (services/events.py).
    xact = models.BigIntegerField(db_default=transaction_number(), editable=False)
    detail = models.JSONField(default=dict)  # "before" and "after" where something was changed; never a secret

    class Meta:
        ordering = ("-at", "-pk")
        indexes = (
            models.Index(fields=["-at", "-id"], name="event_at"),
            models.Index(fields=["pool", "-at"], name="event_pool_at"),
            models.Index(fields=["xact", "id"], name="event_xact"),
            models.Index(fields=["kind", "-at"], name="event_kind_at"),
            models.Index(fields=["replica", "-at"], name="event_replica_at"),
            models.Index(fields=["router", "-at"], name="event_router_at"),
            models.Index(fields=["actor", "-at"], name="event_actor_at"),
        )

    def __str__(self) -> str:
        return self.summary
