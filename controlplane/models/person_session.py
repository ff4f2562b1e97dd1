"""Where somebody is signed in."""

from django.contrib.auth.models import User
from django.db import models
from django.utils import timezone


class PersonSession(models.Model):
    """A browser in which somebody is signed in: what of it can be listed. The session itself is Django's, and sealed.

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
