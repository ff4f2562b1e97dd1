"""Roles, API tokens, browser sessions, sign-in locks and idempotency records."""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint
from django.utils import timezone

from controlplane.models.fleet import Project


class Role(models.TextChoices):
    """Each role includes the permissions of the ones before it."""

    VIEWER = "viewer", "Viewer"  # views pages
    OPERATOR = "operator", "Operator"  # drains replicas, pauses and aborts rollouts, tests channels
    EDITOR = "editor", "Editor"  # drafts policies; changes groups, replicas, alert rules and channels
    APPROVER = "approver", "Approver"  # publishes; resumes, promotes and approves rollouts
    ADMIN = "admin", "Admin"  # manages pools, users and tokens; reads the audit log

    @property
    def rank(self) -> int:
        return list(Role).index(self)

    def covers(self, other: Role) -> bool:
        return self.rank >= other.rank


class RoleAssignment(models.Model):
    """A user's role in one project, or in all projects and for objects without a project.

    Roles from admins and from groups of the identity provider coexist; the higher one applies.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="roles")
    project = models.ForeignKey(Project, models.CASCADE, null=True, blank=True, related_name="roles")  # None: all
    role = models.CharField(max_length=8, choices=Role)
    from_groups = models.BooleanField(default=False, db_default=False)  # by a group of the identity provider

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


class Scope(models.TextChoices):
    """Permissions of a token; each includes the ones before it."""

    READ = "read", "Read"
    WRITE = "write", "Read and change"
    ADMIN = "admin", "Read, change and manage tokens"


class ApiToken(models.Model):
    """A token that acts for a user. Only a keyed hash of its secret is stored, so the secret is shown once."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=100)
    key_id = models.CharField(max_length=16, unique=True)  # the public part: wp_<key_id>.<secret>
    digest = models.CharField(max_length=64)  # HMAC-SHA256 of the secret, hex
    scopes = ArrayField(models.CharField(max_length=8, choices=Scope))
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)  # None: never
    last_used_at = models.DateTimeField(null=True, blank=True)  # to the minute
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-created_at", "-pk")
        constraints = (
            CheckConstraint(
                condition=Q(scopes__contained_by=Scope.values) & Q(scopes__len__gt=0), name="token_scopes_known"
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} (wp_{self.key_id})"

    @property
    def is_expired(self) -> bool:
        """Whether it is no longer valid because of its age."""
        return self.expires_at is not None and self.expires_at <= timezone.now()


class UserSession(models.Model):
    """A signed-in browser session, for the list of sessions. Django stores the session data.

    A row without a Django session is ignored, and deleted later.
    """

    user = models.ForeignKey(User, models.CASCADE, related_name="browser_sessions")
    key = models.CharField(max_length=40, unique=True, editable=False)  # Django's session key: never shown
    address = models.CharField(max_length=45, blank=True)  # of the last recorded request
    agent = models.CharField(max_length=200, blank=True)  # User-Agent header: untrusted text
    started_at = models.DateTimeField(default=timezone.now)
    seen_at = models.DateTimeField(default=timezone.now)  # updated every few minutes

    class Meta:
        ordering = ("-seen_at", "-pk")

    def __str__(self) -> str:
        return f"{self.user} from {self.address or 'an unknown address'}"


class SignInLock(models.Model):
    """A user who may not sign in from an address for a while, after too many failures from there.

    For admins to see and lift; the counter in ``controlplane/accounts/sign_in_methods.py`` enforces it.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="sign_in_locks")
    address = models.CharField(max_length=45, blank=True)
    until = models.DateTimeField()

    class Meta:
        ordering = ("-until",)
        constraints = (UniqueConstraint(fields=["user", "address"], name="one_lock_per_address"),)

    def __str__(self) -> str:
        return f"{self.user} from {self.address}"


class IdempotencyRecord(models.Model):
    """The response to a ``POST`` with an ``Idempotency-Key``, stored in the transaction of its change.

    So a response exists exactly if the change was made, whatever crashed in between.
    """

    owner = models.CharField(max_length=40)  # token:<id> or user:<id>
    key = models.CharField(max_length=255)
    fingerprint = models.CharField(max_length=64)  # keyed hash of URL and body
    status = models.PositiveSmallIntegerField()
    headers = models.JSONField()
    encrypted = models.BinaryField()  # the body, which may contain a secret that is shown once
    created_at = models.DateTimeField(auto_now_add=True, db_index=True)

    class Meta:
        constraints = (UniqueConstraint(fields=["owner", "key"], name="idempotency_key_unique"),)

    def __str__(self) -> str:
        return f"response {self.status} to {self.owner}"
