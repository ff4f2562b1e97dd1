"""How a pool, or one task group of it, places requests; and every version of that.

What routers are told, numbered and encrypted.

Taking a policy revision to the fleet, and the record of every step on the way.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.conf import settings as django_settings
from django.db import models
from django.db.models import CheckConstraint, F, Q, UniqueConstraint, Value
from django.utils import timezone

from controlplane.errors import FrozenError
from controlplane.models.fleet import LONG_NAME, Pool, TaskGroup, long_name, well_formed


class RoutingPolicy(models.Model):
    """How requests are placed: a pool's own policy, or that of one of its task groups.

    A group without a policy, or whose policy has no live revision yet, is placed by its pool's.
    """

    name = long_name(unique=True)  # the pool's name, or pool.group; labels every figure
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

    def live(self) -> PolicyRevision | None:
        """The revision in force; a query. None for a group's policy that was never published."""
        return self.revisions.filter(state=RevisionState.LIVE).first()

    def canary(self) -> PolicyRevision | None:
        """The revision that is tried beside the one in force; a query."""
        return self.revisions.filter(state=RevisionState.CANARY).first()

    def draft(self) -> PolicyRevision | None:
        """The revision being edited; a query."""
        return self.revisions.filter(state=RevisionState.DRAFT).first()


class RevisionState(models.TextChoices):
    """draft -> live -> retired, or draft -> trial -> live or withdrawn; and no way back."""

    DRAFT = "draft", "Draft"
    CANARY = "trial", "On trial"  # published, and not in force: its rollout says for which requests it is tried
    LIVE = "live", "Live"  # in force
    RETIRED = "retired", "Retired"  # was in force
    WITHDRAWN = "withdrawn", "Withdrawn"  # was only ever tried


