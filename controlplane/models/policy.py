"""How a pool, or one task group of it, places requests; and every version of that."""

from typing import Any

from django.conf import settings as django_settings
from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint

from controlplane.errors import FrozenError

from .names import LONG_NAME, long_name, well_formed
from .pool import Pool
from .task_group import TaskGroup


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

    def live(self) -> "PolicyRevision | None":
        """The revision in force; a query. None for a group's policy that was never published."""
        return self.revisions.filter(state=RevisionState.LIVE).first()

    def on_trial(self) -> "PolicyRevision | None":
        """The revision that is tried beside the one in force; a query."""
        return self.revisions.filter(state=RevisionState.TRIAL).first()

    def draft(self) -> "PolicyRevision | None":
        """The revision being edited; a query."""
        return self.revisions.filter(state=RevisionState.DRAFT).first()


class RevisionState(models.TextChoices):
    """draft -> live -> retired, or draft -> trial -> live or withdrawn; and no way back."""

    DRAFT = "draft", "Draft"
    TRIAL = "trial", "On trial"  # published, and not in force: its rollout says for which requests it is tried
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
