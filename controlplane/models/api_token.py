"""What a script signs in with."""

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import CheckConstraint, Q


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
