"""Who may do what.

What a script signs in with.

Where somebody is signed in.

Who is kept from guessing on.

Answers that are given again when a request is repeated.
"""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import CheckConstraint, Q, UniqueConstraint
from django.utils import timezone

from controlplane.models.fleet import Project


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

    def covers(self, other: Role) -> bool:
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


class Scope(models.TextChoices):
    """What a token may do; each includes the ones before it."""

    READ = "read", "Read"
    WRITE = "write", "Read and change"
    ADMIN = "admin", "Read, change and manage tokens"


class ApiToken(models.Model):
    """A token that acts for a user. Only a keyed hash of its secret is kept, so it can be shown but once."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=100)  # what it is for
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


class PersonSession(models.Model):
    """A signed-in browser session, for the list of sessions; the session data itself is Django's, and encrypted.

    One whose session is gone is none any more; it is swept away later.
    """

    user = models.ForeignKey(User, models.CASCADE, related_name="browsers")
    key = models.CharField(max_length=40, unique=True, editable=False)  # Django's; whoever knows it is in: never shown
    address = models.CharField(max_length=45, blank=True)  # where the last request that was noted came from
    agent = models.CharField(max_length=200, blank=True)  # what the browser calls itself; text of others
    began_at = models.DateTimeField(default=timezone.now)
    seen_at = models.DateTimeField(default=timezone.now)  # noted every few minutes

    class Meta:
        ordering = ("-seen_at", "-pk")

    def __str__(self) -> str:
        return f"{self.user} from {self.address or 'an unknown address'}"


class SignInLock(models.Model):
    """Somebody who may not sign in from an address for a while, because it failed too often from there.

    For people to see and to lift; what refuses is the count itself (``controlplane/accounts/throttle.py``).
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
    """What was answered to a ``POST`` with an ``Idempotency-Key``, written in the transaction of what it changed.

    So there is an answer exactly where there was a change, whatever crashed in between.
    """

    owner = models.CharField(max_length=40)  # token:<id> or user:<id>: nobody meets another's keys
    key = models.CharField(max_length=255)  # as the client chose it
    fingerprint = models.CharField(max_length=64)  # keyed hash of address and body: the same key, the same request
    status = models.PositiveSmallIntegerField()
    headers = models.JSONField()
    encrypted = models.BinaryField()  # the body; it may hold a secret that is shown this once
    created_at = models.DateTimeField(auto_now_add=True, db_index=True)

    class Meta:
        constraints = (UniqueConstraint(fields=["owner", "key"], name="idempotency_key_unique"),)

    def __str__(self) -> str:
        return f"answer {self.status} to {self.owner}"
