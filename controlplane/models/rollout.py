"""Taking a policy revision to the fleet, and the record of every step on the way."""

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, F, Q, UniqueConstraint, Value
from django.utils import timezone

from .config_snapshot import ConfigSnapshot
from .policy import PolicyRevision


class RolloutState(models.TextChoices):
    """Where a rollout stands; which moves lead from one to another is a table in ``services/rollouts/steering.py``."""

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


class HeldBy(models.TextChoices):
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
    )  # services.rollouts.plans.Plan
    state = models.CharField(max_length=17, choices=RolloutState, default=RolloutState.PENDING)
    held_by = models.CharField(max_length=7, choices=HeldBy, blank=True, default="", db_default="")
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
                condition=Q(state="holding", held_by__in=HeldBy.values) | (~Q(state="holding") & Q(held_by="")),
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
    move = models.CharField(max_length=12)  # services.rollouts.MOVES
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
