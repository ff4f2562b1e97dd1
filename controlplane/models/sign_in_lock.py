"""Who is kept from guessing on."""

from django.conf import settings
from django.db import models
from django.db.models import UniqueConstraint


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
