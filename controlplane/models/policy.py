"""Routing policies with their revisions, configuration snapshots, and rollouts with their steps."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.conf import settings as django_settings
from django.db import models
from django.db.models import CheckConstraint, F, Q, UniqueConstraint, Value
from django.utils import timezone

from controlplane.errors import ImmutableError
from controlplane.models.fleet import LONG_NAME, Pool, TaskGroup, VersionedModel, long_name, well_formed
from routing.schema import without_removed


class RoutingPolicy(models.Model):
    """How requests of a pool, or of one of its task groups, are placed.

    The pool's policy applies to a group without an active revision of its own.
    """

    name = long_name(unique=True)  # the pool's name, or pool.group; a metric label
    pool = models.ForeignKey(Pool, models.CASCADE, related_name="policies")
    group = models.OneToOneField(TaskGroup, models.CASCADE, null=True, blank=True, related_name="policy")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)
        verbose_name_plural = "routing policies"
        constraints = (
            well_formed("policy_name_form", LONG_NAME),
            UniqueConstraint(fields=["pool"], condition=Q(group=None), name="one_policy_per_pool"),
            # group_id and pool_id together reference the group's own row: migration 0002.
        )

    def __str__(self) -> str:
        return self.name

    @property
    def etag(self) -> str:
        """The entity tag of the present revisions: a policy itself has nothing to edit."""
        versions = sorted(row.version for row in self.revisions.all() if row.state in CURRENT_REVISIONS)
        return f'"{"-".join(map(str, (self.pk, *versions)))}"'

    def live(self) -> PolicyRevision | None:
        """The active revision; a query. None for a group's policy that was never published."""
        return self.revisions.filter(state=RevisionState.LIVE).first()

    def canary(self) -> PolicyRevision | None:
        """The revision that is published but not active yet; a query."""
        return self.revisions.filter(state=RevisionState.CANARY).first()

    def draft(self) -> PolicyRevision | None:
        """The revision being edited; a query."""
        return self.revisions.filter(state=RevisionState.DRAFT).first()


class SettingsField(models.JSONField):
    """The settings of a strategy, read without those that this release no longer has."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return without_removed(super().from_db_value(value, expression, connection))

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.JSONField", args, kwargs


class RevisionState(models.TextChoices):
    """draft -> canary -> live -> retired, or draft -> canary -> rolled_back."""

    DRAFT = "draft", "Draft"
    CANARY = "canary", "Canary"  # published, not active: its rollout determines its requests
    LIVE = "live", "Active"
    RETIRED = "retired", "Retired"  # was active
    ROLLED_BACK = "rolled_back", "Rolled back"  # never became active


CURRENT_REVISIONS = (RevisionState.DRAFT, RevisionState.CANARY, RevisionState.LIVE)


class RevisionFault(models.TextChoices):
    """What named a revision as faulty."""

    ALERT = "alert", "named by an alert"  # as the most likely cause of a drop
    ANALYSIS = "analysis", "failed analysis"


class PolicyRevision(VersionedModel):
    """One version of a routing policy. After publication only its state changes: an edit creates a new revision.

    A trigger enforces this (migration 0002).
    """

    policy = models.ForeignKey(RoutingPolicy, models.CASCADE, related_name="revisions")
    number = models.PositiveIntegerField()  # 1, 2, 3 ... within the policy
    state = models.CharField(max_length=11, choices=RevisionState, default=RevisionState.DRAFT)
    settings = SettingsField()  # routing.schema.Settings with defaults filled in
    digest = models.CharField(max_length=64)  # SHA-256 of the settings
    author = models.ForeignKey(
        django_settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="revisions"
    )  # None: the system
    reason = models.CharField(max_length=500, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    published_at = models.DateTimeField(null=True, blank=True)
    fault = models.CharField(max_length=8, choices=RevisionFault, blank=True, default="", db_default="")
    fault_alert = models.BigIntegerField(null=True, blank=True)  # id of telemetry's alert that named it

    class Meta:
        ordering = ("policy__name", "-number")
        constraints = (
            UniqueConstraint(fields=["policy", "number"], name="revision_number_unique"),
            UniqueConstraint(fields=["policy"], condition=Q(state="live"), name="one_live_revision"),
            UniqueConstraint(fields=["policy"], condition=Q(state="draft"), name="one_draft"),
            UniqueConstraint(fields=["policy"], condition=Q(state="canary"), name="one_canary"),
            CheckConstraint(condition=Q(number__gt=0), name="revision_number_positive"),
            CheckConstraint(condition=Q(state__in=RevisionState.values), name="revision_state_known"),
            CheckConstraint(
                condition=Q(fault="alert", fault_alert__isnull=False)
                | (~Q(fault="alert") & Q(fault__in=("", *RevisionFault.values), fault_alert=None)),
                name="revision_fault_known",
            ),
            CheckConstraint(
                condition=Q(state="draft", published_at=None) | (~Q(state="draft") & Q(published_at__isnull=False)),
                name="revision_published_unless_draft",
            ),
        )

    def __str__(self) -> str:
        return f"{self.policy.name} r{self.number}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save a draft; ImmutableError for a published revision."""
        if self.pk and self.state != RevisionState.DRAFT:
            raise ImmutableError("policy revision", str(self))
        super().save(*args, **kwargs)

    @property
    def strategy(self) -> str:
        return str(self.settings["strategy"])


