"""Replica sources and the engines that they discover."""

from __future__ import annotations

from datetime import timedelta

from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint
from django.utils import timezone

from controlplane.models.fleet import SHORT_NAME, Pool, Replica, VersionedModel, long_name, short_name, well_formed


class Adoption(models.TextChoices):
    """What happens to an engine that a source discovers."""

    PROPOSE = "propose", "Propose: a user adopts each engine"
    ADOPT = "adopt", "Follow: each engine becomes a replica automatically"


class SourceStatus(models.TextChoices):
    """Computed from a source's row."""

    NEW = "new", "New"  # never polled
    OK = "ok", "OK"
    HOLDING = "holding", "On hold"  # more replicas are missing than may be removed at once
    FAILING = "failing", "Failing"  # the last poll failed; discovered engines stay
    STALE = "stale", "Stale"  # no poll succeeded for three intervals
    PAUSED = "paused", "Paused"


class ReplicaSource(VersionedModel):
    """A source that is polled for a pool's replicas; the engines found are ``DiscoveredReplica`` rows.

    ``next_poll_at`` and ``poll_number`` are the claim of a poll: claiming changes both. A result is accepted only if
    ``poll_number`` has not changed since.
    """

    pool = models.ForeignKey(Pool, models.PROTECT, related_name="sources")
    name = short_name(unique=True)
    kind = models.CharField(max_length=16)  # a name of discovery.KINDS
    settings = models.JSONField()  # of its kind, with defaults filled in; no secret
    encrypted = models.BinaryField(null=True, blank=True)  # its secret; None: none
    adoption = models.CharField(max_length=8, choices=Adoption, default=Adoption.PROPOSE)
    enabled = models.BooleanField(default=True)
    interval_s = models.FloatField(default=30.0)  # between polls
    deadline_s = models.FloatField(default=10.0)  # of one poll
    drain_after_s = models.FloatField(default=60.0)  # missing for so long, a replica drains
    remove_after_s = models.FloatField(default=600.0)  # missing for so long, a replica is removed
    max_vanished_ratio = models.FloatField(default=0.5)  # share of the pool's replicas that may drain at once
    max_targets = models.PositiveIntegerField(default=256)  # a result with more is rejected
    created_at = models.DateTimeField(auto_now_add=True)
    settings_changed_at = models.DateTimeField(null=True, blank=True)  # None: never

    next_poll_at = models.DateTimeField(default=timezone.now)
    poll_number = models.PositiveBigIntegerField(default=0)  # of the last claim; a change of settings increases it, too
    last_poll_at = models.DateTimeField(null=True, blank=True)  # end of the last poll
    succeeded_at = models.DateTimeField(null=True, blank=True)  # of the last successful poll
    failing_since = models.DateTimeField(null=True, blank=True)
    error = models.CharField(max_length=500, blank=True)  # of the last poll; "" if it succeeded
    hold_reason = models.CharField(max_length=500, blank=True)  # why missing replicas are not removed
    rejected = models.JSONField(default=list)  # why entries of the last result were rejected
    found = models.PositiveIntegerField(null=True, blank=True)  # targets in the last result
    new = models.PositiveIntegerField(null=True, blank=True)  # new targets in the last result
    vanished = models.PositiveIntegerField(null=True, blank=True)  # discovered engines that were missing

    class Meta:
        ordering = ("name",)
        constraints = (
            well_formed("source_name_form", SHORT_NAME),
            CheckConstraint(condition=Q(adoption__in=Adoption.values), name="source_adoption_known"),
            CheckConstraint(condition=Q(interval_s__gte=5, interval_s__lte=86_400), name="source_interval_range"),
            CheckConstraint(condition=Q(deadline_s__gte=1, deadline_s__lte=60), name="source_deadline_range"),
            CheckConstraint(condition=Q(drain_after_s__gte=0), name="source_drain_range"),
            CheckConstraint(
                condition=Q(remove_after_s__gte=models.F("drain_after_s")), name="source_drains_before_it_removes"
            ),
            CheckConstraint(
                condition=Q(max_vanished_ratio__gt=0, max_vanished_ratio__lte=1), name="source_vanished_range"
            ),
            CheckConstraint(condition=Q(max_targets__gte=1, max_targets__lte=1000), name="source_targets_range"),
        )
        indexes = (models.Index(fields=["next_poll_at"], name="source_due"),)

    def __str__(self) -> str:
        return self.name

    @property
    def status(self) -> SourceStatus:
        if not self.enabled:
            return SourceStatus.PAUSED
        if self.last_poll_at is None:
            return SourceStatus.NEW
        if self.is_stale:
            return SourceStatus.STALE
        if self.error:
            return SourceStatus.FAILING
        return SourceStatus.HOLDING if self.hold_reason else SourceStatus.OK

    @property
    def is_stale(self) -> bool:
        """Whether no poll has succeeded for three intervals."""
        if self.last_poll_at is None:
            return False
        since = self.succeeded_at or self.created_at
        return timezone.now() - since > timedelta(seconds=3 * self.interval_s + self.deadline_s)


class DiscoveredState(models.TextChoices):
    """The decision about a discovered engine."""

    PROPOSED = "proposed", "Proposed"  # until a user decides, or it is ready
    ADOPTED = "adopted", "Adopted"  # it is a replica, updated from the source
    DISMISSED = "dismissed", "Dismissed"  # a user removed its replica: it is not adopted again by itself


class TargetCondition(models.TextChoices):
    """State of an engine, as its source last reported it."""

    READY = "ready", "Ready"
    NOT_READY = "not_ready", "Not ready"
    TERMINATING = "terminating", "Terminating"


class DiscoveredReplica(models.Model):
    """An engine that a source reported. ``key`` is its identity there, such as a pod name, which outlives addresses."""

    source = models.ForeignKey(ReplicaSource, models.CASCADE, related_name="discovered")
    key = models.CharField(max_length=253)
    name = long_name()  # of its replica
    url = models.CharField(max_length=2048)
    condition = models.CharField(max_length=12, choices=TargetCondition, default=TargetCondition.READY)
    labels = models.JSONField(default=dict)
    state = models.CharField(max_length=9, choices=DiscoveredState, default=DiscoveredState.PROPOSED)
    # Of an adopted engine; None after the replica was removed.
    replica = models.OneToOneField(Replica, models.SET_NULL, null=True, blank=True, related_name="discovered")
    first_seen_at = models.DateTimeField(default=timezone.now)
    last_seen_at = models.DateTimeField(default=timezone.now)
    missing_since = models.DateTimeField(null=True, blank=True)  # first result without it; None: present
    drained_at = models.DateTimeField(null=True, blank=True)  # when the source required draining; None: it does not
    drained_here = models.BooleanField(default=False)  # drained by the source, which may activate it again
    problem = models.CharField(max_length=500, blank=True)  # why a pending action failed

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
        """Whether a user has to decide about it."""
        return self.state == DiscoveredState.PROPOSED and self.missing_since is None