class PolicyRevision(models.Model):
    """One version of a routing policy. Once it was published only its state changes: an edit is a new revision.

    A trigger holds this in the database too (migrations 0002 and 0008).
    """

    policy = models.ForeignKey(RoutingPolicy, models.CASCADE, related_name="revisions")
    number = models.PositiveIntegerField()  # 1, 2, 3 ... within the policy
    state = models.CharField(max_length=9, choices=RevisionState, default=RevisionState.DRAFT)
    settings = models.JSONField()  # routing.schema.Settings with every default written out
    digest = models.CharField(max_length=64)  # SHA-256 of the settings, to tell whether two are the same
    author = models.ForeignKey(
        django_settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="revisions"
    )  # None: the system itself
    reason = models.CharField(max_length=500, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    published_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("policy__name", "-number")
        constraints = (
            UniqueConstraint(fields=["policy", "number"], name="revision_number_unique"),
            UniqueConstraint(fields=["policy"], condition=Q(state="live"), name="one_live_revision"),
            UniqueConstraint(fields=["policy"], condition=Q(state="draft"), name="one_draft"),
            UniqueConstraint(fields=["policy"], condition=Q(state="trial"), name="one_trial"),
            CheckConstraint(condition=Q(number__gt=0), name="revision_number_positive"),
            CheckConstraint(condition=Q(state__in=RevisionState.values), name="revision_state_known"),
            CheckConstraint(
                condition=Q(state="draft", published_at=None) | (~Q(state="draft") & Q(published_at__isnull=False)),
                name="revision_published_unless_draft",
            ),
        )

    def __str__(self) -> str:
        return f"{self.policy.name} r{self.number}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save a draft; FrozenError for a revision that was published (its state moves by ``services.trials``)."""
        if self.pk and self.state != RevisionState.DRAFT:
            raise FrozenError("policy revision", str(self))
        super().save(*args, **kwargs)

    @property
    def strategy(self) -> str:
        """The strategy's name, such as ``prefix_hash``."""
        return str(self.settings["strategy"])


class ConfigSnapshot(models.Model):
    """The whole configuration at one moment, as routers receive it. The newest is what every router should run.

    Written once, never changed: a trigger holds this in the database too (migration 0002).
    """

    number = models.PositiveBigIntegerField(unique=True)  # the wire's revision: 1, 2, 3 ...
    sha256 = models.CharField(max_length=64)  # of the config's bytes, as routers compute it
    document = models.JSONField()  # the config for people: its hash_secret is shown as ***
    encrypted = models.BinaryField()  # the very bytes that routers get, encrypted at rest
    reason = models.CharField(max_length=500)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-number",)
        constraints = (CheckConstraint(condition=Q(number__gt=0), name="snapshot_number_positive"),)

    def __str__(self) -> str:
        return f"snapshot {self.number}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save a new snapshot; FrozenError for one that exists."""
        if self.pk:
            raise FrozenError("configuration snapshot", str(self.number))
        super().save(*args, **kwargs)


class RolloutState(models.TextChoices):
    """Where a rollout stands; which moves lead from one to another is a table in
    ``services/policies/rollouts.py``.
    """

    AWAITING_APPROVAL = "awaiting_approval", "Awaiting approval"  # by somebody other than who published it
    PENDING = "pending", "Pending"  # no router runs it yet
    PROGRESSING = "progressing", "Progressing"  # routers run its present stage, or are about to
    PAUSED = "paused", "Paused"  # by a person: goes no further, and its guard still watches
    HOLDING = "holding", "Holding"  # goes no further until what holds it is over, or a person decides
    COMPLETE = "complete", "Complete"  # in force, and every router that is present runs it
    ABORTED = "aborted", "Aborted"  # by a person: withdrawn
    ROLLED_BACK = "rolled_back", "Rolled back"  # by the guard: withdrawn
    SUPERSEDED = "superseded", "Superseded"  # the policy's next publication came first


OPEN_ROLLOUTS = (
    RolloutState.AWAITING_APPROVAL,
    RolloutState.PENDING,
    RolloutState.PROGRESSING,
    RolloutState.PAUSED,
    RolloutState.HOLDING,
)


NONE_YET = Value([], models.JSONField())


class HoldReason(models.TextChoices):
    """What a rollout is held by."""

    REFUSAL = "refusal", "A router refuses the configuration"  # over as soon as none does
    GUARD = "guard", "The guard cannot tell"  # over with a later verdict, or by a person


class Rollout(models.Model):
    """One revision on its way to all requests of all routers, stage by stage.

    Without stages it is in force from the start, and only acknowledgements are waited for. With stages it is tried on
    more requests with each of them, and the last one puts it in force.
    """

    revision = models.ForeignKey(PolicyRevision, models.CASCADE, related_name="rollouts")
    snapshot = models.ForeignKey(
        ConfigSnapshot, models.PROTECT, null=True, blank=True, related_name="rollouts"
    )  # the first that holds its present stage; None until it is approved
    plan = models.CharField(
        max_length=12, default="all_at_once", db_default="all_at_once"
    )  # services.policies.rollout_plans.Plan
    state = models.CharField(max_length=17, choices=RolloutState, default=RolloutState.PENDING)
    held_by = models.CharField(max_length=7, choices=HoldReason, blank=True, default="", db_default="")
    why = models.CharField(max_length=500, blank=True, default="", db_default="")  # it is in this state

    # Of {"share", "routers", "groups", "observe_s"}; []: at once.
    stages = models.JSONField(default=list, db_default=NONE_YET, blank=True)
    stage = models.PositiveSmallIntegerField(default=0, db_default=0)  # its place in ``stages``
    stage_since = models.DateTimeField(null=True, blank=True)  # when it was widened to this stage
    stage_converged_at = models.DateTimeField(null=True, blank=True)  # when every router present first ran it
    paused_at = models.DateTimeField(null=True, blank=True)  # while it is
    stage_paused_s = models.FloatField(default=0.0, db_default=0.0)  # of pauses that are over, since it converged
    guard = models.JSONField(null=True, blank=True)  # services.guard_limits.GuardLimits; None: nobody watches
    readings = models.JSONField(default=list, db_default=NONE_YET, blank=True)  # what the guard read last of this stage
    readings_at = models.DateTimeField(null=True, blank=True)

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
        """Whether it may still move."""
        return self.state in OPEN_ROLLOUTS

    @property
    def is_last_stage(self) -> bool:
        """Whether nothing wider is left: the revision is in force, or will be once it is approved."""
        return self.stage >= len(self.stages) - 1

    @property
    def stage_ends_at(self) -> datetime | None:
        """When the present stage has been observed for its time, pauses left out; None while that is not known."""
        since, scope = self.stage_converged_at, self.scope
        if since is None or scope is None or self.paused_at is not None:
            return None
        return since + timedelta(seconds=scope["observe_s"] + self.stage_paused_s)

    @property
    def scope(self) -> dict[str, Any] | None:
        """The present stage; None where there are none."""
        return self.stages[self.stage] if self.stages else None


class RolloutStep(models.Model):
    """One move of a rollout: what, when, by whom, why. Never changed (a trigger refuses, migration 0008)."""

    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="steps")
    at = models.DateTimeField(default=timezone.now)
    move = models.CharField(max_length=12)  # services.policies.rollout_transitions
    before = models.CharField(max_length=17, choices=RolloutState, blank=True)  # "" of the first
    after = models.CharField(max_length=17, choices=RolloutState)
    stage = models.PositiveSmallIntegerField(default=0)  # after the move
    by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="+"
    )  # None: the control plane itself
    reason = models.CharField(max_length=500, blank=True)
    evidence = models.JSONField(null=True, blank=True)  # what it was decided by: readings, refusals

    class Meta:
        ordering = ("pk",)

    def __str__(self) -> str:
        return f"{self.rollout}: {self.move}"
