"""Who may do what."""

from django.conf import settings
from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint

from .project import Project


class Role(models.TextChoices):
    """What a person may do; each includes the ones before it."""

    VIEWER = "viewer", "Viewer"  # sees
    OPERATOR = "operator", "Operator"  # drains replicas, pauses and aborts rollouts, tries channels
    EDITOR = "editor", "Editor"  # drafts policies; changes groups, replicas, alert rules and channels
    APPROVER = "approver", "Approver"  # publishes; resumes, promotes and approves rollouts
    ADMIN = "admin", "Admin"  # pools, people, tokens, the audit log

    @property
    def rank(self) -> int:
        """Its place: 0 for the least."""
        return list(Role).index(self)

    def covers(self, other: "Role") -> bool:
        """Whether it includes ``other``."""
        return self.rank >= other.rank


class RoleAssignment(models.Model):
    """A role that somebody holds: in one project, or in all of them and in what belongs to none.

    What admins gave and what groups bring stand side by side; the greater one counts.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="roles")
    project = models.ForeignKey(Project, models.CASCADE, null=True, blank=True, related_name="roles")  # None: all
    role = models.CharField(max_length=8, choices=Role)
    from_groups = models.BooleanField(
        default=False, db_default=False
    )  # came with a group at the identity provider, and goes with it

    class Meta:
        ordering = ("user__username", "project__name")
        constraints = (
            UniqueConstraint(
                fields=["user", "project", "from_groups"], name="one_role_per_project", nulls_distinct=False
            ),
            CheckConstraint(condition=Q(role__in=Role.values), name="role_known"),
        )

    def __str__(self) -> str:
        return f"{self.user} {self.role} of {self.project or 'all projects'}"
