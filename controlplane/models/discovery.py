"""Where a pool's replicas may be found.

An engine that a source found.
"""

from __future__ import annotations

from datetime import timedelta

from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint
from django.utils import timezone

from controlplane.models.fleet import SHORT_NAME, Pool, Replica, long_name, short_name, well_formed


class Adoption(models.TextChoices):
    """What happens to an engine that a source finds."""

    PROPOSE = "propose", "Propose: a person adopts or dismisses each"
    ADOPT = "adopt", "Adopt: each becomes a replica by itself"


class SourceStatus(models.TextChoices):
    """How a source does, worked out of its row."""

    NEW = "new", "New"  # never looked
    OK = "ok", "OK"
    HOLDING = "holding", "Holding"  # more are missing than may go at once
    FAILING = "failing", "Failing"  # the last look found out nothing; what is known stays
    STALE = "stale", "Stale"  # no look succeeded for three intervals
    PAUSED = "paused", "Paused"


class ReplicaSource(models.Model):
    """Somewhere to look for a pool's replicas, again and again. What a look finds is ``DiscoveredReplica``.

    ``next_look_at`` and ``looks`` are the claim on it: who looks moves both, and an answer counts only while
    ``looks`` is still the number it was asked under.
    """

    pool = models.ForeignKey(Pool, models.PROTECT, related_name="sources")
    name = short_name(unique=True)
    kind = models.CharField(max_length=16)  # a name of discovery.KINDS
    settings = models.JSONField()  # of its kind, every default written out; no secret
    encrypted = models.BinaryField(null=True, blank=True)  # its secret, encrypted; None where it has none
    adoption = models.CharField(max_length=8, choices=Adoption, default=Adoption.PROPOSE)
    enabled = models.BooleanField(default=True)
    interval_s = models.FloatField(default=30.0)  # from one look to the next
    deadline_s = models.FloatField(default=10.0)  # of one look
    drain_after_s = models.FloatField(default=60.0)  # missing for so long, its replica drains
    remove_after_s = models.FloatField(default=600.0)  # and missing for so long, it is removed
    max_vanished_ratio = models.FloatField(default=0.5)  # of the pool's replicas that may be on their way out at once
    max_targets = models.PositiveIntegerField(default=256)  # an answer with more is refused
    created_at = models.DateTimeField(auto_now_add=True)
    settings_changed_at = models.DateTimeField(null=True, blank=True)  # None: they are as they were first

    next_look_at = models.DateTimeField(default=timezone.now)
    looks = models.PositiveBigIntegerField(default=0)
    looked_at = models.DateTimeField(null=True, blank=True)  # the end of the last look
    succeeded_at = models.DateTimeField(null=True, blank=True)  # of the last that found something
    failing_since = models.DateTimeField(null=True, blank=True)
    error = models.CharField(max_length=500, blank=True)  # of the last look; "" where it found something
    held = models.CharField(max_length=500, blank=True)  # why fewer go than are missing
    refused = models.JSONField(default=list)  # what the last answer named and nobody may use, in words
    found = models.PositiveIntegerField(null=True, blank=True)  # targets in the last answer
    new = models.PositiveIntegerField(null=True, blank=True)  # of them, never seen before
    vanished = models.PositiveIntegerField(null=True, blank=True)  # known ones that were not in it

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
        indexes = (models.Index(fields=["next_look_at"], name="source_due"),)

    def __str__(self) -> str:
        return self.name

    @property
    def status(self) -> SourceStatus:
        """How it does now."""
        if not self.enabled:
            return SourceStatus.PAUSED
        if self.looked_at is None:
            return SourceStatus.NEW
        if self.is_stale:
            return SourceStatus.STALE
        if self.error:
            return SourceStatus.FAILING
        return SourceStatus.HOLDING if self.held else SourceStatus.OK

    @property
    def is_stale(self) -> bool:
        """Whether what is known is older than three looks would be."""
        if self.looked_at is None:
            return False
        since = self.succeeded_at or self.created_at
        return timezone.now() - since > timedelta(seconds=3 * self.interval_s + self.deadline_s)


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
