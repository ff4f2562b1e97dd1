"""Taking a policy revision to every router."""

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint

from .config_snapshot import ConfigSnapshot
from .policy import PolicyRevision


class RolloutState(models.TextChoices):
    """pending -> progressing -> complete; superseded when the policy's next revision came first."""

    PENDING = "pending", "Pending"  # no router runs it yet
    PROGRESSING = "progressing", "Progressing"  # some do
    COMPLETE = "complete", "Complete"  # every router that is present does
    SUPERSEDED = "superseded", "Superseded"


OPEN_ROLLOUTS = (RolloutState.PENDING, RolloutState.PROGRESSING)


class Rollout(models.Model):
    """One revision on its way to all routers, from publishing until each of them acknowledged."""

    revision = models.ForeignKey(PolicyRevision, models.CASCADE, related_name="rollouts")
    snapshot = models.ForeignKey(ConfigSnapshot, models.PROTECT, related_name="rollouts")  # the first that holds it
    state = models.CharField(max_length=11, choices=RolloutState, default=RolloutState.PENDING)
    started_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="+")
    started_at = models.DateTimeField(auto_now_add=True)
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
        )

    def __str__(self) -> str:
        return f"rollout of {self.revision}"