class ConfigSnapshot(models.Model):
    """The complete configuration that routers receive; every router should run the newest one.

    Immutable: a trigger enforces it (migration 0002). Deleted after its retention (services/retention.py).
    """

    number = models.PositiveBigIntegerField(unique=True)  # 1, 2, 3 ...; the revision on the wire
    sha256 = models.CharField(max_length=64)  # of the configuration's bytes, as routers compute it
    document = models.JSONField()  # for display: secrets are ***
    encrypted = models.BinaryField()  # the bytes sent to routers, compressed (zlib)
    reason = models.CharField(max_length=500)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-number",)
        constraints = (CheckConstraint(condition=Q(number__gt=0), name="snapshot_number_positive"),)

    def __str__(self) -> str:
        return f"snapshot {self.number}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.pk:
            raise ImmutableError("configuration snapshot", str(self.number))
        super().save(*args, **kwargs)


class RolloutState(models.TextChoices):
    """The transitions between states are in ``services/policies/rollout_transitions.py``."""

    AWAITING_APPROVAL = "awaiting_approval", "Awaiting approval"  # by a user other than the publisher
    PENDING = "pending", "Pending"  # no router runs it yet
    PROGRESSING = "progressing", "Progressing"  # routers run its current stage, or are about to
    PAUSED = "paused", "Paused"  # by a user; the analysis continues
    HOLDING = "holding", "On hold"  # until its HoldReason ends, or a user decides
    COMPLETE = "complete", "Complete"  # active, and every connected router runs it
    ABORTED = "aborted", "Aborted"  # by a user
    ROLLED_BACK = "rolled_back", "Rolled back"  # by the analysis
    SUPERSEDED = "superseded", "Superseded"  # by another publication of the policy


OPEN_ROLLOUTS = (
    RolloutState.AWAITING_APPROVAL,
    RolloutState.PENDING,
    RolloutState.PROGRESSING,
    RolloutState.PAUSED,
    RolloutState.HOLDING,
)


EMPTY_LIST = Value([], models.JSONField())


class HoldReason(models.TextChoices):
    REJECTION = "rejection", "A router rejects the configuration"
    ANALYSIS = "analysis", "Analysis inconclusive"


