"""An engine that a source found."""

from __future__ import annotations

from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint
from django.utils import timezone

from .names import long_name
from .replica import Replica
from .source import ReplicaSource


class DiscoveredState(models.TextChoices):
    """What was decided about an engine that a source found."""

    PROPOSED = "proposed", "Proposed"  # waits for a person, or until it is ready
    ADOPTED = "adopted", "Adopted"  # it is a replica, and follows what the source says
    DISMISSED = "dismissed", "Dismissed"  # a person wants none of it


class TargetCondition(models.TextChoices):
    """What the source said of it when it last named it."""

    READY = "ready", "Ready"
    NOT_READY = "not_ready", "Not ready"
    TERMINATING = "terminating", "Terminating"


class DiscoveredReplica(models.Model):
    """An engine as its source knows it. ``key`` is its identity there: a pod's name survives a new address."""

    source = models.ForeignKey(ReplicaSource, models.CASCADE, related_name="discovered")
    key = models.CharField(max_length=253)
    name = long_name()  # what its replica is, or would be, called
    url = models.CharField(max_length=2048)
    condition = models.CharField(max_length=12, choices=TargetCondition, default=TargetCondition.READY)
    labels = models.JSONField(default=dict)
    state = models.CharField(max_length=9, choices=DiscoveredState, default=DiscoveredState.PROPOSED)
    replica = models.OneToOneField(
        Replica, models.SET_NULL, null=True, blank=True, related_name="discovered"
    )  # of an adopted one; None once somebody removed it
    first_seen_at = models.DateTimeField(default=timezone.now)
    last_seen_at = models.DateTimeField(default=timezone.now)
    missing_since = models.DateTimeField(null=True, blank=True)  # the first answer without it; None: it is there
    drained_at = models.DateTimeField(null=True, blank=True)  # when its source said to drain it; None: it did not
    drained_here = models.BooleanField(default=False)  # the source drained it, and may activate it again
    problem = models.CharField(max_length=500, blank=True)  # why what should happen to it cannot

    class Meta:
        ordering = ("key",)
        constraints = (
            UniqueConstraint(fields=["source", "key"], name="discovered_once"),
            CheckConstraint(condition=Q(state__in=DiscoveredState.values), name="discovered_state_known"),
            CheckConstraint(condition=Q(replica=None) | Q(state="adopted"), name="discovered_replica_is_adopted"),
        )

    def __str__(self) -> str:
        return self.key

    @property
    def is_open(self) -> bool:
        """Whether a person has to decide about it."""
        return self.state == DiscoveredState.PROPOSED and self.missing_since is None
