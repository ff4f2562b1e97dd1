"""What nobody wants to be told for a while."""

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, F, Q

from controlplane.models import Project


class Silence(models.Model):
    """Alerts with these labels are not told between two moments. They fire and end as ever.

    It reaches the alerts of its project; without one, those of all projects.
    """

    project = models.ForeignKey(Project, models.CASCADE, null=True, related_name="silences")
    matchers = models.JSONField()  # all of which must hold: telemetry.matchers
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    comment = models.CharField(max_length=500)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-ends_at", "-pk")
        constraints = (CheckConstraint(condition=Q(ends_at__gte=F("starts_at")), name="silence_ends_after_it_starts"),)
        indexes = (models.Index(fields=["ends_at"], name="silence_ends_at"),)

    def __str__(self) -> str:
        return self.comment