class Rollout(VersionedModel):
    """The rollout of one revision to all requests of all routers, stage by stage.

    Without stages the revision is active at once, and the rollout only waits for acknowledgements. With stages its
    canary gets more requests with each stage, and the last stage makes it active.
    """

    revision = models.ForeignKey(PolicyRevision, models.CASCADE, related_name="rollouts")
    # The first snapshot with the current stage; None until the rollout is approved.
    snapshot = models.ForeignKey(ConfigSnapshot, models.PROTECT, null=True, blank=True, related_name="rollouts")
    plan = models.CharField(max_length=12, default="all_at_once", db_default="all_at_once")  # rollout_plans.Plan
    state = models.CharField(max_length=17, choices=RolloutState, default=RolloutState.PENDING)
    held_by = models.CharField(max_length=9, choices=HoldReason, blank=True, default="", db_default="")
    why = models.CharField(max_length=500, blank=True, default="", db_default="")  # reason for the state

    # rollout_plans.Stage; []: all at once.
    stages = models.JSONField(default=list, db_default=EMPTY_LIST, blank=True)
    stage = models.PositiveSmallIntegerField(default=0, db_default=0)  # index in ``stages``
    stage_since = models.DateTimeField(null=True, blank=True)  # when the stage was entered
    stage_converged_at = models.DateTimeField(null=True, blank=True)  # when every connected router first ran it
    paused_at = models.DateTimeField(null=True, blank=True)  # None: not paused
    stage_paused_s = models.FloatField(default=0.0, db_default=0.0)  # finished pauses since convergence
    guard = models.JSONField(null=True, blank=True)  # rollout_plans.GuardLimits; None: no analysis
    readings = models.JSONField(default=list, db_default=EMPTY_LIST, blank=True)  # last analysis results
    readings_at = models.DateTimeField(null=True, blank=True)
    past_readings = models.JSONField(default=list, db_default=EMPTY_LIST, blank=True)  # of all analyses, for charts

    started_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="+")
    started_at = models.DateTimeField(auto_now_add=True)
    approved_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="+")
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-started_at", "-pk")
        constraints = (
            UniqueConstraint(
                fields=["revision"], condition=Q(state__in=OPEN_ROLLOUTS), name="one_open_rollout_per_revision"
            ),
            CheckConstraint(condition=Q(state__in=RolloutState.values), name="rollout_state_known"),
            CheckConstraint(
                condition=Q(state__in=OPEN_ROLLOUTS, finished_at=None)
                | (~Q(state__in=OPEN_ROLLOUTS) & Q(finished_at__isnull=False)),
                name="rollout_finished_unless_open",
            ),
            CheckConstraint(
                condition=Q(state="holding", held_by__in=HoldReason.values) | (~Q(state="holding") & Q(held_by="")),
                name="rollout_held_by_something",
            ),
            CheckConstraint(
                condition=Q(approved_by=None) | Q(started_by=None) | ~Q(approved_by=F("started_by")),
                name="rollout_approved_by_another",
            ),
        )

    def __str__(self) -> str:
        return f"rollout of {self.revision}"

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_ROLLOUTS

    @property
    def is_last_stage(self) -> bool:
        """Whether the revision is active, or will be once it is approved."""
        return self.stage >= len(self.stages) - 1

    @property
    def stage_ends_at(self) -> datetime | None:
        """When the observation time of the current stage ends, pauses excluded; None while unknown."""
        since, scope = self.stage_converged_at, self.scope
        if since is None or scope is None or self.paused_at is not None:
            return None
        return since + timedelta(seconds=scope["observe_s"] + self.stage_paused_s)

    @property
    def scope(self) -> dict[str, Any] | None:
        """The current stage; None without stages."""
        return self.stages[self.stage] if self.stages else None


class RolloutHistoryEntry(models.Model):
    """One transition of a rollout. Immutable: a trigger enforces it (migration 0002)."""

    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="history")
    at = models.DateTimeField(default=timezone.now)
    transition = models.CharField(max_length=12)  # a name in rollout_transitions.TRANSITIONS, or "publish"
    before = models.CharField(max_length=17, choices=RolloutState, blank=True)  # "": the first step
    after = models.CharField(max_length=17, choices=RolloutState)
    stage = models.PositiveSmallIntegerField(default=0)  # after the transition
    # None: the control plane.
    by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="+")
    reason = models.CharField(max_length=500, blank=True)
    evidence = models.JSONField(null=True, blank=True)  # analysis results, rejections

    class Meta:
        ordering = ("pk",)

    def __str__(self) -> str:
        return f"{self.rollout}: {self.transition}"
